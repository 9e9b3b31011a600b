"""The real loop in training: what exits read after every layer, gradients through what is left, layers left out."""

from __future__ import annotations

import pytest
import torch

from offramp.core.packed import pack
from offramp.core.policy import Policy
from offramp.nn.network import Network
from offramp.training.forward import ForwardHooks, forward_all_layers, forward_with_dropping
from tests import tiny
from tests.factories import exit_network
from tests.fakes import Drop

LENGTHS = [9, 3, 17, 5]


def made(task: str) -> tuple[Network, torch.Tensor]:
    return exit_network(task), torch.tensor(LENGTHS)


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_without_dropping_a_tape_is_a_trace(task: str) -> None:
    net, _ = made(task)
    packed = pack(tiny.rows(LENGTHS))
    with torch.no_grad():
        ours = forward_with_dropping(net, packed, Policy(), frozenset({2}))
        theirs = forward_all_layers(net.encoder, packed, ForwardHooks(skip=lambda layer: layer == 2))
    for layer in range(net.depth + 1):
        assert torch.allclose(ours.after(layer).states, theirs.after(layer).states, atol=1e-5)


def test_rows_go_on_with_what_is_left() -> None:
    net, lengths = made("classification")
    done = forward_with_dropping(net, pack(tiny.rows(LENGTHS)), Drop({2: 4}, "after_attention"))
    assert done.after(1).lengths.tolist() == LENGTHS
    assert done.after(2).lengths.tolist() == done.after(3).lengths.tolist() == lengths.clamp(max=4).tolist()
    assert done.detached().after(3).lengths.tolist() == done.after(3).lengths.tolist()


def test_restoring_puts_every_token_back_where_it_was() -> None:
    net, _ = made("tagging")
    packed = pack(tiny.rows(LENGTHS))
    with torch.no_grad():
        done, whole = (
            forward_with_dropping(net, packed, Drop({2: 4}, "before_layer")),
            forward_with_dropping(net, packed, Policy()),
        )
    gone = packed.tokens["position"] >= 4
    for layer in range(net.depth + 1):
        assert torch.equal(done.after(layer).tokens["id"], packed.tokens["id"])
        assert done.after(layer).lengths.tolist() == LENGTHS
    assert torch.allclose(done.after(3).states[gone], whole.after(1).states[gone], atol=1e-5)
    assert not torch.allclose(done.after(3).states[~gone], whole.after(1).states[~gone], atol=1e-2)


def test_gradients_flow_through_those_that_stay_and_not_when_detached() -> None:
    net, _ = made("classification")
    words = net.hf.base_model.embeddings.word_embeddings.weight
    done = forward_with_dropping(net, pack(tiny.rows(LENGTHS)), Drop({1: 3}, "after_attention"))
    (grad,) = torch.autograd.grad(done.after(3).states.sum(), words)
    assert grad.abs().sum() > 0
    assert not any(done.detached().after(layer).states.requires_grad for layer in range(4))
