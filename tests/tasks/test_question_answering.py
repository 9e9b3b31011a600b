"""Question answering: targets through windows and back, unanswerable questions, SQuAD scores, refused rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offramp.errors import OfframpError
from offramp.tasks.question_answering import QuestionAnsweringTask, normalise_answer, squad_score
from tests.factories import bytelevel_tokenizer, wordpiece_tokenizer

CONTEXT = (
    "the man lives in paris . and the woman ? a film is very good and not bad , in paris . or who saw it , what man ?"
)
NONE = {"text": [], "answer_start": []}


def row(answer: str | None, context: str = CONTEXT, question: str = "who ?") -> dict[str, Any]:
    found = NONE if answer is None else {"text": [answer], "answer_start": [context.rindex(answer)]}
    return {"question": question, "context": context, "answers": found}


def refusal(answers: Any) -> str:
    with pytest.raises(OfframpError) as caught:
        QuestionAnsweringTask.from_rows([row("paris"), {**row("paris"), "answers": answers}], "train.json")
    return str(caught.value)


@pytest.mark.parametrize("make", [wordpiece_tokenizer, bytelevel_tokenizer])
@pytest.mark.parametrize("answer", ["the man", "paris", "very good", "the", ".", "woman ? a film"])
def test_targets_and_predictions_return_the_answer(make: Any, answer: str) -> None:
    """The target of a window marks the answer itself; windows without it have the target (0, 0)."""
    task, example = QuestionAnsweringTask(stride=6), row(answer)
    windows = task.encode(make(), [example], 20)
    assert len(windows) > 1
    marked = 0
    logits = []
    for window in windows:
        start, end = task.inputs_and_targets(window, example, None)[1]
        if (start, end) != (0, 0):
            begin = example["answers"]["answer_start"][0]
            assert CONTEXT[window.offsets[start][0] : window.offsets[end][1]].strip() == answer
            assert window.offsets[end][1] == begin + len(answer)
            marked += 1
        scores = np.zeros((len(window.ids), 2))
        scores[start, 0] = scores[end, 1] = 9.0
        logits.append(scores)
    assert 0 < marked < len(windows)
    (prediction,) = task.predictions([example], windows, logits)
    assert prediction["answer"] == answer == CONTEXT[prediction["start"] : prediction["end"]]
    assert 0.5 / marked < prediction["score"] <= 1
    assert task.metrics([example], [prediction]) == {"exact_match": 1.0, "span_f1": 1.0}


def test_answers_may_be_characters_of_several_tokens() -> None:
    """Byte-level tokens of one character share its offsets: the first begins the answer, the last ends it."""
    example = row("é", context="caf é .")
    (window,) = QuestionAnsweringTask().encode(bytelevel_tokenizer(), [example], 32)
    start, end = QuestionAnsweringTask().inputs_and_targets(window, example, None)[1]
    assert start <= end and {window.offsets[place] for place in range(start, end + 1)} >= {window.offsets[end]}
    scores = np.zeros((len(window.ids), 2))
    scores[start, 0] = scores[end, 1] = 9.0
    assert QuestionAnsweringTask().predictions([example], [window], [scores])[0]["answer"] == "é"


def test_empty_answer_needs_unanswerable_training_rows_and_all_windows() -> None:
    assert not QuestionAnsweringTask.from_rows([row("paris")], "train.json").unanswerable
    task = QuestionAnsweringTask.from_rows([row("paris"), row(None)], "train.json")
    assert task.unanswerable
    task = QuestionAnsweringTask(unanswerable=True, stride=6)
    windows = task.encode(wordpiece_tokenizer(), [row(None)], 26)
    logits = [np.zeros((len(window.ids), 2)) for window in windows]
    for scores in logits:
        scores[0] = 5.0
    assert task.predictions([row(None)], windows, logits)[0] | {"score": 0} == {
        "answer": "", "score": 0, "start": 0, "end": 0,
    }  # fmt: skip
    assert QuestionAnsweringTask(stride=6).predictions([row(None)], windows, logits)[0]["answer"] != ""
    place = windows[1].words.index(max(windows[1].words))
    logits[1][place] = 4.0  # one window has found a span, but its score of no answer is higher
    assert task.predictions([row(None)], windows, logits)[0]["answer"] == ""
    logits[1][0] = 0.0
    assert task.predictions([row(None)], windows, logits)[0]["answer"] != ""


def test_predictions_are_spans_of_the_context_up_to_thirty_tokens() -> None:
    context = "the " * 60
    example = [row(None, context), row(None, "a film")]
    task = QuestionAnsweringTask()
    windows = task.encode(wordpiece_tokenizer(), example, 128)
    random = np.random.default_rng(0)
    logits = [random.normal(size=(len(window.ids), 2)) for window in windows]
    logits[0][[5, 60], [0, 1]] = 50.0  # 56 tokens: too long
    logits[1][0] = logits[1][1] = 50.0  # [CLS] and the question cannot be answers
    first, second = task.predictions(example, windows, logits)
    assert 0 < len(first["answer"].split()) <= 30
    assert second["answer"] in ("a", "film", "a film")


def test_best_span_equals_an_exhaustive_search() -> None:
    example = row(None)
    (window,) = QuestionAnsweringTask().encode(wordpiece_tokenizer(), [example], 64)
    inside = [place for place, word in enumerate(window.words) if word >= 0]
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(size=(len(window.ids), 2))
        pairs = [(s, e) for s in inside for e in inside if s <= e < s + 30]
        start, end = max(pairs, key=lambda pair: logits[pair[0], 0] + logits[pair[1], 1])
        prediction = QuestionAnsweringTask().predictions([example], [window], [logits])[0]
        assert (prediction["start"], prediction["end"]) == (window.offsets[start][0], window.offsets[end][1])


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"text": ["paris"], "answer_start": [3]}, "row 2: the answer 'paris' is not in the context at 3"),
        ({"text": ["paris"], "answer_start": [-5]}, "not in the context"),
        ({"text": ["paris"], "answer_start": []}, "as many answers as starts"),
        ({"text": [""], "answer_start": [0]}, "row 2: the answer ''"),
        ({"text": ["paris"], "answer_start": ["17"]}, "row 2: the answer 'paris' at '17'"),
        ({"text": ["paris"]}, "no 'text' and 'answer_start'"),
        ("paris", "no 'text' and 'answer_start'"),
        (None, "row 2, where 'answers' is null"),
        ({"text": "paris", "answer_start": 12}, "row 2: 'text' of 'answers' is 'paris', no list"),
        ({"text": ["paris"], "answer_start": 12}, "row 2: 'answer_start' of 'answers' is 12, no list"),
        ({"text": None, "answer_start": None}, "row 2: 'text' of 'answers' is None, no list"),
    ],
)
def test_from_rows_refuses_answers_that_are_not_in_the_context(answers: Any, message: str) -> None:
    assert message in refusal(answers)


def test_check_inputs_needs_texts_and_no_answers() -> None:
    QuestionAnsweringTask().check_inputs([{"question": "who ?", "context": "he"}], "in.jsonl")
    with pytest.raises(OfframpError, match="row 1: 'context' is empty"):
        QuestionAnsweringTask().check_inputs([{"question": "who ?", "context": " "}], "in.jsonl")


def test_loss_is_the_cross_entropy_over_the_tokens_of_each_row() -> None:
    logits = torch.randn(7, 2, requires_grad=True)
    targets, lengths = torch.tensor([[1, 2], [0, 0], [1, 1]]), torch.tensor([3, 1, 3])
    per_row = QuestionAnsweringTask().loss(logits, targets, lengths, "rows")
    starts = [0, 3, 4]
    for index, (begin, length) in enumerate(zip(starts, lengths.tolist(), strict=True)):
        own = logits[begin : begin + length].log_softmax(0)
        expected = -(own[targets[index, 0], 0] + own[targets[index, 1], 1]) / 2
        torch.testing.assert_close(per_row[index], expected)
    QuestionAnsweringTask().loss(logits, targets, lengths).backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("answer", "accepted", "exact", "f1"),
    [
        ("The Man.", ["man"], 1.0, 1.0),
        ("the tall man", ["a man"], 0.0, 2 * 0.5 * 1 / 1.5),
        ("paris", ["rome", "in paris", "Paris!"], 1.0, 1.0),
        ("", [], 1.0, 1.0),
        ("paris", [], 0.0, 0.0),
        ("", ["paris"], 0.0, 0.0),
        ("the", ["a", "paris"], 0.0, 0.0),
        ("cat cat dog", ["cat dog dog"], 0.0, 2 / 3),
    ],
)
def test_squad_score_equals_the_official_values(answer: str, accepted: list[str], exact: float, f1: float) -> None:
    assert squad_score(answer, accepted) == (exact, pytest.approx(f1))


def test_normalise_answer_removes_case_punctuation_and_articles() -> None:
    assert normalise_answer("  An Apple, a  day—the U.S.A. ") == "apple day— usa"
