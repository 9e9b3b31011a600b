"""How decoders decide depths: uncertainties, policies and settings, by hand and in the decode loop."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from offramp import methods, tasks
from offramp.core.packed import pack
from offramp.core.policy import Policy
from offramp.decoding.beam_search import Hypothesis
from offramp.decoding.decoder import decoder_cost
from offramp.decoding.exits import (
    DecoderSettings,
    block_uncertainties,
    decoder_policy,
    first_below,
    least_confidence,
    needs_more_than,
)
from offramp.decoding.loop import Decoding
from offramp.decoding.teacher_forcing import encode_source, teacher_force
from offramp.errors import OfframpError
from offramp.inference.run_folder import build_network
from offramp.nn.batches import Batch
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers
from tests import factories

SOURCES = factories.token_ids([9, 3, 14, 5])
each_form = pytest.mark.parametrize("form", ["sequence", "multinomial", "geometric", "threshold"])


@cache
def form_network(form: str, **options: Any) -> Network:
    net = factories.translation_network(form=form, **options)
    with torch.no_grad():
        for parameter in net.added.parameters():
            parameter.mul_(4.0)  # so that tokens differ in their uncertainties
    return net


def decode(
    net: Network, settings: DecoderSettings, sources: list[list[int]] = SOURCES
) -> tuple[list[Hypothesis], Decoding]:
    return factories.run_decoding(net, decoder_policy(net, settings), sources, limits=12)


def test_uncertainties_and_first_below_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]).log()
    assert torch.allclose(needs_more_than(logits), torch.tensor([[0.5, 0.2], [0.9, 0.7]]))
    assert torch.allclose(least_confidence(logits), torch.tensor([0.5, 0.3]))
    assert first_below(needs_more_than(logits).T, torch.tensor([0.6, 0.6])).tolist() == [1, 3]
    assert first_below(needs_more_than(logits).T, torch.tensor([0.1, 0.3])).tolist() == [2, 3]


@each_form
def test_first_tokens_exit_where_their_uncertainty_falls_below_the_threshold(form: str) -> None:
    """For first tokens, uncertainties under teacher forcing at full depth are those of decoding."""
    net = form_network(form)
    full, _ = decode(net, DecoderSettings())
    targets = torch.nn.utils.rnn.pad_sequence([torch.tensor(one.pieces) for one in full], True, -100)
    batch = Batch(pack(SOURCES), targets, [0, 1, 2, 3])
    with torch.inference_mode():
        forced = teacher_force(net, batch, encode_source(net, batch))
        uncertainty = block_uncertainties(net, forced)
    assert uncertainty.shape == (net.depth - 1, sum(len(one.pieces) for one in full))
    first = (forced.lengths.cumsum(0) - forced.lengths).tolist()
    threshold = float(uncertainty[:, first].flatten().sort().values[5:7].mean())  # between two values, never a tie
    early, _ = decode(net, DecoderSettings(threshold=threshold))
    expected = first_below(uncertainty[:, first], torch.full((3,), threshold)).tolist()
    assert [one.exits[0] for one in early] == expected
    assert len({block for one in early for block in one.exits}) > 1


@each_form
def test_a_batch_changes_nothing_and_threshold_zero_is_the_full_model(form: str) -> None:
    net = form_network(form)
    full, decoding = factories.run_decoding(net, Policy(), SOURCES, limits=12)
    assert decode(net, DecoderSettings())[0] == full
    assert not decoding.trace.unit_ran.any() and not decoding.trace.vocabulary_scored.any()
    mean_exits = []
    for threshold in (1e-3, 0.02, 0.3, 1.0):
        settings = DecoderSettings(threshold=threshold)
        together, _ = decode(net, settings)
        assert [decode(net, settings, [source])[0][0] for source in SOURCES] == together
        mean_exits.append(sum(sum(one.exits) / len(one.exits) for one in together))
    assert mean_exits[-1] < mean_exits[0] <= 4 * len(SOURCES)


def test_argmax_takes_the_likeliest_depth_of_a_sentence_unit() -> None:
    net = form_network("sequence")
    hypotheses, decoding = decode(net, DecoderSettings(argmax=True))
    assert decoding.trace.sentence_unit_ran
    packed = pack(SOURCES)
    with torch.inference_mode():
        mean = packed.with_states(forward_all_layers(net.encoder, packed).states[-1]).mean()
        depths = (net.added["halting_unit"](mean).argmax(1) + 1).tolist()
    assert [set(one.exits) for one in hypotheses] == [{depth} for depth in depths]


def test_argmax_reads_the_token_unit_after_the_first_block_only() -> None:
    net = form_network("multinomial")
    _, decoding = decode(net, DecoderSettings(argmax=True))
    assert not decoding.trace.sentence_unit_ran
    assert decoding.trace.unit_ran.tolist() == [True, False, False, False]
    assert decoder_cost(net).token_unit == 32 * 4


def test_exits_with_their_own_vocabularies_differ_from_tied_exits() -> None:
    net, settings = form_network("geometric", tied=False), DecoderSettings(threshold=0.6)
    together, _ = decode(net, settings)
    assert [decode(net, settings, [source])[0][0] for source in SOURCES] == together
    untied, _ = decode(net, DecoderSettings(depth=1))
    tied, _ = decode(form_network("geometric", tied=True), DecoderSettings(depth=1))
    assert [one.pieces for one in untied] != [one.pieces for one in tied]


def test_the_unit_does_not_run_at_blocks_with_threshold_zero() -> None:
    hypotheses, decoding = decode(form_network("geometric"), DecoderSettings(thresholds=(0.0, 1.0, 0.0)))
    assert {block for one in hypotheses for block in one.exits} == {2}
    assert decoding.trace.unit_ran.tolist() == [False, True, False, False]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "threshold": ({"threshold": 1.5}, "threshold=1.5"),
    "thresholds": ({"thresholds": (0.5, 0.5)}, "each of 3 blocks"),
    "depth": ({"depth": 9}, "4 blocks"),
    "negative": ({"beams": -1}, "beams=-1"),
    "argmax": ({"argmax": True}, "block by block"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused(case: str) -> None:
    settings, message = BAD[case]
    with pytest.raises(OfframpError, match=message):
        decoder_policy(form_network("geometric"), DecoderSettings(**settings))


def test_methods_that_cannot_decode_are_refused_with_those_that_can() -> None:
    hf, task = factories.hf_translation_model("marian"), tasks.get("translation")()
    with pytest.raises(OfframpError, match="depth_adaptive, full"):
        build_network(hf, task, methods.get("branchynet"), object())
