"""The two differentiable passes: what exits read after every layer, skipped layers, gradients."""

from __future__ import annotations

import pytest
import torch

from offramp.core.packed import pack
from offramp.core.policy import Policy
from offramp.training.forward import ForwardHooks, forward_all_layers, forward_with_dropping
from tests import factories
from tests.factories import KeepFirst

LENGTHS = [9, 3, 17, 5]


def test_forward_all_layers_leaves_states_unchanged_in_a_skipped_layer() -> None:
    encoder, packed = factories.network().encoder, pack(factories.token_ids(LENGTHS))
    result = forward_all_layers(encoder, packed, ForwardHooks(skip=lambda layer: layer == 2))
    assert torch.equal(result.states[2], result.states[1]) and not torch.equal(result.states[3], result.states[2])


def test_forward_all_layers_under_equilibrium_keeps_values_and_averages_gradients() -> None:
    """Each layer's states get the mean of the gradients of the exits above and at them, not their sum."""
    net, packed = factories.network(), pack(factories.token_ids(LENGTHS))
    plain = forward_all_layers(net.encoder, packed)
    equilibrium = forward_all_layers(net.encoder, packed, ForwardHooks(equilibrium=True))
    for a, b in zip(plain.states, equilibrium.states, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    weights = [torch.randn_like(states) for states in plain.states]
    embeddings = net.hf.get_input_embeddings().weight  # below every exit
    losses = [(s * w).sum() for s, w in zip(plain.states, weights, strict=True)]
    separate = [torch.autograd.grad(loss, embeddings, retain_graph=True)[0] for loss in losses]
    loss = sum((s * w).sum() for s, w in zip(equilibrium.states, weights, strict=True))
    (together,) = torch.autograd.grad(loss, embeddings)
    assert torch.allclose(together, torch.stack(separate).mean(0), atol=1e-4)


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_forward_with_dropping_equals_forward_all_layers_if_nothing_is_dropped(task: str) -> None:
    net, packed = factories.exit_network(task), pack(factories.token_ids(LENGTHS))
    with torch.no_grad():
        dropping = forward_with_dropping(net, packed, Policy(), frozenset({2}))
        keeping = forward_all_layers(net.encoder, packed, ForwardHooks(skip=lambda layer: layer == 2))
    for layer in range(net.depth + 1):
        assert torch.allclose(dropping.after(layer).states, keeping.after(layer).states, atol=1e-5)


def test_forward_with_dropping_gives_row_exits_the_tokens_that_are_left() -> None:
    net, packed = factories.exit_network(), pack(factories.token_ids(LENGTHS))
    states = forward_with_dropping(net, packed, KeepFirst({2: 4}, "after_attention"))
    left = [min(length, 4) for length in LENGTHS]
    assert states.after(1).lengths.tolist() == LENGTHS
    assert states.after(2).lengths.tolist() == states.after(3).lengths.tolist() == left
    assert states.detached().after(3).lengths.tolist() == left


def test_forward_with_dropping_gives_token_exits_dropped_tokens_in_their_last_state() -> None:
    net, packed = factories.exit_network("tagging"), pack(factories.token_ids(LENGTHS))
    with torch.no_grad():
        states = forward_with_dropping(net, packed, KeepFirst({2: 4}, "before_layer"))
        full = forward_with_dropping(net, packed, Policy())
    dropped = packed.tokens["position"] >= 4
    for layer in range(net.depth + 1):
        assert torch.equal(states.after(layer).tokens["id"], packed.tokens["id"])
        assert states.after(layer).lengths.tolist() == LENGTHS
    assert torch.allclose(states.after(3).states[dropped], full.after(1).states[dropped], atol=1e-5)
    assert not torch.allclose(states.after(3).states[~dropped], full.after(1).states[~dropped], atol=1e-2)


def test_forward_with_dropping_is_differentiable_unless_detached() -> None:
    net = factories.exit_network()
    states = forward_with_dropping(net, pack(factories.token_ids(LENGTHS)), KeepFirst({1: 3}, "after_attention"))
    (grad,) = torch.autograd.grad(states.after(3).states.sum(), net.hf.get_input_embeddings().weight)
    assert grad.abs().sum() > 0
    assert not any(states.detached().after(layer).states.requires_grad for layer in range(4))
