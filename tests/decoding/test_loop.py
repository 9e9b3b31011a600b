"""Decoding with memory equals decoding without; with all exits at the last block it is Hugging Face's `generate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offramp import tasks
from offramp.core.packed import pack
from offramp.core.policy import Policy
from offramp.decoding.beam_search import Rules, Said, speak
from offramp.decoding.cost import decoder_macs, full_decoder_macs
from offramp.decoding.exits import FixedDepth
from offramp.decoding.loop import Decoding
from offramp.decoding.teacher_forcing import Lesson, prices, rules, side_by_side, speaker
from offramp.nn.batches import Batch
from offramp.nn.network import Network, bare_network
from offramp.training.forward import forward_all_layers
from tests import tiny

LENGTHS = [9, 3, 17, 5, 5, 12]
LONGEST = 14


@cache
def net(kind: str, **config: Any) -> Network:
    return bare_network(tiny.speaker(kind, **config), tasks.get("translation")())


class ByState(Policy):
    """A word's depth is read off its own state, so that a word goes equally far alone and in a batch."""

    def word_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        return torch.where((states[:, 0] * 40).long() % 3 == 0, block, 4)


class BySource(Policy):
    """So is a sentence's."""

    def sentence_depths(self, source: Tensor) -> Tensor | None:
        return (source[:, 0] * 1000).long() % 4 + 1


class ByLogits(Policy):
    """Looks at the vocabulary after every block."""

    def word_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        return torch.where(logits().argmax(1) % 2 == 0, block, 4)


POLICIES = [Policy(), FixedDepth(1), FixedDepth(2), ByState(), BySource(), ByLogits()]


def sources() -> list[list[int]]:
    return tiny.rows(LENGTHS)


def decode(
    model: Network, policy: Policy, ids: list[list[int]], beams: int = 1, how: Rules | None = None
) -> tuple[list[Said], Decoding]:
    packed = pack(ids)
    with torch.inference_mode():
        source, _ = side_by_side(packed, forward_all_layers(model.encoder, packed).states[-1])
        decoding = Decoding(speaker(model), policy, source, packed.lengths, beams)
        return speak(decoding, how or rules(model), [LONGEST] * len(ids)), decoding


def generated(model: Network, ids: list[list[int]], **how: Any) -> list[list[int]]:
    """Hugging Face's own answer, without start and padding."""
    wide = max(map(len, ids))
    batch = torch.tensor([row + [0] * (wide - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (wide - len(row)) for row in ids])
    made = model.hf.generate(batch, attention_mask=mask, max_new_tokens=LONGEST, do_sample=False, **how)
    ends = how.get("eos_token_id", 1)
    ends = ends if isinstance(ends, list) else [ends]
    return [_until(row[1:], ends) for row in made.tolist()]


def _until(pieces: list[int], ends: list[int]) -> list[int]:
    stops = [place for place, piece in enumerate(pieces) if piece in ends]
    return pieces[: stops[0] + 1] if stops else pieces


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("kind", tiny.SEQ2SEQ)
def test_all_blocks_equal_generate(kind: str, beams: int) -> None:
    for seed in range(3):
        model = net(kind, seed=seed)
        said, decoding = decode(model, Policy(), sources(), beams)
        assert [one.pieces for one in said] == generated(model, sources(), num_beams=beams)
        assert all(block == 4 for one in said for block in one.exits)
        cost = decoder_macs(decoding.account, prices(model))
        assert np.allclose(cost, full_decoder_macs(decoding.account, prices(model)))


@pytest.mark.parametrize("beams", [1, 3])
def test_the_rules_of_a_generation_configuration(beams: int) -> None:
    model = net("bart", seed=1)
    ends = [1, 7, 20, 33, 41, 50, 66, 70]
    theirs: dict[str, Any] = {
        "eos_token_id": ends,
        "forced_bos_token_id": 5,
        "forced_eos_token_id": 1,
        "bad_words_ids": [[0], [6]],
        "length_penalty": 0.6,
        "early_stopping": True,
    }
    how = Rules(0, frozenset(ends), (0, 6), first=5, last=1, length_penalty=0.6, early_stopping=True)
    if beams == 1:
        theirs.pop("length_penalty")
        theirs.pop("early_stopping")
    said, _ = decode(model, Policy(), sources(), beams, how)
    assert [one.pieces for one in said] == generated(model, sources(), num_beams=beams, **theirs)
    assert len({len(one.pieces) for one in said}) > 1, "sentences leave the batch at different times"


def test_rules_are_read_from_the_model() -> None:
    model = bare_network(tiny.speaker("marian", forced_eos_token_id=1), tasks.get("translation")())
    model.hf.generation_config.update(num_beams=4, length_penalty=0.8, bad_words_ids=[[0], [3, 4]])
    assert rules(model) == Rules(0, frozenset({1}), (0,), None, 1, 4, 0.8, False)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("kind", tiny.SEQ2SEQ)
def test_memory_equals_recomputing_from_scratch_with_copied_states(kind: str, policy: Policy) -> None:
    """Teach the model what it said, every word leaving where it left: each must be what the model would say there."""
    model = net(kind)
    ids = sources()
    said, _ = decode(model, policy, ids)
    wide = max(len(one.pieces) for one in said)
    targets = torch.tensor([one.pieces + [-100] * (wide - len(one.pieces)) for one in said])
    leave = torch.tensor([one.exits + [1] * (wide - len(one.exits)) for one in said])
    lesson = Lesson(model, Batch(pack(ids), targets, list(range(len(ids)))))
    with torch.inference_mode():
        words = lesson.taught(lesson.source(), leave).words[-1]
        again = model.decoder.head(words).argmax(-1) if model.decoder else torch.empty(0)
    assert again.tolist() == [piece for one in said for piece in one.pieces]
    if isinstance(policy, ByState | ByLogits | BySource):
        assert len({block for one in said for block in one.exits}) > 1


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("kind", tiny.SEQ2SEQ)
def test_a_batch_equals_its_sentences_one_at_a_time_in_any_order(kind: str, policy: Policy, beams: int) -> None:
    model, ids = net(kind), sources()
    together, decoding = decode(model, policy, ids, beams)
    cost = decoder_macs(decoding.account, prices(model))
    order = [4, 0, 5, 2, 1, 3]
    assert decode(model, policy, [ids[i] for i in order], beams)[0] == [together[i] for i in order]
    for row, source in enumerate(ids):
        alone, own = decode(model, policy, [source], beams)
        assert alone == [together[row]]
        assert decoder_macs(own.account, prices(model))[0] == pytest.approx(cost[row])


def test_a_long_sentence_outgrows_the_memory_it_began_with() -> None:
    model = net("marian")
    packed = pack(sources()[:2])
    with torch.inference_mode():
        source, _ = side_by_side(packed, forward_all_layers(model.encoder, packed).states[-1])
        how = Rules(0, frozenset({96}), (96,))
        said = speak(Decoding(speaker(model), ByState(), source, packed.lengths), how, [50, 40])
    assert [len(one.pieces) for one in said] == [50, 40]
    lesson = Lesson(model, Batch(packed, _padded([one.pieces for one in said]), [0, 1]))
    with torch.inference_mode():
        words = lesson.taught(lesson.source(), _padded([one.exits for one in said]).clamp(min=1)).words[-1]
        scores = speaker(model).exits[0](words)
        scores[:, 96] = -torch.inf
    assert scores.argmax(-1).tolist() == [piece for one in said for piece in one.pieces]


def _padded(rows: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, -100)


def test_costs_by_hand() -> None:
    """Two words of one sentence of 3 tokens: the first leaves after block 1 of 4, the second goes through all."""
    model = net("marian")
    policy = _Once()
    packed = pack(tiny.rows([3]))
    with torch.inference_mode():
        source, _ = side_by_side(packed, forward_all_layers(model.encoder, packed).states[-1])
        decoding = Decoding(speaker(model), policy, source, packed.lengths)
        speak(decoding, Rules(0, frozenset()), [2])
    wide, inner, vocabulary = 32, 48, 97
    block = 6 * wide * wide + 2 * wide * inner
    words = block * 5 + 2 * wide * (1 + 2 * 4)  # words × blocks; pairs: 1 in the first block, 2 in each of four
    copies = 2 * wide * wide * 3  # the first word's keys and values in blocks 2, 3, 4, when the second came by
    far = 2 * wide * 3 * 5 + 2 * wide * wide * 3 * 4  # pairs with the source; its keys and values in four blocks
    assert decoder_macs(decoding.account, prices(model)).tolist() == [words + copies + far + 2 * wide * vocabulary]


class _Once(Policy):
    """The first word leaves after the first block, all others after the last."""

    free = True

    def __init__(self) -> None:
        self.seen = 0

    def word_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        self.seen += 1
        return torch.full((len(states),), 1 if self.seen == 1 else 4)
