"""The pages in a real browser (`make test-browser`): they open, sort, hover and slide, log no error, fit a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from tests.evaluation.result_files import cell, perplexity_cells, write_results

from offramp.commands.report import report
from offramp.evaluation.explanations import ExplainedPass, Explanation, LayerStep
from offramp.evaluation.pages import explanation_page

SHOTS = Path(__file__).parents[1] / "build" / "screenshots"
SIZES = {"desk": 1100, "phone": 375}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_results(tmp_path)


@pytest.fixture(params=SIZES)
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    look: Any = "dark" if request.param == "phone" else "light"
    opened = browser.new_page(viewport={"width": SIZES[request.param], "height": 800}, color_scheme=look)
    wrong: list[str] = []
    opened.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda sent: wrong.append(sent.url) if not sent.url.startswith("file:") else None)
    yield opened
    SHOTS.mkdir(parents=True, exist_ok=True)
    opened.screenshot(path=str(SHOTS / f"{request.node.name}.png"), full_page=True)
    opened.close()
    assert not wrong


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


@pytest.fixture
def explain_page(tmp_path: Path) -> Path:
    tokens = ["[CLS]", "a", "rather", "long", "and", "winding", "sentence", "about", "films", "[SEP]"]

    def step(layer: int, gone: int) -> LayerStep:
        states = ["live"] * (len(tokens) - gone) + ["gone"] * gone
        prediction = {"label": "positive", "scores": {"positive": 0.5 + layer / 10, "negative": 0.5 - layer / 10}}
        return LayerStep(layer, states, prediction, f"uncertainty {0.6 - layer / 10:.2f} ≥ 0.31", True)

    passes = [
        ExplainedPass({}, [step(i, 2 * i) for i in range(last + 1)], {"label": f"after {last}"}, float(last), last / 4)
        for last in range(5)
    ]
    header = ("run", "branchynet", "classification", 4, {"text": "…"})
    explanation = Explanation(*header, tokens, list(range(10)), 0, 1e7, passes, 2)
    explanation_page(explanation, str(tmp_path / "explain.html"))
    return tmp_path / "explain.html"


def test_explain_page_slides_over_budgets(page: Page, explain_page: Path) -> None:
    page.goto(explain_page.as_uri())
    assert page.locator(".layer").count() == 3 and "after 2" in page.locator("#final").inner_text()
    slider = page.locator("#budget")
    slider.focus()
    slider.press("ArrowRight")
    assert page.locator(".layer").count() == 4 and "75.0 %" in page.locator("#spent").inner_text()
    assert page.locator(".layer").last.locator(".gone").count() == 6
    slider.press("Home")
    assert page.locator(".layer").count() == 1 and fits(page)


@pytest.mark.parametrize(("labels", "shown"), [(["good", "long"], "good, long"), ([], "none")])
def test_explain_page_shows_several_labels(page: Page, tmp_path: Path, labels: list[str], shown: str) -> None:
    prediction = {"labels": labels, "scores": {"good": 0.5, "long": 0.5}}
    step = LayerStep(0, ["live"], prediction, "the last exit", True)
    header = ("run", "full", "multi_label", 0, {"text": "…"})
    explanation = Explanation(*header, ["a"], [0], 0, 1e7, [ExplainedPass({}, [step], prediction, 0.0, 1.0)], 0)
    explanation_page(explanation, str(tmp_path / "labels.html"))
    page.goto((tmp_path / "labels.html").as_uri())
    assert page.locator("#final").inner_text().startswith(f"{shown}: exit after layer 0")


def test_report_page_sorts_and_shows_the_values_of_a_mark(page: Page, folder: Path) -> None:
    report(str(folder), out=str(folder / "report"))
    page.goto((folder / "report" / "report.html").as_uri())
    rows = page.locator("#table tbody tr")
    first = rows.first.inner_text()
    page.get_by_role("button", name="method ▲").click()
    assert rows.count() == 2 and rows.first.inner_text() != first
    assert page.locator("#table th").first.get_attribute("aria-sort") == "descending"
    page.locator(".mark").first.focus()
    assert "of the full MACs" in page.locator("#tip").inner_text()
    page.locator(".mark").last.hover()
    assert page.locator("#tip").is_visible()
    page.get_by_role("button", name="branchynet", exact=True).click()
    assert page.get_by_role("button", name="branchynet", exact=True).get_attribute("aria-pressed") == "false"
    assert page.locator("#times .mark").count() == 1  # the peer
    page.get_by_role("button", name="branchynet", exact=True).click()
    assert page.locator("#times .mark").count() == 3 and page.locator("#times polyline").count() == 1
    page.get_by_role("button", name="batch 32").click()
    page.locator("#times .mark").first.focus()
    assert "ms a row (speed/bench.json)" in page.locator("#tip").inner_text()
    assert page.locator("#bybatch .mark").count() == 6 and page.locator("#bylength polyline").count() == 2
    assert page.locator("#speed tbody tr").count() == 6 and "offramp bench" in page.locator("#sources").inner_text()
    page.locator("#sets button").nth(1).click()
    assert page.locator("#heading").inner_text() == "speed: sst2" and fits(page)


def test_report_page_draws_the_best_perplexities_which_are_the_lowest(page: Page, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(perplexity_cells(5.0, [(0.2, 9.0), (0.6, 5.04), (1.0, 5.0)])))
    report(str(tmp_path), out=str(tmp_path / "report"))
    page.goto((tmp_path / "report" / "report.html").as_uri())
    marks = page.locator("#curves .mark").all()
    labels = [str(mark.get_attribute("aria-label")) for mark in marks]
    assert any("perplexity 5.04" in label for label in labels) and not any("9.00" in label for label in labels)
    front = str(page.locator("#curves path.front").get_attribute("d"))
    assert front.count("H") == 1, "from 5.04 down to 5.0"


def test_report_page_folds_the_tables_of_single_studies(page: Page, tmp_path: Path) -> None:
    for folder in ("sst2/deebert", "sst2/deebert/auto", "sst2/deebert/defaults"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "cells.json").write_text(json.dumps([cell("deebert"), cell("deebert", 0.4, 0.8)]))
    report(str(tmp_path), out=str(tmp_path / "report"))
    page.goto((tmp_path / "report" / "report.html").as_uri())
    assert page.locator("#heading").inner_text() == "sst2"
    assert not page.get_by_role("button", name="auto: sst2").is_visible()
    page.get_by_text("2 tables of single studies").click()
    page.get_by_role("button", name="auto: sst2").click()
    assert page.locator("#heading").inner_text() == "auto: sst2"
    assert page.get_by_role("button", name="defaults: sst2").is_visible() and fits(page)


def test_report_page_colours_six_methods_and_opens_on_the_largest_set(page: Page, tmp_path: Path) -> None:
    for number in range(9):  # all on the Pareto front
        content = cell(f"method{number}", share=0.1 * (number + 1), score=0.8 + 0.01 * number, data="large")
        if number == 8:
            content["trained"] = {"options": {"pool": "mean", "exit0": "False"}}
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    (tmp_path / "budget.json").write_text(json.dumps(cell("other", 0.098, 0.7, chosen={"by": "budget", "value": 0.1})))
    report(str(tmp_path), out=str(tmp_path / "report"))
    page.goto((tmp_path / "report" / "report.html").as_uri())
    assert page.locator("#heading").inner_text() == "large"
    buttons = page.locator("#legend button")
    pressed = [buttons.nth(n).get_attribute("aria-pressed") for n in range(buttons.count())]
    assert pressed == ["true"] * 6 + ["false"] * 3
    dots = [buttons.nth(n).locator("i").evaluate("dot => dot.style.background") for n in range(buttons.count())]
    assert len(set(dots[:6])) == 6 and len(set(dots[6:])) == 1 and not set(dots[:6]) & set(dots[6:])
    assert page.locator("#curves .mark").count() == 12 and page.locator("#curves polyline").count() == 9
    buttons.nth(6).click()
    assert page.locator("#curves .mark").count() == 14  # the point of its curve, and full depth
    assert "logarithmic" in (page.locator("#curves svg").text_content() or "")
    heads = page.locator("#table th").all_inner_texts()
    assert [text.split(" ▲")[0] for text in heads[:5]] == ["method", "model", "full depth", "chosen ≤ 1.0", "ms a row"]
    assert page.locator("#table details").count() == 1 and not page.get_by_text("pool=mean").first.is_visible()
    page.locator("#table summary").click()
    assert page.get_by_text("pool=mean").first.is_visible() and fits(page)
    page.locator("#sets button", has_text="sst2").click()
    page.locator("#curves .mark").last.focus()
    assert "budget 0.1: accuracy 70.00" in page.locator("#tip").inner_text()
    assert page.locator("#table tbody td").nth(2).inner_text() == "–"
