"""Families whose attention depends on distances: every variant equals Hugging Face's padded model, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offramp import backbones, engines
from offramp.core.loop import run
from offramp.core.packed import pack
from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.nn.network import bare_network
from tests import factories

LENGTHS = [7, 1, 33, 18, 64]
DEBERTA: dict[str, dict[str, Any]] = {
    "own position projections": {"share_att_key": False},
    "no buckets": {"position_buckets": -1, "max_relative_positions": 16},
    "content to position only": {"pos_att_type": ["c2p"]},
    "position to content only": {"pos_att_type": ["p2c"]},
    "no norm of position vectors": {"norm_rel_ebd": "none"},
    "absolute positions too": {"position_biased_input": True},
    "narrow embeddings": {"embedding_size": 16},
    "token types": {"type_vocab_size": 2},
    "no relative attention": {"relative_attention": False, "pos_att_type": []},
}


def check_equal(kind: str, **config: Any) -> None:
    task = factories.make_task()
    hf = factories.hf_model(kind, task.auto_class, num_labels=task.outputs, **config)
    net, ids = bare_network(hf, task), factories.token_ids(LENGTHS)
    net.eval()
    with torch.no_grad():
        result = run(engines.make("torch", net.encoder), net, Policy(), pack(ids))
    assert torch.allclose(result.logits, factories.hf_padded(hf, ids).logits, atol=1e-5)


@pytest.mark.parametrize("name", DEBERTA)
def test_deberta_variants_equal_hugging_face(name: str) -> None:
    check_equal("deberta-v2", **DEBERTA[name])


def test_mpnet_equals_hugging_face_beyond_the_last_bucket() -> None:
    hf = factories.hf_model("mpnet")
    ids = factories.token_ids([300, 20])
    packed, encoder = pack(ids), backbones.encoder(hf)
    packed = packed.with_states(encoder.embed(packed))
    with torch.no_grad():
        for layer in encoder.layers:
            x, _ = layer.attend(packed.states, packed.states, packed.layout, False, None)
            packed = packed.with_states(layer.feed(x))
    expected = factories.hf_padded(hf.base_model, ids).last_hidden_state
    for ours, theirs, length in zip(packed.states.split([300, 20]), expected, [300, 20], strict=True):
        assert torch.allclose(ours, theirs[:length], atol=2e-5)


def test_deberta_position_vectors_follow_changed_parameters() -> None:
    hf = factories.hf_model("deberta-v2")
    encoder, ids = backbones.encoder(hf), factories.token_ids([9])
    packed = pack(ids)
    for _ in range(2):
        with torch.no_grad():
            states = packed.with_states(encoder.embed(packed))
            x, _ = encoder.layers[0].attend(states.states, states.states, states.layout, False, None)
            for parameter in hf.base_model.encoder.rel_embeddings.parameters():
                parameter.mul_(-2.0)
            changed, _ = encoder.layers[0].attend(states.states, states.states, states.layout, False, None)
        assert not torch.allclose(x, changed, atol=1e-4)


def test_a_deberta_with_a_convolution_is_refused() -> None:
    with pytest.raises(OfframpError, match="conv_kernel_size=3"):
        backbones.encoder(factories.hf_model("deberta-v2", conv_kernel_size=3))
