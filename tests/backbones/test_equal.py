"""The packed encoder equals Hugging Face's own padded model, token by token, for every family and head."""

from __future__ import annotations

import pytest
import torch

from offramp import backbones, engines
from offramp.core.attention import layout
from offramp.core.packed import pack
from offramp.errors import OfframpError
from tests import tiny

LENGTHS = [7, 1, 33, 18, 18, 64, 2]


def states_of(encoder: backbones.Encoder, ids: list[list[int]]) -> torch.Tensor:
    packed = pack(ids)
    packed = packed.with_states(encoder.embed(packed))
    for layer in encoder.layers:
        x, _ = layer.attend(packed.states, packed.states, packed.layout, False, None)
        packed = packed.with_states(layer.feed(x))
    return encoder.final(packed.states)


def test_the_table_of_tiny_models_is_whole() -> None:
    kinds = [*tiny.BACKBONES, *tiny.SEQ2SEQ]
    assert {backbones.find(kind).__name__.split(".")[-1] for kind in kinds} == set(backbones.names())


@pytest.mark.parametrize("lengths", [LENGTHS, [9, 9, 9], [40]])
@pytest.mark.parametrize("kind", tiny.BACKBONES)
def test_token_by_token(kind: str, lengths: list[int]) -> None:
    net = tiny.model(kind)
    ids = tiny.rows(lengths)
    theirs = tiny.padded(net.base_model, ids).last_hidden_state
    with torch.no_grad():
        ours = states_of(backbones.encoder(net), ids).split(lengths)
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.allclose(a, b[: lengths[row]], atol=1e-5), row


@pytest.mark.parametrize("task", ["classification", "tagging", "question_answering", "masked_lm"])
@pytest.mark.parametrize("kind", tiny.BACKBONES)
def test_last_exit_is_the_own_head(kind: str, task: str) -> None:
    extra = {"num_labels": 2} if task == "question_answering" else {}
    net = tiny.model(kind, tiny.AUTO[task], **extra)
    ids = tiny.rows(LENGTHS)
    out = tiny.padded(net, ids)
    packed = pack(ids)
    with torch.no_grad():
        logits = backbones.head(net, tiny.AUTO[task]).apply(packed.with_states(states_of(backbones.encoder(net), ids)))
    if task == "classification":
        assert torch.allclose(logits, out.logits, atol=1e-5)
        return
    theirs = torch.stack((out.start_logits, out.end_logits), -1) if task == "question_answering" else out.logits
    for row, part in enumerate(logits.split(LENGTHS)):
        assert torch.allclose(part, theirs[row, : LENGTHS[row]], atol=2e-5)


def test_mean_pooling_head_of_modernbert() -> None:
    net = tiny.model("modernbert", classifier_pooling="mean")
    ids = tiny.rows(LENGTHS)
    packed = pack(ids)
    with torch.no_grad():
        whole = packed.with_states(states_of(backbones.encoder(net), ids))
        logits = backbones.head(net, tiny.AUTO["classification"]).apply(whole)
    assert torch.allclose(logits, tiny.padded(net, ids).logits, atol=1e-5)


@pytest.mark.parametrize("kind", tiny.BACKBONES)
def test_training_path_equals_fused_path_and_reaches_every_parameter(kind: str) -> None:
    net = tiny.model(kind)
    encoder, ids = backbones.encoder(net), tiny.rows(LENGTHS)
    with torch.no_grad():
        fused = states_of(encoder, ids)
    plain = states_of(encoder, ids)
    assert torch.allclose(fused, plain, atol=1e-5)
    backbones.head(net, tiny.AUTO["classification"]).apply(pack(ids).with_states(plain)).sum().backward()
    # every parameter takes part: also those whose gradient is zero by value (the second token type)
    assert all(parameter.grad is not None for name, parameter in net.named_parameters())


@pytest.mark.parametrize("kind", tiny.BACKBONES)
def test_some_queries_over_all_keys(kind: str) -> None:
    """What an active token computes is the same whether its idle neighbours compute too or not."""
    net = tiny.model(kind)
    encoder, lengths = backbones.encoder(net), [9, 30, 14]
    packed = pack(tiny.rows(lengths))
    states, position = encoder.embed(packed).detach(), packed.tokens["position"]
    live = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(1)) < 0.5
    counts = torch.tensor([int(part.sum()) for part in live.split(lengths)])
    where = layout(packed.lengths, position, counts, position[live])
    for layer in encoder.layers:
        everything, _ = layer.attend(states, states, packed.layout, False, None)
        some, _ = layer.attend(states[live], states, where, False, None)
        assert torch.allclose(some, everything[live], atol=1e-5)


def test_unknown_backbone_names_the_known_ones() -> None:
    with pytest.raises(OfframpError, match="modernbert"):
        backbones.find("gpt2")
    with pytest.raises(OfframpError, match="torch"):
        engines.make("abacus", backbones.encoder(tiny.model("bert")))
