"""The differentiable pass: skipped layers, and gradients in equilibrium."""

from __future__ import annotations

import torch

from offramp import backbones
from offramp.core.packed import pack
from offramp.training.forward import ForwardHooks, forward_all_layers
from tests import tiny

LENGTHS = [5, 9]


def test_a_skipped_layer_leaves_states_alone() -> None:
    encoder, packed = backbones.encoder(tiny.model("bert")), pack(tiny.rows(LENGTHS))
    made = forward_all_layers(encoder, packed, ForwardHooks(skip=lambda layer: layer == 2))
    assert torch.equal(made.states[2], made.states[1]) and not torch.equal(made.states[3], made.states[2])


def test_equilibrium_keeps_values_and_averages_gradients() -> None:
    """Each layer's states get the mean of the gradients that the exits above (and at) them send, not their sum."""
    encoder, packed = backbones.encoder(tiny.model("bert")), pack(tiny.rows(LENGTHS))
    plain, even = (
        forward_all_layers(encoder, packed),
        forward_all_layers(encoder, packed, ForwardHooks(equilibrium=True)),
    )
    for a, b in zip(plain.states, even.states, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    weights = [torch.randn_like(states) for states in plain.states]
    word = encoder_words(encoder)
    losses = [(s * w).sum() for s, w in zip(plain.states, weights, strict=True)]
    alone = [torch.autograd.grad(loss, word, retain_graph=True)[0] for loss in losses]
    loss = sum((s * w).sum() for s, w in zip(even.states, weights, strict=True))
    (together,) = torch.autograd.grad(loss, word)
    assert torch.allclose(together, torch.stack(alone).mean(0), atol=1e-4)


def encoder_words(encoder: backbones.Encoder) -> torch.nn.Parameter:
    """The word embeddings, below every exit."""
    return encoder.embed.args[0].word_embeddings.weight  # type: ignore[attr-defined]  # BERT's embed is a partial
