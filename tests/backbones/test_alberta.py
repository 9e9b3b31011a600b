"""Our own family: relative positions by a slow, obvious computation; shared groups; positions that may be left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from offramp import backbones
from offramp.core.attention import AttentionOptions, attend
from offramp.core.packed import pack
from offramp.inference.run_folder import quiet_transformers
from tests import tiny

LENGTHS = [7, 1, 12]


def slow(block: Any, x: Tensor, position: list[int]) -> Tensor:
    """One row's attention weights, pair by pair, as the paper prints them."""  # [heads, queries, keys]
    width = x.shape[1] // block.heads
    q, k, _ = block.qkv(block.attention_norm(x)).chunk(3, dim=1)
    scores = torch.empty(block.heads, len(x), len(x))
    for head in range(block.heads):
        mine = slice(head * width, (head + 1) * width)
        for i in range(len(x)):
            for j in range(len(x)):
                apart = max(-block.reach, min(block.reach, position[i] - position[j]))
                vector = block.distances.weight[apart + block.reach]
                content = q[i, mine] @ k[j, mine] / width**0.5
                scores[head, i, j] = content + k[j, mine] @ vector + q[i, mine] @ vector
    return scores.softmax(-1)


@pytest.mark.parametrize("dropped", [False, True])
def test_relative_scores_pair_by_pair(dropped: bool) -> None:
    """Also where tokens are gone: distances are those of the original positions."""
    net = tiny.model("alberta")
    encoder, packed = backbones.encoder(net), pack(tiny.rows(LENGTHS))
    with torch.no_grad():
        packed = packed.with_states(encoder.embed(packed))
        if dropped:
            keep = torch.tensor([i % 3 != 1 for i in range(packed.total)])
            keep[packed.starts] = True
            packed = packed.keep_tokens(keep)
        _, seen = encoder.layers[0].attend(packed.states, packed.states, packed.layout, True, None)
        assert seen is not None
        parts = packed.states.split(packed.lengths.tolist())
        places = packed.tokens["position"].split(packed.lengths.tolist())
        for column, x, place in zip(seen.columns.split(packed.lengths.tolist()), parts, places, strict=True):
            assert torch.allclose(column, slow(net.alberta.blocks[0], x, place.tolist()).mean(0).sum(0), atol=1e-5)


def test_fused_attention_and_its_gradient_equal_the_written_out_one() -> None:
    torch.manual_seed(0)
    packed = pack(tiny.rows(LENGTHS))
    found = []
    for scores in (False, True):
        torch.manual_seed(1)
        q, k, v = (torch.randn(packed.total, 16, requires_grad=True) for _ in range(3))
        table = torch.randn(7, 4, requires_grad=True)
        bias = torch.linspace(-1, 1, packed.total)
        mixed, _ = attend(q, k, v, packed.layout, AttentionOptions(4, scores=scores, key_bias=bias, relative=table))
        mixed.square().sum().backward()
        found.append((mixed.detach(), *(x.grad for x in (q, k, v, table))))
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and torch.allclose(a, b, atol=1e-4)


def test_layers_of_a_group_are_one_block() -> None:
    net = tiny.model("alberta", num_hidden_layers=7, num_hidden_groups=3)
    stack = net.alberta.stack
    assert [list(net.alberta.blocks).index(block) for block in stack] == [0, 0, 0, 1, 1, 2, 2]
    layers = backbones.encoder(net).layers
    assert len(layers) == 7 and len({id(layer) for layer in layers}) == 3


@pytest.mark.parametrize(("absolute", "relative"), [(True, False), (False, True), (False, False)])
def test_positions_left_out(absolute: bool, relative: bool) -> None:
    net = tiny.model("alberta", absolute_positions=absolute, relative_positions=relative)
    names = " ".join(name for name, _ in net.named_parameters())
    assert ("position_embeddings" in names, "distances" in names) == (absolute, relative)
    row = tiny.rows([6])[0]
    there, back = tiny.padded(net.base_model, [row, row[::-1]]).last_hidden_state
    blind = not absolute and not relative
    assert torch.allclose(there, back.flip(0), atol=1e-5) == blind, "only without any position is order lost"


@pytest.mark.parametrize("auto", sorted(set(tiny.AUTO.values())))
def test_the_auto_classes_of_transformers_open_it_as_it_was(tmp_path: Path, auto: str) -> None:
    net = tiny.model("alberta", auto)
    with quiet_transformers():
        net.save_pretrained(tmp_path)
        again = getattr(transformers, auto).from_pretrained(tmp_path)
    assert type(again) is type(net)
    ours, theirs = (tiny.padded(n, tiny.rows(LENGTHS)).to_tuple() for n in (net, again))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("auto", sorted(set(tiny.AUTO.values()) - {tiny.AUTO["masked_lm"]}))
def test_a_pretrained_one_brings_its_layers_to_every_head_and_no_part_of_its_own(tmp_path: Path, auto: str) -> None:
    net = tiny.model("alberta", tiny.AUTO["masked_lm"])
    with quiet_transformers():
        net.save_pretrained(tmp_path)
        again, told = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
    body = {name for name in net.state_dict() if name.startswith("alberta.")}
    assert all(torch.equal(net.state_dict()[name], again.state_dict()[name]) for name in body)
    assert set(told["missing_keys"]) == set(again.state_dict()) - body


def test_losses_as_transformers_trains_with_them() -> None:
    ids = torch.tensor(tiny.rows([8, 8]))
    tags = ids % 3
    for auto, labels in (("MaskedLM", ids), ("TokenClassification", tags), ("SequenceClassification", tags[:, 0])):
        net = tiny.model("alberta", f"AutoModelFor{auto}")
        out = net(ids, labels=labels)
        assert torch.allclose(out.loss, torch.nn.functional.cross_entropy(out.logits.flatten(0, -2), labels.flatten()))
    one = tiny.model("alberta", num_labels=1)
    out = one(ids, labels=torch.tensor([0.5, 2.0]))
    assert torch.allclose(out.loss, (out.logits[:, 0] - torch.tensor([0.5, 2.0])).square().mean())
    spans = tiny.model("alberta", tiny.AUTO["question_answering"])(
        ids, start_positions=tags[:, 0], end_positions=tags[:, 1]
    )
    assert spans.loss.isfinite()
    assert len(tiny.model("alberta").base_model(ids, output_hidden_states=True).hidden_states) == 5
    words = tiny.model("alberta", tiny.AUTO["masked_lm"])
    assert words.get_output_embeddings().weight is words.get_input_embeddings().weight
