"""The pages in a real browser (`make test-browser`): they open, sort, hover, slide, log no error and fit a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.evaluation.test_collect import folder as _folder  # the same made-up results

from offramp.commands.report import report
from offramp.evaluation.explanations import ExplainedPass, Explanation, LayerStep
from offramp.evaluation.pages import explanation_page

folder = _folder
SHOTS = Path(__file__).parents[1] / "build" / "screenshots"
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
SIZES = {"desk": 1100, "phone": 375}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    where = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as tool:
        made = tool.chromium.launch(executable_path=where, args=QUIET)
        yield made
        made.close()


@pytest.fixture(params=SIZES)
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    look: Any = "dark" if request.param == "phone" else "light"
    made = browser.new_page(viewport={"width": SIZES[request.param], "height": 800}, color_scheme=look)
    wrong: list[str] = []
    made.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith("file:") else None)
    yield made
    SHOTS.mkdir(parents=True, exist_ok=True)
    made.screenshot(path=str(SHOTS / f"{request.node.name}.png"), full_page=True)
    made.close()
    assert not wrong


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


@pytest.fixture
def story(tmp_path: Path) -> Path:
    tokens = ["[CLS]", "a", "rather", "long", "and", "winding", "sentence", "about", "films", "[SEP]"]

    def step(layer: int, gone: int) -> LayerStep:
        states = ["live"] * (len(tokens) - gone) + ["gone"] * gone
        said = {"label": "positive", "scores": {"positive": 0.5 + layer / 10, "negative": 0.5 - layer / 10}}
        return LayerStep(layer, states, said, f"doubt {0.6 - layer / 10:.2f} ≥ 0.31", True)

    stories = [
        ExplainedPass({}, [step(i, 2 * i) for i in range(last + 1)], {"label": f"after {last}"}, float(last), last / 4)
        for last in range(5)
    ]
    about = ("run", "branchynet", "classification", 4, {"text": "…"})
    made = Explanation(*about, tokens, list(range(10)), 0, 1e7, stories, 2)
    explanation_page(made, str(tmp_path / "explain.html"))
    return tmp_path / "explain.html"


def test_explain_slides_over_budgets(page: Page, story: Path) -> None:
    page.goto(story.as_uri())
    assert page.locator(".layer").count() == 3 and "after 2" in page.locator("#final").inner_text()
    slider = page.locator("#budget")
    slider.focus()
    slider.press("ArrowRight")
    assert page.locator(".layer").count() == 4 and "75.0 %" in page.locator("#asked").inner_text()
    assert page.locator(".layer").last.locator(".gone").count() == 6
    slider.press("Home")
    assert page.locator(".layer").count() == 1 and fits(page)


def test_report_sorts_and_tells_what_is_pointed_at(page: Page, folder: Path) -> None:
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
    page.locator("#legend button").first.click()
    assert page.locator("#legend button").first.get_attribute("aria-pressed") == "false"
    assert page.locator("#times .mark").count() == 1  # the peer
    page.locator("#legend button").first.click()
    assert page.locator("#times .mark").count() == 3 and page.locator("#times polyline").count() == 1
    page.get_by_role("button", name="batch 32").click()
    page.locator("#times .mark").first.focus()
    assert "ms a row (speed/bench.json)" in page.locator("#tip").inner_text()
    assert page.locator("#bybatch .mark").count() == 6 and page.locator("#bylength polyline").count() == 2
    assert page.locator("#speed tbody tr").count() == 6 and "offramp bench" in page.locator("#sources").inner_text()
    page.locator("#sets button").nth(1).click()
    assert page.locator("#heading").inner_text() == "speed: sst2" and fits(page)
