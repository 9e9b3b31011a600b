"""The server's page in a real browser: it predicts, slides, shows load, asks for a key, and fits a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.serving.conftest import StartServer

from offramp.serving.app import AppSettings

pytest_plugins = ("tests.conftest", "tests.serving.conftest")
LABEL = re.compile("good|bad")  # what a tiny model has learned is not the point
SHOTS = Path(__file__).parents[1] / "build" / "screenshots"
SIZES = {"desk": 1100, "phone": 375}


@pytest.fixture(params=SIZES)
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    look: Any = "dark" if request.param == "phone" else "light"
    opened = browser.new_page(viewport={"width": SIZES[request.param], "height": 800}, color_scheme=look)
    wrong: list[str] = []
    opened.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda sent: wrong.append(sent.url) if "//127.0.0.1:" not in sent.url else None)
    yield opened
    SHOTS.mkdir(parents=True, exist_ok=True)
    opened.screenshot(path=str(SHOTS / f"{request.node.name}.png"), full_page=True)
    opened.close()
    assert not [text for text in wrong if "status of 4" not in text], "refusals of the server are expected"


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def test_a_text_is_predicted_by_keyboard_and_the_slider_asks_again(
    page: Page,
    start_server: StartServer,
    trained: Path,
) -> None:
    page.goto(start_server({"films": trained}))
    page.get_by_label("Text", exact=True).fill("a very good film")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#label")).to_have_text(LABEL)
    expect(page.locator("#scores .bar")).to_have_count(2)
    expect(page.locator("#facts")).to_contain_text("exit layer")
    page.get_by_label("Compute budget").focus()
    page.keyboard.press("Home")
    expect(page.locator("#budget-shown")).to_have_text("1.0\u00a0%")
    expect(page.locator("#facts")).to_contain_text("0 of 3")
    expect(page.locator("#exits > div")).to_have_count(4)
    expect(page.locator("#load")).to_contain_text("answers a second")
    assert fits(page)


def test_several_models_can_be_chosen(page: Page, start_server: StartServer, every_task: dict[str, Path]) -> None:
    kinds = ("classification", "pairs", "question_answering", "tagging")
    page.goto(start_server({kind: every_task[kind] for kind in kinds}))
    page.get_by_label("Model").select_option("question_answering")
    page.get_by_label("Question").fill("who ?")
    page.get_by_label("Context").fill("a man lives in paris .")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#facts")).to_contain_text("tokens kept")
    page.get_by_label("Model").select_option("tagging")
    expect(page.get_by_label("Context")).to_have_count(0)
    assert fits(page)


def test_several_labels_are_shown_and_none_in_words(
    page: Page, start_server: StartServer, every_task: dict[str, Path]
) -> None:
    page.goto(start_server({"labels": every_task["multi_label"]}))
    page.get_by_label("Text", exact=True).fill("a film")
    for labels, shown in ((["good", "long"], "good, long"), (["long"], "long"), ([], "none")):
        answer = {"labels": labels, "scores": {"good": 0.5, "long": 0.5}, "exit_layer": 1, "tokens_kept": 1, "macs": 1}
        rest = {"budget": {"mac_share": 1.0}, "queue_ms": 0.1, "run_ms": 0.1}
        content = {"model": "labels", "predictions": [{**answer, **rest}]}
        page.route("**/v1/predict", lambda route, _, content=content: route.fulfill(json=content))
        page.get_by_role("button", name="Predict").click()
        expect(page.locator("#label")).to_have_text(shown)
    page.unroute_all()
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#label")).to_have_text(re.compile("^(good|long|good, long|none)$"))


def test_the_page_requires_a_key_and_shows_errors(page: Page, start_server: StartServer, trained: Path) -> None:
    page.goto(start_server({"films": trained}, AppSettings(api_keys=("secret",))))
    expect(page.get_by_role("alert")).to_contain_text("key")
    page.get_by_label("API key").fill("secret")
    page.keyboard.press("Tab")
    page.get_by_label("Text", exact=True).fill("a bad film")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#label")).to_have_text(LABEL)
    page.get_by_label("Text", exact=True).fill("   ")
    page.get_by_role("button", name="Predict").click()
    expect(page.get_by_role("alert")).to_contain_text("empty")
    assert fits(page)
