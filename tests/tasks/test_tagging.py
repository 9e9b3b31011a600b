"""Tagging: targets on first tokens, predictions, refused rows, and entity F1 as the CoNLL script counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offramp.errors import OfframpError
from offramp.tasks.tagging import TaggingTask, entities, entity_f1, sentence_of_row, words_of_row
from tests.factories import bytelevel_tokenizer, encode, wordpiece_tokenizer

ROWS = [
    {"tokens": ["EU", "rejects", "films"], "tags": ["B-ORG", "O", "O"]},
    {"tokens": ["the", "woman"], "tags": ["O", "B-PER"]},
]


def refusal(**change: Any) -> str:
    with pytest.raises(OfframpError) as caught:
        TaggingTask.from_rows([ROWS[0], {**ROWS[1], **change}], "train.jsonl")
    return str(caught.value)


def test_tags_are_sorted_with_o_first() -> None:
    task = TaggingTask.from_rows(ROWS, "train.jsonl")
    assert task.tags == ("O", "B-ORG", "B-PER") and task.metric == "entity_f1"
    assert task.config()["id2label"] == {0: "O", 1: "B-ORG", 2: "B-PER"}


@pytest.mark.parametrize("make", [wordpiece_tokenizer, bytelevel_tokenizer])
def test_only_the_first_token_of_a_word_has_a_target(make: Any) -> None:
    task, tokenizer = TaggingTask.from_rows(ROWS, "train.jsonl"), make()
    for row, item in zip(ROWS, task.encode(tokenizer, ROWS, 32), strict=True):
        ids, targets = task.inputs_and_targets(item, row, None)
        assert ids == item.ids and len(targets) == len(ids)
        assert [task.tags[target] for target in targets if target != -100] == row["tags"]
        firsts = [item.words.index(word) for word in range(len(row["tokens"]))]
        assert [place for place, target in enumerate(targets) if target != -100] == firsts


def test_words_beyond_the_length_limit_are_tagged_o() -> None:
    task = TaggingTask(("O", "B-X"))
    row = {"tokens": ["the"] * 9, "tags": ["B-X"] * 9}
    (item,) = task.encode(wordpiece_tokenizer(), [row], 5)
    (prediction,) = task.predictions([row], [item], [np.tile([0.0, 1.0], (5, 1))])
    assert prediction["tags"] == ["B-X"] * 3 + ["O"] * 6
    assert task.inputs_and_targets(item, row, None)[1] == [-100, 1, 1, 1, -100]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tags": ["O"]}, "row 2: 2 tokens but 1 tags"),
        ({"tags": [0, 1]}, "row 2: 'tags' is not a list of tag names"),
        ({"tags": "O B-PER"}, "row 2: 'tags' is not a list"),
        ({"tokens": "the woman"}, "row 2: 'tokens' is not a list of words"),
        ({"tokens": [], "tags": []}, "row 2: 'tokens' is empty"),
        ({"tokens": ["", " "]}, "row 2: 'tokens' is empty"),
        ({"tags": None}, "row 2, where 'tags' is null"),
    ],
)
def test_from_rows_refuses_bad_tokens_and_tags(change: dict[str, Any], message: str) -> None:
    assert message in refusal(**change)


def test_check_rows_refuses_unknown_tags_and_from_rows_a_single_tag() -> None:
    task = TaggingTask.from_rows(ROWS, "train.jsonl")
    with pytest.raises(OfframpError, match="row 1: the tag 'B-LOC', which the training rows lack"):
        task.check_rows([{"tokens": ["a"], "tags": ["B-LOC"]}], "dev.jsonl")
    task.check_inputs([{"tokens": ["a"]}], "in.jsonl")
    with pytest.raises(OfframpError, match="one tag only: O"):
        TaggingTask.from_rows([{"tokens": ["a"], "tags": ["O"]}], "train.jsonl")


def test_loss_is_the_mean_over_labelled_tokens() -> None:
    logits = torch.tensor([[9.0, 0.0], [0.0, 0.0], [2.0, 0.0], [5.0, 5.0], [7.0, 7.0]], requires_grad=True)
    targets, lengths = torch.tensor([-100, 1, 0, 0, -100]), torch.tensor([3, 1, 1])
    two, soft = float(np.log(2)), float(np.log1p(np.exp(-2)))
    loss = TaggingTask(("O", "X")).loss(logits, targets, lengths)
    assert loss.item() == pytest.approx((two + soft + two) / 3)
    per_row = TaggingTask(("O", "X")).loss(logits, targets, lengths, "rows")
    assert per_row.tolist() == pytest.approx([(two + soft) / 2, two, 0.0])
    nothing = TaggingTask(("O", "X")).loss(logits, torch.full((5,), -100), lengths)
    nothing.backward()
    assert nothing.item() == 0.0 and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O B-PER I-PER O", [("PER", 1, 2)]),
        ("B-PER B-PER I-PER", [("PER", 0, 0), ("PER", 1, 2)]),
        ("I-PER I-PER O I-LOC", [("PER", 0, 1), ("LOC", 3, 3)]),
        ("B-PER I-LOC I-LOC", [("PER", 0, 0), ("LOC", 1, 2)]),
        ("B-PER O I-PER", [("PER", 0, 0), ("PER", 2, 2)]),
        ("S-X B-X I-X E-X I-X", [("X", 0, 0), ("X", 1, 3), ("X", 4, 4)]),
        ("E-X E-X S-X I-X", [("X", 0, 0), ("X", 1, 1), ("X", 2, 2), ("X", 3, 3)]),
        ("B-a-b I-a-b I-b", [("a-b", 0, 1), ("b", 2, 2)]),
        ("O O", []),
        ("", []),
    ],
)
def test_entities_are_counted_as_in_conll(tags: str, found: list[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == found


def test_entity_f1_counts_exact_words_and_types() -> None:
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["B-ORG"]]
    assert entity_f1(true, true) == 1.0
    assert entity_f1(true, [["B-PER", "O", "O", "B-LOC"], ["B-PER"]]) == pytest.approx(2 * 1 / 6)
    assert entity_f1([["O"]], [["O"]]) == 0.0


def test_metrics_have_entity_f1_only_if_tags_mark_entities() -> None:
    rows = [{"tokens": ["a", "b"], "tags": ["B-X", "I-X"]}]
    assert TaggingTask(("O", "B-X", "I-X")).metrics(rows, [{"tags": ["B-X", "O"]}]) == {
        "entity_f1": 0.0,
        "accuracy": 0.5,
    }
    words = TaggingTask(("DET", "NOUN"))
    assert words.metric == "accuracy"
    assert words.metrics([{"tags": ["DET", "NOUN"]}], [{"tags": ["DET", "DET"]}]) == {"accuracy": 0.5}


def test_entities_have_characters_and_scores() -> None:
    task = TaggingTask(("O", "B-X", "I-X"))
    row = {"text": "Anna-Lena Berg saw it."}
    words = ["Anna-Lena", "Berg", "saw", "it", "."]
    task.check_inputs([row], "rows")
    encoded = encode([[5, 6, 7, 8, 9]])
    logits = [np.array([[0.0, 9.0, 0.0], [0.0, 0.0, 0.0], [9.0, 0, 0], [9.0, 0, 0], [9.0, 0, 0]])]
    logits[0][1, 2] = 1.0
    (prediction,) = predictions = task.predictions([row], encoded, logits)
    assert prediction == {"tags": ["B-X", "I-X", "O", "O", "O"]}
    task.add_details(predictions, [row], encoded, logits)
    assert prediction["tokens"] == words
    (entity,) = prediction["entities"]
    assert (entity["type"], entity["text"], entity["start"], entity["end"]) == ("X", "Anna-Lena Berg", 0, 14)
    certain, less = np.exp(9) / (np.exp(9) + 2), np.e / (np.e + 2)
    assert entity["score"] == pytest.approx((certain + less) / 2)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "Scotland's Anne-Marie didn't call."}, ["Scotland's", "Anne-Marie", "didn't", "call", "."]),
        ({"tokens": "São Paulo’s «café» –\t東京"}, ["São", "Paulo’s", "«", "café", "»", "–", "東京"]),
        ({"tokens": ["Anne-Marie", "did", "n't"], "text": "ignored"}, ["Anne-Marie", "did", "n't"]),
    ],
)
def test_words_stand_at_their_places_in_the_sentence(row: dict[str, Any], words: list[str]) -> None:
    text, spans = sentence_of_row(row)
    assert [text[start:end] for start, end in spans] == words == list(words_of_row(row))


def test_entities_of_given_words_count_characters_of_the_joined_sentence() -> None:
    task, row = TaggingTask(("O", "B-X")), {"tokens": ["in", "Rome"]}
    encoded, logits = encode([[5, 6]]), [np.array([[1.0, 0.0], [0.0, 1.0]])]
    predictions = task.predictions([row], encoded, logits)
    task.add_details(predictions, [row], encoded, logits)
    (entity,) = predictions[0]["entities"]
    assert "in Rome"[entity["start"] : entity["end"]] == entity["text"] == "Rome" and "tokens" not in predictions[0]


@pytest.mark.parametrize("bad", [{"text": " "}, {"tokens": ""}, {"text": "\ud800"}, {"text": None}, {}, {"text": 3}])
def test_a_sentence_that_is_no_text_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match="row 1"):
        TaggingTask(("O", "B-X")).check_inputs([bad], "rows")
