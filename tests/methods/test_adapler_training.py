"""AdapLeR in training: what each loss moves, what predictors are taught, and which epoch is kept."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import methods
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.methods import adapler
from offramp.methods.adapler import AdapLeROptions, SaliencyFineTuning, SoftDroppingStage
from offramp.nn.batches import Batch, Data
from offramp.nn.network import Network
from offramp.training.losses import last_exit_loss
from offramp.training.saliency import saliency
from tests import factories
from tests.methods.test_adapler import build, everyone


def stage_of(net: Network, data: Data, folder: Path, **options: Any) -> SoftDroppingStage:
    made = SoftDroppingStage(net, options=AdapLeROptions(**options))
    made.prepare(data, folder)
    net.eval()
    return made


def gradients(stage: SoftDroppingStage, some: Batch) -> dict[str, Tensor]:
    for _, p in stage.network.named_parameters():
        p.grad = None
    stage.step(some, lambda loss: loss.backward())
    return {name: p.grad.clone() for name, p in stage.network.named_parameters() if p.grad is not None}


def test_the_length_loss_reaches_thresholds_and_amplifiers_only(tmp_path: Path) -> None:
    net, data = build()
    some = everyone(net, data)
    without, with_it = (gradients(stage_of(net, data, tmp_path, phi=phi), some) for phi in (0.0, 1.0))
    moved = {name for name in with_it if not torch.allclose(with_it[name], without[name], atol=1e-6)}
    assert moved == {"added.cuts.eta", "added.cuts.theta"}


def test_predictors_loss_never_moves_the_thresholds(tmp_path: Path) -> None:
    net, data = build()
    some = everyone(net, data)
    without, with_it = (gradients(stage_of(net, data, tmp_path, gamma=gamma), some) for gamma in (0.0, 1.0))
    assert all(torch.equal(with_it[name], without[name]) for name in ("added.cuts.eta", "added.cuts.theta"))
    assert not torch.allclose(with_it["added.predictors.1.inner.weight"], without["added.predictors.1.inner.weight"])


def test_amplifiers_get_the_dummys_gradient_over_themselves(tmp_path: Path) -> None:
    net, data = build()
    some = everyone(net, data)
    ones = gradients(stage_of(net, data, tmp_path), some)["added.cuts.theta"]
    with torch.no_grad():
        adapler.token_thresholds(net).theta.fill_(4.0)
    assert torch.allclose(gradients(stage_of(net, data, tmp_path), some)["added.cuts.theta"], ones / 4, rtol=1e-4)


def test_sharpness_spans_the_stage_whatever_its_length() -> None:
    net, _ = build()
    stage = SoftDroppingStage(net, options=AdapLeROptions())
    seen = []
    for share in (0.0, 0.4, 0.8, 0.99):
        stage.set_progress(share)
        seen.append(stage.sharpness)
    assert seen == pytest.approx([10.0, 1e3, 1e5, 1e5])


def test_the_fastest_epoch_within_a_point_is_kept() -> None:
    net, _ = build()
    stage = SoftDroppingStage(net, options=AdapLeROptions(slack=0.01), reference={"accuracy": 0.90})
    epoch = [{"accuracy": a, "mac_share": m} for a, m in [(0.91, 0.5), (0.895, 0.3), (0.88, 0.1), (0.892, 0.4)]]
    assert stage.best_epoch(epoch) == 1
    assert stage.best_epoch([{"accuracy": a, "mac_share": 0.1} for a in (0.7, 0.8, 0.75)]) == 1


def test_saliency_is_averaged_over_the_best_epochs(tmp_path: Path) -> None:
    net, data = build(options=AdapLeROptions(best=2))
    first = SaliencyFineTuning(net, options=AdapLeROptions(best=2))
    first.prepare(data, tmp_path)
    history, seen = [], []
    for score in (0.5, 0.9, 0.8):
        with torch.no_grad():
            net.hf.classifier.weight.mul_(1.5)
        seen.append(saliency(net, everyone(net, data)))
        history.append({"accuracy": score})
        first.end_epoch(history)
    assert torch.allclose(first.mean_saliency(), (seen[1] + seen[2]) / 2)
    stage = SoftDroppingStage(net, options=AdapLeROptions(), first=first)
    stage.prepare(data, tmp_path)
    assert torch.allclose(torch.cat(stage.saliencies.rows), (seen[1] + seen[2]) / 2)


def test_a_depth_methods_objective_takes_the_place_of_the_loss(tmp_path: Path) -> None:
    net, data = build()
    seen: list[dict[int, Tensor]] = []

    def objective(network: Network, made: Any, some: Batch) -> Tensor:
        seen.append(made.present)
        return 2 * last_exit_loss(network, made, some)

    _, stage = methods.get("adapler").stages(net, AdapLeROptions(), objective)
    stage.prepare(data, tmp_path)
    logged = stage.step(everyone(net, data), lambda loss: loss.backward())
    plain = SoftDroppingStage(net, options=AdapLeROptions())
    plain.prepare(data, tmp_path)
    assert logged["loss"].item() == pytest.approx(2 * plain.step(everyone(net, data), lambda _: None)["loss"].item())
    assert sorted(seen[0]) == [1, 2, 3] and all(p.min() >= 0 and p.max() <= 1 for p in seen[0].values())


def test_a_run_is_trained_and_shorter(base: str, tmp_path: Path) -> None:
    run_folder = factories.run_folder(base, tmp_path, "adapler", options={"phi": 0.05, "cut_lr": 0.1, "slack": 1.0})
    predictor = Predictor.load(str(run_folder))
    shares = [p.mac_share for p in predictor.points.points]
    assert min(shares) < 0.9 and adapler.token_thresholds(predictor.network).eta.mean() > 0.3


def test_settling_draws_a_scale_for_each_batch_and_leaves_who_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = build(options=AdapLeROptions(train_with_dropping=True, largest_scale=0.5))
    assert [stage.name for stage in methods.get("adapler").stages(net, AdapLeROptions())] == ["fine-tune", "length"]
    *_, stage = methods.get("adapler").stages(net, AdapLeROptions(train_with_dropping=True, largest_scale=0.5))
    names = {name for name, _ in stage.trainable()}
    assert {name for name, _ in net.named_parameters()} - names == {
        name for name, _ in net.named_parameters() if name.startswith(("added.predictors.", "added.cuts."))
    }
    drawn: list[float] = []
    real = adapler.AdapLeRPolicy
    monkeypatch.setattr(adapler, "AdapLeRPolicy", lambda net, s: drawn.append(s.scale) or real(net, s))
    for _ in range(4):
        stage.step(everyone(net, data), lambda loss: loss.backward())
    assert len(set(drawn)) == 4 and all(0.0 <= scale <= 0.5 for scale in drawn)
    assert net.hf.classifier.weight.grad is not None and adapler.token_thresholds(net).eta.grad is None


def test_a_model_of_one_layer_learns_its_threshold(tmp_path: Path) -> None:
    net, data = build(num_hidden_layers=1)
    found = gradients(stage_of(net, data, tmp_path, phi=1.0), everyone(net, data))
    assert net.depth == 1 and found["added.cuts.eta"].abs().max() > 0


def test_a_reach_that_no_setting_allows_is_refused() -> None:
    with pytest.raises(OfframpError, match=r"largest_scale=1001.*\n.*use 0 to 1000"):
        AdapLeROptions(largest_scale=1001.0)


def test_starting_from_the_pretrained_model(tmp_path: Path) -> None:
    net, data = build(options=AdapLeROptions(start="pretrained"))
    first, stage = methods.get("adapler").stages(net, AdapLeROptions(start="pretrained"))
    first.prepare(data, tmp_path)
    before = copy.deepcopy(net.hf.state_dict())
    with torch.no_grad():
        net.hf.classifier.weight.add_(1.0)
    first.end_epoch([{"accuracy": 0.5}])
    stage.prepare(data, tmp_path)
    assert all(torch.equal(t, before[name]) for name, t in net.hf.state_dict().items())
    alone = SoftDroppingStage(net, options=AdapLeROptions(start="pretrained"))
    with pytest.raises(OfframpError, match="leave --init out"):
        alone.prepare(data, tmp_path / "other")
