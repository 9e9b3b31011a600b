"""What happened to one input: the story agrees with what the model answers and charges."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from offramp.cli import main
from offramp.cli.printing.explanation import print_explanation
from offramp.errors import OfframpError
from offramp.evaluation.explanations import GONE, IDLE, LIVE, Explanation, explain_input
from offramp.evaluation.pages import explanation_page
from offramp.inference.predictor import Predictor
from offramp.training.schedule import Schedule
from tests.factories import KINDS, labelled_rows, run_folder

TEXTS = {"classification": ["a good film"], "pairs": ["the man", "a good man"], "regression": ["a good film"],
         "tagging": ["the man is good"], "question_answering": ["who is in it ?", "the man lives in paris ."],
         "masked_lm": ["a film"]}  # fmt: skip


def told(run: Path, kind: str, budget: float | None = 1.0) -> Explanation:
    predictor = Predictor.load(run, "torch")
    return explain_input(predictor, run.name, TEXTS[kind], predictor.settings(budget))


@pytest.mark.parametrize("kind", KINDS)
def test_the_story_ends_with_the_answer(every_task: dict[str, Path], kind: str) -> None:
    made = told(every_task[kind], kind)
    story = made.stories[made.chosen]
    assert story.share == pytest.approx(1.0) and story.exit_layer == made.depth
    assert [step.layer for step in story.steps] == list(range(made.depth + 1))
    assert story.steps[-1].answer == story.answer and set(story.steps[-1].tokens) == {LIVE}
    assert len(made.tokens) == len(made.words) == len(story.steps[0].tokens)
    predictor = Predictor.load(every_task[kind], "torch")
    texts = TEXTS[kind][0].split() if kind == "tagging" else TEXTS[kind]
    alone = kind in ("classification", "regression", "masked_lm")
    (said,) = predictor.predict([texts[0] if alone else texts], budget=1.0)
    assert {key: said[key] for key in story.answer} == story.answer


def test_the_tokens_of_an_answer_are_marked(every_task: dict[str, Path]) -> None:
    made = told(every_task["question_answering"], "question_answering")
    step = made.stories[made.chosen].steps[-1]
    answer = made.stories[made.chosen].answer
    assert answer["answer"], "this tiny model answers something"
    assert "".join(made.tokens[i] for i in step.within).replace("##", "") == answer["answer"].replace(" ", "")
    plain = io.StringIO()
    print_explanation(made, Console(file=plain, width=200))
    assert f"[{made.tokens[step.within[0]]}]" in plain.getvalue() and "start:" not in plain.getvalue()


def test_stories_run_from_cheap_to_full_and_cost_what_predictions_cost(trained: Path) -> None:
    made = told(trained, "classification", 0.5)
    shares = [story.share for story in made.stories]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    (said,) = Predictor.load(trained, "torch").predict(["a good film"], budget=0.5)
    story = made.stories[made.chosen]
    assert said["exit_layer"] == story.exit_layer and said["label"] == story.answer["label"]
    assert story.share * made.full_macs == pytest.approx(said["macs"], rel=1e-6)  # looking costs nothing
    if story.exit_layer < made.depth:
        assert "<" in story.steps[-1].why


def test_a_translation_shows_after_which_block_each_word_was_said(translation_run: Path) -> None:
    predictor = Predictor.load(translation_run, "torch")
    made = explain_input(predictor, "run", ["a b c"], predictor.settings(0.9))
    story, (said,) = made.stories[made.chosen], predictor.predict(["a b c"], budget=0.9)
    pieces = [piece.lstrip("Ġ▁") for piece in said["pieces"]]
    assert (story.answer["text"], story.pieces) == (said["text"], pieces)
    assert story.share * made.full_macs == pytest.approx(said["macs"], rel=1e-6)
    for step in story.steps:
        assert step.tokens == [GONE if exit_ < step.layer else LIVE for exit_ in said["exits"]]
        here = [piece for piece, exit_ in zip(pieces, said["exits"], strict=True) if exit_ == step.layer]
        assert (step.answer or {"said": ""})["said"] == " ".join(here)
    assert story.steps[-1].layer == max(said["exits"])


def test_the_page_holds_everything_and_closes_no_script(trained: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(trained, "torch")
    made = explain_input(predictor, "run", ["a <!-- <script> </script> film"], predictor.settings(1.0))
    explanation_page(made, str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    held = text.split('type="application/json">')[1].split("</script>")[0]
    assert json.loads(held)["tokens"] == made.tokens and "<" not in held
    assert "http://" not in text and "https://" not in text and "__" not in text.replace(held, "")


def test_a_word_that_has_its_tag_keeps_it(base: str, tmp_path: Path) -> None:
    run_ = run_folder(base, tmp_path, "token_exit", "tagging", schedule=Schedule(epochs=1, batch_size=24, lr=0.005))
    predictor = Predictor.load(run_, "torch")
    rows = labelled_rows("tagging", 12, 3)
    for threshold in (0.5, 0.9, 0.99):
        for row in rows:
            text = " ".join(row["tokens"])
            settings = predictor.settings(given={"threshold": threshold, "window": 1})
            made = explain_input(predictor, "run", [text], settings)
            story = made.stories[made.chosen]
            assert story.steps[-1].answer == story.answer


def test_without_styles_tokens_are_marked(trained: Path) -> None:
    made = told(trained, "classification")
    step = made.stories[made.chosen].steps[-1]
    step.tokens[1:3] = [GONE, IDLE]
    out = io.StringIO()
    print_explanation(made, Console(width=100, file=out))
    assert " · " in out.getvalue() and f"({made.tokens[2]})" in out.getvalue()


def test_tokens_that_left_are_shown_as_gone(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = told(trained, "classification")
    step = made.stories[made.chosen].steps[-1]
    step.tokens[1] = GONE
    print_explanation(made, Console(width=100))
    assert "1 of" in capsys.readouterr().out


@pytest.mark.parametrize(("texts", "says"), [([""], "an empty one"), (["a", "b"], "2 texts")])
def test_bad_input(trained: Path, texts: list[str], says: str) -> None:
    predictor = Predictor.load(trained, "torch")
    with pytest.raises(OfframpError, match=says):
        explain_input(predictor, "run", texts, predictor.settings(1.0))


def test_the_command(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["explain", str(trained), "a good film", "--budget", "0.5", "--html", str(tmp_path / "x.html")])
    assert end.value.code == 0 and (tmp_path / "x.html").is_file()
    assert "left after layer" in capsys.readouterr().out
