"""Explanations agree with what the model predicts and with the compute that it counts."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from offramp.cli import main
from offramp.cli.printing.explanation import print_explanation
from offramp.errors import OfframpError
from offramp.evaluation.explanations import GONE, IDLE, LIVE, ExplainedPass, Explanation, explain_input
from offramp.evaluation.pages import explanation_page
from offramp.inference.predictor import Predictor
from offramp.training.schedule import Schedule
from tests.factories import KINDS, labelled_rows, run_folder

TEXTS = {"classification": ["a good film"], "pairs": ["the man", "a good man"],
         "multi_label": ["a good film"], "regression": ["a good film"],
         "tagging": ["the man is good"], "question_answering": ["who is in it ?", "the man lives in paris ."],
         "masked_lm": ["a film"]}  # fmt: skip


def explained(run: Path, kind: str, budget: float | None = 1.0) -> tuple[Explanation, ExplainedPass]:
    """Return the explanation of one text and its pass at the chosen setting."""
    predictor = Predictor.load(run, "torch")
    explanation = explain_input(predictor, run.name, TEXTS[kind], predictor.settings(budget))
    return explanation, explanation.passes[explanation.chosen]


@pytest.mark.parametrize("kind", KINDS)
def test_last_step_equals_the_prediction(every_task: dict[str, Path], kind: str) -> None:
    explanation, chosen = explained(every_task[kind], kind)
    assert chosen.share == pytest.approx(1.0) and chosen.exit_layer == explanation.depth
    assert [step.layer for step in chosen.steps] == list(range(explanation.depth + 1))
    assert chosen.steps[-1].prediction == chosen.prediction and set(chosen.steps[-1].token_states) == {LIVE}
    assert len(explanation.tokens) == len(explanation.words) == len(chosen.steps[0].token_states)
    predictor = Predictor.load(every_task[kind], "torch")
    texts = TEXTS[kind][0].split() if kind == "tagging" else TEXTS[kind]
    single = kind in ("classification", "multi_label", "regression", "masked_lm")
    (prediction,) = predictor.predict([texts[0] if single else texts], budget=1.0)
    assert {key: prediction[key] for key in chosen.prediction} == chosen.prediction


@pytest.mark.parametrize(("labels", "shown"), [(["good", "long"], "good, long"), ([], "none")])
def test_several_labels_are_printed(every_task: dict[str, Path], labels: list[str], shown: str) -> None:
    explanation, chosen = explained(every_task["multi_label"], "multi_label")
    passes = [replace(chosen, prediction={**chosen.prediction, "labels": labels})]
    printed = io.StringIO()
    print_explanation(replace(explanation, passes=passes, chosen=0), Console(file=printed, width=200))
    assert f"{shown}: left after layer 3" in printed.getvalue()


def test_a_sentence_is_split_as_predict_splits_it(every_task: dict[str, Path]) -> None:
    predictor, text = Predictor.load(every_task["tagging"], "torch"), "Anne-Marie didn't call, or did she?"
    explanation = explain_input(predictor, "run", [text], predictor.settings(1.0))
    (prediction,) = predictor.predict([text], budget=1.0)
    assert explanation.inputs["tokens"] == prediction["tokens"]
    assert explanation.passes[explanation.chosen].prediction["tags"] == prediction["tags"]


def test_tokens_of_a_span_are_marked(every_task: dict[str, Path]) -> None:
    explanation, chosen = explained(every_task["question_answering"], "question_answering")
    marked, answer = chosen.steps[-1].answer_tokens, chosen.prediction["answer"]
    assert answer, "this tiny model finds an answer"
    assert "".join(explanation.tokens[i] for i in marked).replace("##", "") == answer.replace(" ", "")
    plain = io.StringIO()
    print_explanation(explanation, Console(file=plain, width=200))
    assert f"[{explanation.tokens[marked[0]]}]" in plain.getvalue() and "start:" not in plain.getvalue()


def test_passes_are_sorted_by_cost_and_cost_what_predictions_cost(trained: Path) -> None:
    explanation, chosen = explained(trained, "classification", 0.5)
    shares = [one.share for one in explanation.passes]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    (prediction,) = Predictor.load(trained, "torch").predict(["a good film"], budget=0.5)
    assert (prediction["exit_layer"], prediction["label"]) == (chosen.exit_layer, chosen.prediction["label"])
    assert chosen.share * explanation.full_macs == pytest.approx(prediction["macs"], rel=1e-6)  # explaining is free
    if chosen.exit_layer < explanation.depth:
        assert "<" in chosen.steps[-1].reason


def test_translation_shows_the_block_after_which_each_piece_exits(translation_run: Path) -> None:
    predictor = Predictor.load(translation_run, "torch")
    explanation = explain_input(predictor, "run", ["a b c"], predictor.settings(0.9))
    chosen, (prediction,) = explanation.passes[explanation.chosen], predictor.predict(["a b c"], budget=0.9)
    pieces = [piece.lstrip("Ġ▁") for piece in prediction["pieces"]]
    assert (chosen.prediction["text"], chosen.pieces) == (prediction["text"], pieces)
    assert chosen.share * explanation.full_macs == pytest.approx(prediction["macs"], rel=1e-6)
    for step in chosen.steps:
        assert step.token_states == [GONE if block < step.layer else LIVE for block in prediction["exits"]]
        exiting = [piece for piece, block in zip(pieces, prediction["exits"], strict=True) if block == step.layer]
        assert (step.prediction or {"exiting": ""})["exiting"] == " ".join(exiting)
    assert chosen.steps[-1].layer == max(prediction["exits"])


def test_page_holds_the_data_and_no_text_ends_its_script(trained: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(trained, "torch")
    explanation = explain_input(predictor, "run", ["a <!-- <script> </script> film"], predictor.settings(1.0))
    explanation_page(explanation, str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = text.split('type="application/json">')[1].split("</script>")[0]
    assert json.loads(data)["tokens"] == explanation.tokens and "<" not in data
    assert "http://" not in text and "https://" not in text and "__" not in text.replace(data, "")


def test_word_that_has_exited_keeps_its_tag(base: str, tmp_path: Path) -> None:
    run = run_folder(base, tmp_path, "token_exit", "tagging", schedule=Schedule(epochs=1, batch_size=24, lr=0.005))
    predictor = Predictor.load(run, "torch")
    for threshold in (0.5, 0.9, 0.99):
        settings = predictor.settings(given={"threshold": threshold, "window": 1})
        for row in labelled_rows("tagging", 12, 3):
            explanation = explain_input(predictor, "run", [" ".join(row["tokens"])], settings)
            chosen = explanation.passes[explanation.chosen]
            assert chosen.steps[-1].prediction == chosen.prediction


def test_tokens_are_marked_without_terminal_styles(trained: Path) -> None:
    explanation, chosen = explained(trained, "classification")
    chosen.steps[-1].token_states[1:3] = [GONE, IDLE]
    out = io.StringIO()
    print_explanation(explanation, Console(width=100, file=out))
    assert " · " in out.getvalue() and f"({explanation.tokens[2]})" in out.getvalue()


def test_number_of_dropped_tokens_is_printed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explanation, chosen = explained(trained, "classification")
    chosen.steps[-1].token_states[1] = GONE
    print_explanation(explanation, Console(width=100))
    assert "1 of" in capsys.readouterr().out


@pytest.mark.parametrize(("texts", "given"), [([""], "an empty one"), (["a", "b"], "2 texts")])
def test_bad_texts_are_refused(trained: Path, texts: list[str], given: str) -> None:
    predictor = Predictor.load(trained, "torch")
    with pytest.raises(OfframpError, match=given):
        explain_input(predictor, "run", texts, predictor.settings(1.0))


def test_explain_command_prints_and_writes_a_page(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["explain", str(trained), "a good film", "--budget", "0.5", "--html", str(tmp_path / "x.html")])
    assert end.value.code == 0 and (tmp_path / "x.html").is_file()
    assert "after layer" in capsys.readouterr().out
