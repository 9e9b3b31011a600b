"""The real loop in training: what exits read after every layer, gradients through what is left, layers left out."""

from __future__ import annotations

import pytest
import torch

from offramp.core.packed import pack
from offramp.core.policy import Policy
from offramp.nn.network import Network
from offramp.training.forward import Soft, trace
from offramp.training.forward_dropping import tape
from tests import tiny
from tests.core.test_loop import net_for
from tests.fakes import Drop

LENGTHS = [9, 3, 17, 5]


def made(task: str) -> tuple[Network, torch.Tensor]:
    return net_for(task), torch.tensor(LENGTHS)


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_without_dropping_a_tape_is_a_trace(task: str) -> None:
    net, _ = made(task)
    packed = pack(tiny.rows(LENGTHS))
    with torch.no_grad():
        ours = tape(net, packed, Policy(), frozenset({2}))
        theirs = trace(net.encoder, packed, Soft(skip=lambda layer: layer == 2))
    for layer in range(net.depth + 1):
        assert torch.allclose(ours.at(layer).states, theirs.at(layer).states, atol=1e-5)


def test_rows_go_on_with_what_is_left() -> None:
    net, lengths = made("classification")
    done = tape(net, pack(tiny.rows(LENGTHS)), Drop({2: 4}, "after_attention"))
    assert done.at(1).lengths.tolist() == LENGTHS
    assert done.at(2).lengths.tolist() == done.at(3).lengths.tolist() == lengths.clamp(max=4).tolist()
    assert done.detached().at(3).lengths.tolist() == done.at(3).lengths.tolist()


def test_restoring_puts_every_token_back_where_it_was() -> None:
    net, _ = made("tagging")
    packed = pack(tiny.rows(LENGTHS))
    with torch.no_grad():
        done, whole = tape(net, packed, Drop({2: 4}, "before_layer")), tape(net, packed, Policy())
    gone = packed.tokens["position"] >= 4
    for layer in range(net.depth + 1):
        assert torch.equal(done.at(layer).tokens["id"], packed.tokens["id"])
        assert done.at(layer).lengths.tolist() == LENGTHS
    assert torch.allclose(done.at(3).states[gone], whole.at(1).states[gone], atol=1e-5)
    assert not torch.allclose(done.at(3).states[~gone], whole.at(1).states[~gone], atol=1e-2)


def test_gradients_flow_through_those_that_stay_and_not_when_detached() -> None:
    net, _ = made("classification")
    words = net.hf.base_model.embeddings.word_embeddings.weight
    done = tape(net, pack(tiny.rows(LENGTHS)), Drop({1: 3}, "after_attention"))
    (grad,) = torch.autograd.grad(done.at(3).states.sum(), words)
    assert grad.abs().sum() > 0
    assert not any(done.detached().at(layer).states.requires_grad for layer in range(4))
