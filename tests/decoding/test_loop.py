"""Decoding with a KV cache equals decoding without; at full depth it is Hugging Face's `generate`."""

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
from offramp.decoding.beam_search import GenerationRules
from offramp.decoding.cost import decoder_macs, full_decoder_macs
from offramp.decoding.decoder import decoder_cost, decoder_of, generation_rules
from offramp.decoding.exits import FixedDepth
from offramp.decoding.teacher_forcing import encode_source, teacher_force
from offramp.nn.batches import Batch
from offramp.nn.network import Network, bare_network
from tests import factories

SOURCES = factories.token_ids([9, 3, 17, 5, 5, 12])
LIMIT = 14  # pieces


@cache
def plain_network(backbone: str, seed: int = 0) -> Network:
    hf = factories.hf_translation_model(backbone, seed)
    return bare_network(hf, tasks.get("translation")())


class DepthByState(Policy):
    """The depth of a token follows from its own state, so that it is the same alone and in a batch."""

    def token_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        return torch.where((states[:, 0] * 40).long() % 3 == 0, block, 4)


class DepthBySource(Policy):
    """The depth of a sentence follows from its source."""

    def sentence_depths(self, source: Tensor) -> Tensor | None:
        return (source[:, 0] * 1000).long() % 4 + 1


class DepthByLogits(Policy):
    """The depth of a token follows from the vocabulary scores after every block."""

    def token_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        return torch.where(logits().argmax(1) % 2 == 0, block, 4)


class FirstTokenShallow(Policy):
    """The first token exits after the first block, all others after the last; one row only."""

    free = True

    def __init__(self) -> None:
        self.calls = 0

    def token_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        self.calls += 1
        return torch.full((len(states),), 1 if self.calls == 1 else 4)


POLICIES = [Policy(), FixedDepth(1), FixedDepth(2), DepthByState(), DepthBySource(), DepthByLogits()]
each_backbone = pytest.mark.parametrize("backbone", factories.SEQ2SEQ_BACKBONES)
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)


def hf_generate(net: Network, **config: Any) -> list[list[int]]:
    """Return what Hugging Face generates from SOURCES, without start and padding."""
    longest = max(map(len, SOURCES))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in SOURCES])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in SOURCES])
    output = net.hf.generate(ids, attention_mask=mask, max_new_tokens=LIMIT, do_sample=False, **config)
    ends = config.get("eos_token_id", 1)
    ends = ends if isinstance(ends, list) else [ends]
    return [_until_end(row[1:], ends) for row in output.tolist()]


def _until_end(pieces: list[int], ends: list[int]) -> list[int]:
    stops = [place for place, piece in enumerate(pieces) if piece in ends]
    return pieces[: stops[0] + 1] if stops else pieces


def padded(rows: list[list[int]], filler: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, filler)


@pytest.mark.parametrize("beams", [1, 4])
@each_backbone
def test_full_depth_decoding_equals_hugging_face_generate(backbone: str, beams: int) -> None:
    for seed in range(3):
        net = plain_network(backbone, seed)
        hypotheses, decoding = factories.run_decoding(net, Policy(), SOURCES, beams)
        assert [one.pieces for one in hypotheses] == hf_generate(net, num_beams=beams)
        assert all(block == 4 for one in hypotheses for block in one.exits)
        macs = decoder_macs(decoding.trace, decoder_cost(net))
        assert np.allclose(macs, full_decoder_macs(decoding.trace, decoder_cost(net)))


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_rules_work_as_in_hugging_face_generate(beams: int) -> None:
    net = plain_network("bart", seed=1)
    ends = [1, 7, 20, 33, 41, 50, 66, 70]
    config: dict[str, Any] = {
        "eos_token_id": ends,
        "forced_bos_token_id": 5,
        "forced_eos_token_id": 1,
        "bad_words_ids": [[0], [6]],
    }
    if beams > 1:
        config |= {"length_penalty": 0.6, "early_stopping": True}
    rules = GenerationRules(
        start=0,
        ends=frozenset(ends),
        banned=(0, 6),
        forced_first=5,
        forced_last=1,
        length_penalty=0.6,
        early_stopping=True,
    )
    hypotheses, _ = factories.run_decoding(net, Policy(), SOURCES, beams, rules)
    assert [one.pieces for one in hypotheses] == hf_generate(net, num_beams=beams, **config)
    assert len({len(one.pieces) for one in hypotheses}) > 1, "sentences leave the batch at different times"


def test_generation_rules_are_read_from_the_generation_configuration() -> None:
    hf = factories.hf_translation_model("marian", forced_eos_token_id=1)
    hf.generation_config.update(num_beams=4, length_penalty=0.8, bad_words_ids=[[0], [3, 4]])
    expected = GenerationRules(
        start=0, ends=frozenset({1}), banned=(0,), forced_last=1, beams=4, length_penalty=0.8, early_stopping=False
    )
    assert generation_rules(bare_network(hf, tasks.get("translation")())) == expected


@each_policy
@each_backbone
def test_decoding_with_a_cache_equals_teacher_forcing_with_copied_states(backbone: str, policy: Policy) -> None:
    """Teacher forcing on the hypotheses, with the same exits, must predict each of their pieces."""
    net = plain_network(backbone)
    hypotheses, _ = factories.run_decoding(net, policy, SOURCES)
    targets = padded([one.pieces for one in hypotheses], filler=-100)
    exit_block = padded([one.exits for one in hypotheses], filler=1)
    batch = Batch(pack(SOURCES), targets, list(range(len(SOURCES))))
    with torch.inference_mode():
        states = teacher_force(net, batch, encode_source(net, batch), exit_block).states[-1]
        predicted = decoder_of(net).head(states).argmax(-1)
    assert predicted.tolist() == [piece for one in hypotheses for piece in one.pieces]
    if isinstance(policy, DepthByState | DepthByLogits | DepthBySource):
        assert len({block for one in hypotheses for block in one.exits}) > 1


@pytest.mark.parametrize("beams", [1, 3])
@each_policy
@each_backbone
def test_a_batch_decodes_like_its_sentences_alone_in_any_order(backbone: str, policy: Policy, beams: int) -> None:
    net = plain_network(backbone)
    together, decoding = factories.run_decoding(net, policy, SOURCES, beams)
    macs = decoder_macs(decoding.trace, decoder_cost(net))
    order = [4, 0, 5, 2, 1, 3]
    shuffled, _ = factories.run_decoding(net, policy, [SOURCES[i] for i in order], beams)
    assert shuffled == [together[i] for i in order]
    for row, source in enumerate(SOURCES):
        alone, own = factories.run_decoding(net, policy, [source], beams)
        assert alone == [together[row]]
        assert decoder_macs(own.trace, decoder_cost(net))[0] == pytest.approx(macs[row])


def test_the_cache_grows_with_long_sentences() -> None:
    net, sources = plain_network("marian"), SOURCES[:2]
    rules = GenerationRules(start=0, ends=frozenset({96}), banned=(96,))
    hypotheses, _ = factories.run_decoding(net, DepthByState(), sources, rules=rules, limits=[50, 40])
    assert [len(one.pieces) for one in hypotheses] == [50, 40]
    batch = Batch(pack(sources), padded([one.pieces for one in hypotheses], filler=-100), [0, 1])
    with torch.inference_mode():
        exit_block = padded([one.exits for one in hypotheses], filler=1)
        states = teacher_force(net, batch, encode_source(net, batch), exit_block).states[-1]
        scores = decoder_of(net).head(states)
        scores[:, 96] = -torch.inf
    assert scores.argmax(-1).tolist() == [piece for one in hypotheses for piece in one.pieces]


def test_decoder_macs_equal_a_count_by_hand() -> None:
    """Two target tokens, three source tokens: the first exits after block 1 of 4, the second goes through all."""
    net = plain_network("marian")
    sources, rules = factories.token_ids([3]), GenerationRules(start=0, ends=frozenset())
    _, decoding = factories.run_decoding(net, FirstTokenShallow(), sources, rules=rules, limits=2)
    hidden, inner, vocabulary = 32, 48, 97
    block = 6 * hidden * hidden + 2 * hidden * inner
    own = block * 5 + 2 * hidden * (1 + 2 * 4)  # tokens × blocks; pairs: 1 in the first block, 2 in each of four
    copied = 2 * hidden * hidden * 3  # keys and values of the first token in blocks 2, 3, 4, for the second
    cross = 2 * hidden * 3 * 5 + 2 * hidden * hidden * 3 * 4  # pairs; keys and values of the source in four blocks
    expected = own + copied + cross + 2 * hidden * vocabulary
    assert decoder_macs(decoding.trace, decoder_cost(net)).tolist() == [expected]
