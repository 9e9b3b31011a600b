"""Masked language modelling: proportions of masking, repeatable evaluation, filled masks, perplexity."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.tasks.masked_lm import MaskedLMTask
from tests.factories import bytelevel_tokenizer, wordpiece_tokenizer

LONG = {"text": "the film is good and the man is not bad . " * 40}


def masked_lm_task(tokenizer: Any) -> MaskedLMTask:
    task = MaskedLMTask.from_rows([LONG], "train.txt").with_tokenizer(tokenizer)
    assert isinstance(task, MaskedLMTask)
    return task


@pytest.mark.parametrize("make", [wordpiece_tokenizer, bytelevel_tokenizer])
def test_masking_has_the_published_proportions(make: Any) -> None:
    tokenizer = make()
    task = masked_lm_task(tokenizer)
    (item,) = task.encode(tokenizer, [LONG], 400)
    kinds: Counter[str] = Counter()
    for seed in range(60):
        ids, targets = task.inputs_and_targets(item, LONG, random.Random(seed))
        assert len(ids) == len(targets) == len(item.ids)
        for before, now, target in zip(item.ids, ids, targets, strict=True):
            assert target in (-100, before) and (target != -100 or now == before)
            if before in tokenizer.all_special_ids:
                assert target == -100
            if target != -100:
                kinds["mask" if now == tokenizer.mask_token_id else "same" if now == before else "other"] += 1
                assert now == tokenizer.mask_token_id or now not in tokenizer.all_special_ids
    chosen = sum(kinds.values())
    assert chosen == 60 * round(0.15 * (len(item.ids) - 2))
    assert kinds["mask"] / chosen == pytest.approx(0.8, abs=0.03)
    assert kinds["other"] / chosen == pytest.approx(0.1, abs=0.03)


def test_at_least_one_token_is_masked_but_no_special_token() -> None:
    task = masked_lm_task(wordpiece_tokenizer())
    (short,) = task.encode(wordpiece_tokenizer(), [{"text": "film"}], 16)
    assert task.inputs_and_targets(short, {}, random.Random(0))[1] == [-100, short.ids[1], -100]
    specials = [wordpiece_tokenizer().cls_token_id, wordpiece_tokenizer().sep_token_id]
    empty = Encoded(specials, [0, 0], 0, [-1, -1], [], 0)
    assert task.inputs_and_targets(empty, {}, None) == (specials, [-100, -100])


def test_masks_of_evaluation_do_not_depend_on_the_order_of_rows() -> None:
    task = masked_lm_task(wordpiece_tokenizer())
    rows = [LONG, {"text": "a very good film , not a bad film ."}]
    first = [task.inputs_and_targets(item, {}, None) for item in task.encode(wordpiece_tokenizer(), rows, 64)]
    again = [task.inputs_and_targets(item, {}, None) for item in task.encode(wordpiece_tokenizer(), rows[::-1], 64)]
    assert first == again[::-1]
    different = {
        json.dumps(task.inputs_and_targets(task.encode(wordpiece_tokenizer(), rows, 64)[0], {}, random.Random(s)))
        for s in range(5)
    }
    assert len(different) == 5


@pytest.mark.parametrize(
    ("make", "text", "words", "filled"),
    [
        (wordpiece_tokenizer, "The [MASK] is  [MASK]!", ["film", "good"], "The film is  good!"),
        (wordpiece_tokenizer, "A film [MASK] it", ["##s"], "A films it"),
        (wordpiece_tokenizer, "no mask", [], "no mask"),
        (bytelevel_tokenizer, "the <mask> is <mask>.", ["Ġfilm", "Ġgood"], "the film is good."),
    ],
)
def test_predictions_fill_mask_tokens(make: Any, text: str, words: list[str], filled: str) -> None:
    tokenizer = make()
    task = masked_lm_task(tokenizer)
    (item,) = task.encode(tokenizer, [{"text": text}], 64)
    logits = np.zeros((len(item.ids), len(tokenizer)), dtype=np.float32)
    logits[:, tokenizer.all_special_ids] = 99.0  # a special token is never an answer
    places = [place for place, token in enumerate(item.ids) if token == tokenizer.mask_token_id]
    for place, word in zip(places, words, strict=True):
        token = tokenizer.convert_tokens_to_ids(word)
        assert token != tokenizer.unk_token_id
        logits[place, token] = 1.0
    before = logits.copy()
    assert task.predictions([{"text": text}], [item], [logits]) == [{"text": filled}]
    assert (logits == before).all()


def test_masks_beyond_the_length_limit_stay() -> None:
    task, text = masked_lm_task(wordpiece_tokenizer()), "the [MASK] is [MASK]"
    (item,) = task.encode(wordpiece_tokenizer(), [{"text": text}], 5)
    logits = np.zeros((5, len(wordpiece_tokenizer())))
    logits[:, wordpiece_tokenizer().convert_tokens_to_ids("film")] = 1.0
    assert task.predictions([{"text": text}], [item], [logits]) == [{"text": "the film is [MASK]"}]


def test_metrics_from_losses_is_the_perplexity() -> None:
    task = masked_lm_task(wordpiece_tokenizer())
    assert task.metrics_from_losses([1.0, 3.0]) == {"perplexity": pytest.approx(math.exp(2))}
    assert math.isfinite(task.metrics_from_losses([1e9])["perplexity"])
    assert task.scores_by_loss and not task.higher_is_better
    with pytest.raises(OfframpError, match="metrics_from_losses"):
        task.metrics([LONG], [{"text": "x"}])


def test_bad_rows_and_tokenizers_are_refused() -> None:
    with pytest.raises(OfframpError, match="row 2: 'text' is empty"):
        MaskedLMTask.from_rows([LONG, {"text": ""}], "train.txt")

    class NoMask:
        mask_token_id = None

    with pytest.raises(OfframpError, match="without a mask token"):
        MaskedLMTask().with_tokenizer(NoMask())  # type: ignore[arg-type]  # a stand-in without a mask
    with pytest.raises(RuntimeError, match="with_tokenizer"):
        MaskedLMTask().predictions(
            [LONG], masked_lm_task(wordpiece_tokenizer()).encode(wordpiece_tokenizer(), [LONG], 16), [np.zeros((16, 9))]
        )
