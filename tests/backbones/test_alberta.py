"""ALBERTa: relative positions against a computation by pair, shared groups, optional positions, Hugging Face heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from offramp import backbones
from offramp.core.attention import AttentionOptions, attend
from offramp.core.attention.distances import RelativePositions
from offramp.core.packed import pack
from offramp.inference.run_folder import quiet_transformers
from tests import factories

LENGTHS = [7, 1, 12]


def attention_weights_by_pair(block: Any, x: Tensor, position: list[int]) -> Tensor:
    """Return one row's attention weights, computed pair by pair as in the paper."""  # [heads, queries, keys]
    width = x.shape[1] // block.heads
    q, k, _ = block.qkv(block.attention_norm(x)).chunk(3, dim=1)
    scores = torch.empty(block.heads, len(x), len(x))
    for head in range(block.heads):
        own = slice(head * width, (head + 1) * width)
        for i in range(len(x)):
            for j in range(len(x)):
                apart = max(-block.reach, min(block.reach, position[i] - position[j]))
                vector = block.distances.weight[apart + block.reach]
                content = q[i, own] @ k[j, own] / width**0.5
                scores[head, i, j] = content + k[j, own] @ vector + q[i, own] @ vector
    return scores.softmax(-1)


@pytest.mark.parametrize("drop_tokens", [False, True])
def test_attention_scores_equal_a_computation_by_pair(drop_tokens: bool) -> None:
    """With dropped tokens too, distances are those of the original positions."""
    model = factories.hf_model("alberta")
    encoder, packed = backbones.encoder(model), pack(factories.token_ids(LENGTHS))
    with torch.no_grad():
        packed = packed.with_states(encoder.embed(packed))
        if drop_tokens:
            keep = torch.tensor([i % 3 != 1 for i in range(packed.total)])
            keep[packed.starts] = True
            packed = packed.keep_tokens(keep)
        _, scores = encoder.layers[0].attend(packed.states, packed.states, packed.layout, True, None)
        assert scores is not None
        parts = packed.states.split(packed.lengths.tolist())
        places = packed.tokens["position"].split(packed.lengths.tolist())
        for column, x, place in zip(scores.columns.split(packed.lengths.tolist()), parts, places, strict=True):
            assert torch.allclose(
                column, attention_weights_by_pair(model.alberta.blocks[0], x, place.tolist()).mean(0).sum(0), atol=1e-5
            )


def test_relative_attention_is_the_same_with_and_without_scores() -> None:
    torch.manual_seed(0)
    packed = pack(factories.token_ids(LENGTHS))
    found = []
    for scores in (False, True):
        torch.manual_seed(1)
        q, k, v = (torch.randn(packed.total, 16, requires_grad=True) for _ in range(3))
        table = torch.randn(7, 4, requires_grad=True)
        bias = torch.linspace(-1, 1, packed.total)
        mixed, _ = attend(
            q,
            k,
            v,
            packed.layout,
            AttentionOptions(
                4,
                scores=scores,
                key_bias=bias,
                relative=RelativePositions(len(table) // 2, table[:, None], table[:, None]),
            ),
        )
        mixed.square().sum().backward()
        found.append((mixed.detach(), *(x.grad for x in (q, k, v, table))))
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and torch.allclose(a, b, atol=1e-4)


def test_layers_of_a_group_share_one_block() -> None:
    model = factories.hf_model("alberta", num_hidden_layers=7, num_hidden_groups=3)
    stack = model.alberta.stack
    assert [list(model.alberta.blocks).index(block) for block in stack] == [0, 0, 0, 1, 1, 2, 2]
    layers = backbones.encoder(model).layers
    assert len(layers) == 7 and len({id(layer) for layer in layers}) == 3


@pytest.mark.parametrize(("absolute", "relative"), [(True, False), (False, True), (False, False)])
def test_positions_can_be_left_out(absolute: bool, relative: bool) -> None:
    model = factories.hf_model("alberta", absolute_positions=absolute, relative_positions=relative)
    names = " ".join(name for name, _ in model.named_parameters())
    assert ("position_embeddings" in names, "distances" in names) == (absolute, relative)
    row = factories.token_ids([6])[0]
    forward, backward = factories.hf_padded(model.base_model, [row, row[::-1]]).last_hidden_state
    no_positions = not absolute and not relative
    same = torch.allclose(forward, backward.flip(0), atol=1e-5)
    assert same == no_positions, "only without any positions is the order of tokens lost"


@pytest.mark.parametrize("auto", sorted(set(factories.AUTO_CLASSES.values())))
def test_auto_classes_load_a_saved_model_unchanged(tmp_path: Path, auto: str) -> None:
    model = factories.hf_model("alberta", auto)
    with quiet_transformers():
        model.save_pretrained(tmp_path)
        again = getattr(transformers, auto).from_pretrained(tmp_path)
    assert type(again) is type(model)
    before, after = (factories.hf_padded(n, factories.token_ids(LENGTHS)).to_tuple() for n in (model, again))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("auto", sorted(set(factories.AUTO_CLASSES.values()) - {factories.AUTO_CLASSES["masked_lm"]}))
def test_a_pretrained_model_loads_into_every_head_without_its_own_head(tmp_path: Path, auto: str) -> None:
    model = factories.hf_model("alberta", factories.AUTO_CLASSES["masked_lm"])
    with quiet_transformers():
        model.save_pretrained(tmp_path)
        again, info = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
    body = {name for name in model.state_dict() if name.startswith("alberta.")}
    assert all(torch.equal(model.state_dict()[name], again.state_dict()[name]) for name in body)
    assert set(info["missing_keys"]) == set(again.state_dict()) - body


def test_losses_equal_those_of_torch() -> None:
    ids = torch.tensor(factories.token_ids([8, 8]))
    tags = ids % 3
    for auto, labels in (("MaskedLM", ids), ("TokenClassification", tags), ("SequenceClassification", tags[:, 0])):
        model = factories.hf_model("alberta", f"AutoModelFor{auto}")
        out = model(ids, labels=labels)
        assert torch.allclose(out.loss, torch.nn.functional.cross_entropy(out.logits.flatten(0, -2), labels.flatten()))
    one = factories.hf_model("alberta", num_labels=1)
    out = one(ids, labels=torch.tensor([0.5, 2.0]))
    assert torch.allclose(out.loss, (out.logits[:, 0] - torch.tensor([0.5, 2.0])).square().mean())
    spans = factories.hf_model("alberta", factories.AUTO_CLASSES["question_answering"])(
        ids, start_positions=tags[:, 0], end_positions=tags[:, 1]
    )
    assert spans.loss.isfinite()
    assert len(factories.hf_model("alberta").base_model(ids, output_hidden_states=True).hidden_states) == 5
    words = factories.hf_model("alberta", factories.AUTO_CLASSES["masked_lm"])
    assert words.get_output_embeddings().weight is words.get_input_embeddings().weight
