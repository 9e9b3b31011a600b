"""Who decides how deep words go: doubts, depths and settings, by hand and in the step loop."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from offramp import methods, tasks
from offramp.core.packed import pack
from offramp.core.policy import Policy
from offramp.decoding.beam_search import Said, speak
from offramp.decoding.exits import DecoderSettings, decoder_policy, first_below, least_confidence, tail, uncertainties
from offramp.decoding.loop import Decoding
from offramp.decoding.teacher_forcing import Lesson, prices, rules, side_by_side, speaker
from offramp.errors import OfframpError
from offramp.inference.run_folder import build_network
from offramp.methods.depth_adaptive.options import DepthAdaptiveOptions
from offramp.nn.batches import Batch
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers
from tests import tiny

FORMS = ["sequence", "multinomial", "geometric", "threshold"]
LENGTHS = [9, 3, 14, 5]


@cache
def made(form: str, **options: Any) -> Network:
    method = methods.get("depth_adaptive")
    torch.manual_seed(1)
    chosen = DepthAdaptiveOptions(form=form, **options)
    net = build_network(tiny.speaker("marian"), tasks.get("translation")(), method, chosen)
    with torch.no_grad():
        for parameter in net.added.parameters():
            parameter.mul_(4.0)  # so that words differ in what is said of them
    net.eval()
    return net


def say(net: Network, policy: Policy, ids: list[list[int]]) -> tuple[list[Said], Decoding]:
    packed = pack(ids)
    with torch.inference_mode():
        source, _ = side_by_side(packed, forward_all_layers(net.encoder, packed).states[-1])
        decoding = Decoding(speaker(net), policy, source, packed.lengths)
        return speak(decoding, rules(net), [12] * len(ids)), decoding


def test_doubts_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]).log()
    assert torch.allclose(tail(logits), torch.tensor([[0.5, 0.2], [0.9, 0.7]]))
    assert torch.allclose(least_confidence(logits), torch.tensor([0.5, 0.3]))
    limits = torch.tensor([0.6, 0.6])
    assert first_below(tail(logits).T, limits).tolist() == [1, 3]
    assert first_below(tail(logits).T, torch.tensor([0.1, 0.3])).tolist() == [2, 3]


@pytest.mark.parametrize("form", FORMS)
def test_words_leave_where_their_doubt_says(form: str) -> None:
    """The doubt of what was said, had all words gone all the way, is what the first word of a sentence left by."""
    net, ids = made(form), tiny.rows(LENGTHS)
    said, _ = say(net, decoder_policy(net, DecoderSettings()), ids)
    targets = torch.nn.utils.rnn.pad_sequence([torch.tensor(one.pieces) for one in said], True, -100)
    with torch.inference_mode():
        lesson = Lesson(net, Batch(pack(ids), targets, [0, 1, 2, 3]))
        taught = lesson.taught(lesson.source())
        uncertainty = uncertainties(net, taught)
    assert uncertainty.shape == (net.depth - 1, sum(len(one.pieces) for one in said))
    begins = (taught.lengths.cumsum(0) - taught.lengths).tolist()
    limit = float(uncertainty[:, begins].median())
    early, _ = say(net, decoder_policy(net, DecoderSettings(threshold=limit)), ids)
    assert [one.exits[0] for one in early] == first_below(uncertainty[:, begins], torch.full((3,), limit)).tolist()
    assert len({block for one in early for block in one.exits}) > 1


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_changes_nothing_and_the_loosest_setting_is_the_full_model(form: str) -> None:
    net, ids = made(form), tiny.rows(LENGTHS)
    full, decoding = say(net, Policy(), ids)
    assert say(net, decoder_policy(net, DecoderSettings()), ids)[0] == full
    assert not decoding.account.asked.any() and not decoding.account.scored.any()
    means = []
    for threshold in (1e-3, 0.02, 0.3, 1.0):
        policy = decoder_policy(net, DecoderSettings(threshold=threshold))
        together, _ = say(net, policy, ids)
        assert [say(net, policy, [row])[0][0] for row in ids] == together
        means.append(sum(sum(one.exits) / len(one.exits) for one in together))
    assert means[-1] < means[0] <= 4 * len(ids)


@pytest.mark.parametrize("form", ["sequence", "multinomial"])
def test_the_published_rule_takes_the_likeliest_depth(form: str) -> None:
    net, ids = made(form), tiny.rows(LENGTHS)
    said, decoding = say(net, decoder_policy(net, DecoderSettings(argmax=True)), ids)
    assert decoding.account.planned is (form == "sequence")
    if form == "sequence":
        packed = pack(ids)
        with torch.inference_mode():
            mean = packed.with_states(forward_all_layers(net.encoder, packed).states[-1]).mean()
            depths = (net.added["halting_unit"](mean).argmax(1) + 1).tolist()
        assert [set(one.exits) for one in said] == [{depth} for depth in depths]
    else:
        assert decoding.account.asked.tolist() == [True, False, False, False]
        assert prices(net).word == 32 * 4


def test_exits_with_vocabularies_of_their_own() -> None:
    net, ids = made("geometric", tied=False), tiny.rows(LENGTHS)
    said, _ = say(net, decoder_policy(net, DecoderSettings(threshold=0.6)), ids)
    assert [say(net, decoder_policy(net, DecoderSettings(threshold=0.6)), [row])[0][0] for row in ids] == said
    first, _ = say(net, decoder_policy(net, DecoderSettings(depth=1)), ids)
    tied, _ = say(made("geometric"), decoder_policy(net, DecoderSettings(depth=1)), ids)
    assert [one.pieces for one in first] != [one.pieces for one in tied]


def test_one_threshold_a_block_and_closed_blocks_are_not_asked() -> None:
    net, ids = made("geometric"), tiny.rows(LENGTHS)
    said, decoding = say(net, decoder_policy(net, DecoderSettings(thresholds=(0.0, 1.0, 0.0))), ids)
    assert {block for one in said for block in one.exits} == {2}
    assert decoding.account.asked.tolist() == [False, True, False, False]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "threshold": ({"threshold": 1.5}, "threshold=1.5"),
    "thresholds": ({"thresholds": (0.5, 0.5)}, "each of 3 blocks"),
    "depth": ({"depth": 9}, "4 blocks"),
    "negative": ({"beams": -1}, "beams=-1"),
    "argmax": ({"argmax": True}, "block by block"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_settings(what: str) -> None:
    given, message = BAD[what]
    with pytest.raises(OfframpError, match=message):
        decoder_policy(made("geometric"), DecoderSettings(**given))


def test_methods_that_cannot_decode_say_which_can() -> None:
    with pytest.raises(OfframpError, match="depth_adaptive, full"):
        build_network(tiny.speaker("marian"), tasks.get("translation")(), methods.get("branchynet"), object())
