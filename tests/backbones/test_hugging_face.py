"""The packed encoder equals the padded model of Hugging Face, token by token, for every family and head."""

from __future__ import annotations

import pytest
import torch

from offramp import backbones, engines
from offramp.core.attention import layout
from offramp.core.packed import pack
from offramp.errors import OfframpError
from tests import factories

LENGTHS = [7, 1, 33, 18, 18, 64, 2]


def states_of(encoder: backbones.Encoder, ids: list[list[int]]) -> torch.Tensor:
    packed = pack(ids)
    packed = packed.with_states(encoder.embed(packed))
    for layer in encoder.layers:
        x, _ = layer.attend(packed.states, packed.states, packed.layout, False, None)
        packed = packed.with_states(layer.feed(x))
    return encoder.final(packed.states)


def test_factories_build_every_backbone() -> None:
    families = [*factories.BACKBONES, *factories.SEQ2SEQ_BACKBONES]
    assert {backbones.find(backbone).__name__.split(".")[-1] for backbone in families} == set(backbones.names())


@pytest.mark.parametrize("lengths", [LENGTHS, [9, 9, 9], [40]])
@pytest.mark.parametrize("backbone", factories.BACKBONES)
def test_packed_states_equal_hugging_face_token_by_token(backbone: str, lengths: list[int]) -> None:
    model = factories.hf_model(backbone)
    ids = factories.token_ids(lengths)
    expected = factories.hf_padded(model.base_model, ids).last_hidden_state
    with torch.no_grad():
        found = states_of(backbones.encoder(model), ids).split(lengths)
    for row, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.allclose(a, b[: lengths[row]], atol=1e-5), row


@pytest.mark.parametrize("task", ["classification", "tagging", "question_answering", "masked_lm"])
@pytest.mark.parametrize("backbone", factories.BACKBONES)
def test_packed_head_equals_hugging_face(backbone: str, task: str) -> None:
    extra = {"num_labels": 2} if task == "question_answering" else {}
    model = factories.hf_model(backbone, factories.AUTO_CLASSES[task], **extra)
    ids = factories.token_ids(LENGTHS)
    out = factories.hf_padded(model, ids)
    packed = pack(ids)
    with torch.no_grad():
        logits = backbones.head(model, factories.AUTO_CLASSES[task]).apply(
            packed.with_states(states_of(backbones.encoder(model), ids))
        )
    if task == "classification":
        assert torch.allclose(logits, out.logits, atol=1e-5)
        return
    expected = torch.stack((out.start_logits, out.end_logits), -1) if task == "question_answering" else out.logits
    for row, part in enumerate(logits.split(LENGTHS)):
        assert torch.allclose(part, expected[row, : LENGTHS[row]], atol=2e-5)


def test_mean_pooling_head_of_modernbert_equals_hugging_face() -> None:
    model = factories.hf_model("modernbert", classifier_pooling="mean")
    ids = factories.token_ids(LENGTHS)
    packed = pack(ids)
    with torch.no_grad():
        packed = packed.with_states(states_of(backbones.encoder(model), ids))
        logits = backbones.head(model, factories.AUTO_CLASSES["classification"]).apply(packed)
    assert torch.allclose(logits, factories.hf_padded(model, ids).logits, atol=1e-5)


@pytest.mark.parametrize("backbone", factories.BACKBONES)
def test_states_with_gradients_equal_fused_ones_and_reach_every_parameter(backbone: str) -> None:
    model = factories.hf_model(backbone)
    encoder, ids = backbones.encoder(model), factories.token_ids(LENGTHS)
    with torch.no_grad():
        fused = states_of(encoder, ids)
    plain = states_of(encoder, ids)
    assert torch.allclose(fused, plain, atol=1e-5)
    backbones.head(model, factories.AUTO_CLASSES["classification"]).apply(pack(ids).with_states(plain)).sum().backward()
    # also parameters whose gradient is zero by value (the second token type) take part
    assert all(parameter.grad is not None for name, parameter in model.named_parameters())


@pytest.mark.parametrize("backbone", factories.BACKBONES)
def test_attention_of_some_queries_equals_that_of_all(backbone: str) -> None:
    """The result of an active token does not depend on whether other tokens are computed too."""
    model = factories.hf_model(backbone)
    encoder, lengths = backbones.encoder(model), [9, 30, 14]
    packed = pack(factories.token_ids(lengths))
    states, position = encoder.embed(packed).detach(), packed.tokens["position"]
    active = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(1)) < 0.5
    counts = torch.tensor([int(part.sum()) for part in active.split(lengths)])
    where = layout(packed.lengths, position, counts, position[active])
    for layer in encoder.layers:
        all_queries, _ = layer.attend(states, states, packed.layout, False, None)
        some, _ = layer.attend(states[active], states, where, False, None)
        assert torch.allclose(some, all_queries[active], atol=1e-5)


def test_unknown_backbones_and_engines_are_refused_with_the_known_ones() -> None:
    with pytest.raises(OfframpError, match="modernbert"):
        backbones.find("gpt2")
    with pytest.raises(OfframpError, match="torch"):
        engines.make("abacus", backbones.encoder(factories.hf_model("bert")))
