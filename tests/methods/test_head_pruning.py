"""Head pruning: importance is the gate's derivative; what is cut costs less and changes no answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from offramp import engines, methods
from offramp.core import cost
from offramp.core.loop import Result, run
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import build_network
from offramp.methods.head_pruning import HeadPruningOptions, PrunedStage, importance, most_important
from offramp.nn.batches import Data, build_batch, pack_rows
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers
from offramp.training.losses import exit_loss
from offramp.training.schedule import Schedule
from tests import factories

LENGTHS = [9, 3, 17, 5]
METHOD = methods.get("head_pruning")
HALF = HeadPruningOptions(heads=0.5, neurons=0.5)


def network_and_rows(backbone: str) -> tuple[Network, Data]:
    return factories.network("head_pruning", backbone=backbone, heads=0.5, neurons=0.5), factories.data(LENGTHS)


def pruned(backbone: str, folder: Path) -> tuple[Network, Data]:
    net, data = network_and_rows(backbone)
    PrunedStage(net, "pruned", options=HALF).prepare(data, folder)
    net.eval()
    return net, data


def run_rows(net: Network, encoded: list[Encoded]) -> Result:
    with torch.no_grad():
        policy = METHOD.policy(net, METHOD.settings())
        return run(engines.make("torch", net.encoder), net, policy, pack_rows(net.task, encoded))


@pytest.mark.parametrize("backbone", factories.BACKBONES)
def test_pruned_model_equals_plain_transformers(backbone: str, tmp_path: Path) -> None:
    unpruned, data = network_and_rows(backbone)
    before = run_rows(unpruned, data.encoded).logits
    net, _ = pruned(backbone, tmp_path)
    result = run_rows(net, data.encoded)
    expected = factories.hf_padded(net.hf, [e.ids for e in data.encoded]).logits
    assert torch.allclose(result.logits, expected, atol=1e-5) and not torch.allclose(result.logits, before, atol=1e-3)
    soft = forward_all_layers(net.encoder, pack_rows(net.task, data.encoded))  # the training path, with gradients
    assert torch.allclose(net(net.depth, soft.after(net.depth)), result.logits, atol=1e-5)
    for row, item in enumerate(data.encoded):
        assert torch.allclose(run_rows(net, [item]).logits[0], result.logits[row], atol=1e-5)


@pytest.mark.parametrize("backbone", factories.BACKBONES)
def test_cost_is_that_of_the_kept_parts(backbone: str, tmp_path: Path) -> None:
    net, data = pruned(backbone, tmp_path)
    kept, lengths = net.added["kept"], torch.tensor(LENGTHS)
    assert kept.heads.float().mean() == kept.neurons.float().mean() == 0.5
    spent, full = (
        cost.macs(run_rows(net, data.encoded).trace, net, 4).sum(),
        cost.full(net.unpruned, net.depth, lengths).sum(),
    )
    assert 0.4 < spent / full < 0.65  # exit heads and projections of the embeddings are not pruned
    fed = sum(layer.cost.feed for layer in net.encoder.layers) / sum(x.cost.feed for x in net.unpruned.encoder.layers)
    assert fed == pytest.approx(0.5)
    bare = build_network(factories.hf_model(backbone), net.task, methods.get("full"), methods.get("full").options())
    assert torch.equal(full, cost.full(bare, net.depth, lengths).sum())


@pytest.mark.parametrize("backbone", ["bert", "modernbert"])
def test_idle_tokens_are_keys_of_a_pruned_layer(backbone: str, tmp_path: Path) -> None:
    net, data = pruned(backbone, tmp_path)
    packed, layer = pack_rows(net.task, data.encoded[:1]), net.encoder.layers[0]
    with torch.no_grad():
        x = net.encoder.embed(packed)
        fused, _ = layer.attend(x, x, packed.layout, False, None)
        again, _ = layer.attend(x.clone(), x, packed.layout, False, None)  # not fused
    assert torch.allclose(fused, again, atol=1e-6)


def test_importance_is_the_derivative_with_respect_to_a_gate() -> None:
    net, data = network_and_rows("bert")
    heads, neurons = importance(net, data, rows=100)
    layer, wide = net.encoder.layers[1], 8
    out, down = layer.output_projections()  # type: ignore[attr-defined]  # every tiny layer can be pruned

    def slope(weight: Tensor, columns: slice) -> float:
        """Σ over rows of |loss(gate + ε) − loss(gate − ε)| / 2ε."""
        total, origin = 0.0, weight.detach().clone()
        for row in range(len(LENGTHS)):
            losses = []
            for gate in (1.01, 0.99):
                with torch.no_grad():
                    weight[:, columns] = origin[:, columns] * gate
                    batch = build_batch(net.task, data, [row], seed=0)
                    losses.append(
                        exit_loss(
                            net, net.depth, forward_all_layers(net.encoder, batch.packed).after(net.depth), batch
                        ).item()
                    )
            total += abs(losses[0] - losses[1]) / 0.02
            with torch.no_grad():
                weight.copy_(origin)
        return total

    for head in range(4):
        assert heads[1, head].item() == pytest.approx(
            slope(out.weight, slice(head * wide, (head + 1) * wide)), rel=0.02
        )
    assert neurons[1, 5].item() == pytest.approx(slope(down.weight, slice(5, 6)), rel=0.05, abs=1e-3)


def test_most_important_keeps_one_head_in_every_layer() -> None:
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4], [9.0, 8.0, 7.0, 6.0]])
    assert most_important(scores, 0.5, per_layer=False).tolist() == [
        [False, False, False, True],
        [True, True, True, False],
    ]
    assert most_important(scores, 0.5, per_layer=True).sum(1).tolist() == [2, 2]
    assert most_important(scores, 0.01, per_layer=False).sum(1).tolist() == [1, 1]
    assert most_important(scores, 1.0, per_layer=True).all()


def test_resuming_prunes_the_same_heads(tmp_path: Path) -> None:
    first, data = pruned("bert", tmp_path)
    again, _ = network_and_rows("bert")
    with torch.no_grad():
        for parameter in again.hf.parameters():
            parameter.mul_(-1.7)  # later training must not matter
    PrunedStage(again, "pruned", options=HALF).prepare(data, tmp_path)
    assert torch.equal(again.added["kept"].heads, first.added["kept"].heads)


@pytest.mark.parametrize("kind", ["classification", "masked_lm"])
def test_trained_run_is_loaded_pruned(base: str, tmp_path: Path, kind: str) -> None:
    given = {"options": {"heads": 0.5, "neurons": 0.25}, "schedule": Schedule(epochs=1, batch_size=8, lr=0.005)}
    folder = factories.run_folder(base, tmp_path, "head_pruning", kind, **given)
    model, again = Predictor.load(folder), Predictor.load(folder)
    kept = model.network.added["kept"]
    assert kept.heads.sum() == 6 and kept.neurons.sum() == 36
    layer = model.network.encoder.layers[0]
    out = layer.output_projections()[0].weight  # type: ignore[attr-defined]
    assert (out[:, ~kept.heads[0].repeat_interleave(8)] == 0).all() and (out[:, :].abs().sum(0) > 0).any()
    assert model.points is not None and len(model.points.points) == 1 and 0.2 < model.points.points[0].mac_share < 0.95
    rows = factories.labelled_rows(kind, 6, 9)
    encoded = model.prepare(rows)
    ours, theirs = (m.run(encoded, m.settings()) for m in (model, again))
    assert all((a == b).all() for a, b in zip(ours.logits, theirs.logits, strict=True))
    auto = getattr(transformers, model.task.auto_class).from_pretrained(folder)
    plain = factories.hf_padded(auto, [e.ids for e in encoded]).logits
    for row, (logits, item) in enumerate(zip(ours.logits, encoded, strict=True)):
        expected = plain[row, : len(item.ids)] if model.network.per_token else plain[row]
        assert torch.allclose(torch.from_numpy(logits), expected, atol=1e-4)


@pytest.mark.parametrize("wrong", [{"heads": 0.0}, {"neurons": 1.5}, {"rows": 0}])
def test_invalid_shares_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OfframpError, match=next(iter(wrong))):
        methods.configure(HeadPruningOptions, wrong, "head_pruning")
