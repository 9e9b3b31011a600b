"""Translation: rows that are refused, ids, predictions, BLEU, and the tokenizer of new models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offramp import tasks
from offramp.data.tokenizer_training import train_bpe_tokenizer
from offramp.errors import OfframpError
from tests.factories import translation_run_folder, wordpiece_tokenizer

TEXTS = ["Ein Mann läuft.", "Zwei Hunde spielen im Gras.", "Ein Haus"] * 4
ROWS = [{"src": text, "tgt": text.upper()} for text in TEXTS]


def translation_task(tokenizer: Any) -> Any:
    return tasks.get("translation").from_rows(ROWS, "rows").with_tokenizer(tokenizer)


def test_training_without_sacrebleu_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(OfframpError, match="sacrebleu"):
        translation_run_folder(tmp_path)
    assert not (tmp_path / "run").exists() and not (tmp_path / "run.partial").exists()


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no target": ({"src": "a"}, ["row 2", "unpaired", "'tgt' is missing", "columns found: src"]),
    "empty target": ({"src": "a", "tgt": " "}, ["row 2", "unpaired", "'tgt' is empty"]),
    "no source": ({"tgt": "a"}, ["row 2", "unpaired", "'src' is missing"]),
    "empty source": ({"src": "", "tgt": "a"}, ["row 2", "'src' is empty"]),
    "a number": ({"src": "a", "tgt": 3}, ["row 2", "'tgt' is a int"]),
    "nothing": ({"text": "a"}, ["row 2", "'src'"]),
}


@pytest.mark.parametrize("case", BAD)
def test_from_rows_refuses_bad_rows_with_their_number(case: str) -> None:
    row, expected = BAD[case]
    with pytest.raises(OfframpError) as error:
        tasks.get("translation").from_rows([ROWS[0], row], "pairs.jsonl")
    assert all(word in str(error.value) for word in ["pairs.jsonl", *expected]), str(error.value)


def test_check_inputs_needs_no_target_and_takes_plain_lines() -> None:
    task = translation_task(train_bpe_tokenizer(TEXTS, 300))
    task.check_inputs([{"src": "a"}], "in")
    task.check_inputs([{"text": "a"}], "in.txt")
    with pytest.raises(OfframpError, match="row 2: 'text' is empty"):
        task.check_inputs([{"text": "a"}, {"text": ""}], "in.txt")
    (plain,) = task.encode(task.tokenizer, [{"text": "Ein Haus"}], 20)
    (named,) = task.encode(task.tokenizer, [{"src": "Ein Haus"}], 20)
    assert plain == named and plain.target == ()


def test_check_encoded_refuses_long_sentences_and_unknown_targets() -> None:
    task = translation_task(train_bpe_tokenizer(TEXTS, 300))
    encoded = task.encode(task.tokenizer, ROWS[:3], 6)
    with pytest.raises(OfframpError, match=r"row 2: 'ZWEI HUND.*the target has \d+ pieces, the model takes 20"):
        task.check_encoded(encoded, 20, "rows")
    task.check_encoded(encoded, 60, "rows")
    other = translation_task(wordpiece_tokenizer())
    unknown = other.encode(wordpiece_tokenizer(), [{"src": "a man", "tgt": "猫 猫"}], 30)
    with pytest.raises(OfframpError, match=r"row 1: .*no piece that is in the model's vocabulary"):
        other.check_encoded(unknown, 60, "rows")


def test_a_trained_tokenizer_decodes_every_text_unchanged() -> None:
    tokenizer = train_bpe_tokenizer([text for row in ROWS for text in row.values()], 300)
    assert len(tokenizer) <= 300
    for text in [*TEXTS, "Größe: 5 €, naïve “quotes”", "猫"]:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id and tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text
    again = train_bpe_tokenizer([text for row in ROWS for text in row.values()], 300)
    assert again.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(OfframpError, match="300 or more"):
        train_bpe_tokenizer(TEXTS, 100)


def test_targets_predictions_and_bleu_of_perfect_and_half_right_answers() -> None:
    task = translation_task(train_bpe_tokenizer([text for row in ROWS for text in row.values()], 400))
    encoded = task.encode(task.tokenizer, ROWS, 60)
    pairs = zip(encoded, ROWS, strict=True)
    targets = task.stack_targets([task.inputs_and_targets(e, row, None)[1] for e, row in pairs])
    assert targets.shape == (len(ROWS), max(len(e.target) for e in encoded)) and int(targets.min()) == -100
    answers = [np.array([[piece, 1 + place % 3] for place, piece in enumerate(e.target)]) for e in encoded]
    predictions = task.predictions(ROWS, encoded, answers)
    assert [one["text"] for one in predictions] == [row["tgt"] for row in ROWS]
    counts = [(len(one["pieces"]), len(one["exits"])) for one in predictions]
    assert counts == [(len(e.target) - 1, len(e.target) - 1) for e in encoded]
    assert task.metrics(ROWS, predictions) == {"bleu": pytest.approx(100.0)}
    half = [{**one, "text": "nothing like it" if place % 2 else one["text"]} for place, one in enumerate(predictions)]
    assert 0.0 < task.metrics(ROWS, half)["bleu"] < 60.0
    assert torch.equal(targets[0, : len(encoded[0].target)], torch.tensor(encoded[0].target))
