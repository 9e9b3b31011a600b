"""AdapLeR in training: what each loss trains, saliency, the kept epoch, and options."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import methods
from offramp.calibration import calibrate
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.methods import adapler
from offramp.methods.adapler import AdapLeROptions, SaliencyFineTuning, SoftDroppingStage
from offramp.nn.batches import Batch, Data
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers
from offramp.training.losses import last_exit_loss
from offramp.training.saliency import saliency
from tests import factories
from tests.methods.test_adapler import all_rows, network_and_rows


def prepared_stage(net: Network, data: Data, folder: Path, **options: Any) -> SoftDroppingStage:
    stage = SoftDroppingStage(net, options=AdapLeROptions(**options))
    stage.prepare(data, folder)
    net.eval()
    return stage


def gradients(stage: SoftDroppingStage, batch: Batch) -> dict[str, Tensor]:
    for _, p in stage.network.named_parameters():
        p.grad = None
    stage.step(batch, lambda loss: loss.backward())
    return {name: p.grad.clone() for name, p in stage.network.named_parameters() if p.grad is not None}


def test_length_loss_reaches_eta_and_theta_only(tmp_path: Path) -> None:
    net, data = network_and_rows()
    batch = all_rows(net, data)
    without, included = (gradients(prepared_stage(net, data, tmp_path, phi=phi), batch) for phi in (0.0, 1.0))
    changed = {name for name in included if not torch.allclose(included[name], without[name], atol=1e-6)}
    assert changed == {"added.cuts.eta", "added.cuts.theta"}


def test_predictor_loss_has_no_gradient_for_thresholds(tmp_path: Path) -> None:
    net, data = network_and_rows()
    batch = all_rows(net, data)
    without, included = (gradients(prepared_stage(net, data, tmp_path, gamma=gamma), batch) for gamma in (0.0, 1.0))
    assert all(torch.equal(included[name], without[name]) for name in ("added.cuts.eta", "added.cuts.theta"))
    assert not torch.allclose(included["added.predictors.1.inner.weight"], without["added.predictors.1.inner.weight"])


def test_theta_gets_the_gradient_of_the_dummy_divided_by_theta(tmp_path: Path) -> None:
    net, data = network_and_rows()
    batch = all_rows(net, data)
    ones = gradients(prepared_stage(net, data, tmp_path), batch)["added.cuts.theta"]
    with torch.no_grad():
        adapler.token_thresholds(net).theta.fill_(4.0)
    assert torch.allclose(
        gradients(prepared_stage(net, data, tmp_path), batch)["added.cuts.theta"], ones / 4, rtol=1e-4
    )


def test_sharpness_grows_over_the_whole_stage() -> None:
    net, _ = network_and_rows()
    stage = SoftDroppingStage(net, options=AdapLeROptions())
    seen = []
    for share in (0.0, 0.4, 0.8, 0.99):
        stage.set_progress(share)
        seen.append(stage.sharpness)
    assert seen == pytest.approx([10.0, 1e3, 1e5, 1e5])


def test_best_epoch_is_the_cheapest_within_the_slack() -> None:
    net, _ = network_and_rows()
    stage = SoftDroppingStage(net, options=AdapLeROptions(slack=0.01), reference={"accuracy": 0.90})
    epoch = [{"accuracy": a, "mac_share": m} for a, m in [(0.91, 0.5), (0.895, 0.3), (0.88, 0.1), (0.892, 0.4)]]
    assert stage.best_epoch(epoch) == 1
    assert stage.best_epoch([{"accuracy": a, "mac_share": 0.1} for a in (0.7, 0.8, 0.75)]) == 1


def test_mean_saliency_is_that_of_the_best_epochs(tmp_path: Path) -> None:
    net, data = network_and_rows(best=2)
    first = SaliencyFineTuning(net, options=AdapLeROptions(best=2))
    first.prepare(data, tmp_path)
    history, seen = [], []
    for score in (0.5, 0.9, 0.8):
        with torch.no_grad():
            net.hf.classifier.weight.mul_(1.5)
        seen.append(saliency(net, all_rows(net, data)))
        history.append({"accuracy": score})
        first.end_epoch(history)
    assert torch.allclose(first.mean_saliency(), (seen[1] + seen[2]) / 2)
    stage = SoftDroppingStage(net, options=AdapLeROptions(), first=first)
    stage.prepare(data, tmp_path)
    assert torch.allclose(torch.cat(stage.saliencies.rows), (seen[1] + seen[2]) / 2)


def test_objective_of_a_depth_method_replaces_the_loss(tmp_path: Path) -> None:
    net, data = network_and_rows()
    present: list[dict[int, Tensor]] = []

    def objective(network: Network, states: Any, batch: Batch) -> Tensor:
        present.append(states.present)
        return 2 * last_exit_loss(network, states, batch)

    _, stage, _ = methods.get("adapler").stages(net, AdapLeROptions(), objective)
    stage.prepare(data, tmp_path)
    logged = stage.step(all_rows(net, data), lambda loss: loss.backward())
    plain = SoftDroppingStage(net, options=AdapLeROptions())
    plain.prepare(data, tmp_path)
    assert logged["loss"].item() == pytest.approx(2 * plain.step(all_rows(net, data), lambda _: None)["loss"].item())
    assert sorted(present[0]) == [1, 2, 3] and all(p.min() >= 0 and p.max() <= 1 for p in present[0].values())


def test_trained_run_has_cheaper_operating_points(base: str, tmp_path: Path) -> None:
    run_folder = factories.run_folder(base, tmp_path, "adapler", options={"phi": 0.05, "cut_lr": 0.1, "slack": 1.0})
    predictor = Predictor.load(str(run_folder))
    shares = [p.mac_share for p in predictor.points.points]
    assert min(shares) < 0.9 and adapler.token_thresholds(predictor.network).eta.mean() > 0.3


def test_training_with_dropping_draws_scales_and_freezes_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = network_and_rows(train_with_dropping=True, largest_scale=0.5)
    published = AdapLeROptions(train_with_dropping=False)
    assert [stage.name for stage in methods.get("adapler").stages(net, published)] == ["fine-tune", "length"]
    *_, stage = methods.get("adapler").stages(net, AdapLeROptions(train_with_dropping=True, largest_scale=0.5))
    names = {name for name, _ in stage.trainable()}
    assert {name for name, _ in net.named_parameters()} - names == {
        name for name, _ in net.named_parameters() if name.startswith(("added.predictors.", "added.cuts."))
    }
    drawn: list[float] = []
    real = adapler.AdapLeRPolicy
    monkeypatch.setattr(adapler, "AdapLeRPolicy", lambda net, s: drawn.append(s.scale) or real(net, s))
    for _ in range(4):
        stage.step(all_rows(net, data), lambda loss: loss.backward())
    assert len(set(drawn)) == 4 and all(0.0 <= scale <= 0.5 for scale in drawn)
    assert net.hf.classifier.weight.grad is not None and adapler.token_thresholds(net).eta.grad is None


def test_training_with_dropping_also_learns_the_logits_with_all_tokens(tmp_path: Path) -> None:
    net, data = network_and_rows()
    net.eval()
    batch, losses = all_rows(net, data), {}
    for weight in (0.0, 1.0, 3.0):
        options = AdapLeROptions(train_with_dropping=True, largest_scale=1.5, distillation=weight)
        *_, stage = methods.get("adapler").stages(net, options)
        stage.prepare(data, tmp_path)
        torch.manual_seed(0)  # the scale that is drawn
        losses[weight] = stage.step(batch, lambda _: None)["loss"].item()
    distance = losses[1.0] - losses[0.0]
    assert distance > 1e-6 and losses[3.0] == pytest.approx(losses[0.0] + 3 * distance, rel=1e-4)
    everything = AdapLeROptions(train_with_dropping=True, largest_scale=0.0)
    *_, stage = methods.get("adapler").stages(net, everything)
    stage.prepare(data, tmp_path)
    with_all_tokens = stage.step(batch, lambda _: None)["loss"].item()
    stage.teacher = None
    assert with_all_tokens == pytest.approx(stage.step(batch, lambda _: None)["loss"].item(), abs=1e-5)


def test_dropping_learns_the_logits_from_before_length_training(tmp_path: Path) -> None:
    net, data = network_and_rows()
    _, length, dropping = methods.get("adapler").stages(net, AdapLeROptions())
    folders = [tmp_path / f"stage-{number}" for number in (1, 2)]
    for folder in folders:
        folder.mkdir()
    length.prepare(data, folders[0])
    net.eval()
    batch = all_rows(net, data)
    before = net(net.depth, forward_all_layers(net.encoder, batch.packed).after(net.depth))
    with torch.no_grad():
        net.hf.classifier.bias.add_(torch.tensor([1.0, 0.0, -1.0]))  # what length training would change
    dropping.prepare(data, folders[1])
    assert isinstance(dropping, adapler.RandomScaleStage) and dropping.teacher is not None
    assert torch.allclose(dropping.teacher.for_batch(batch), before, atol=1e-5)


def test_calibration_gives_layers_scales_of_their_own(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = factories.run_folder(base, tmp_path, "adapler", options={"phi": 0.05, "cut_lr": 0.1, "slack": 1.0})
    predictor, rows = Predictor.load(str(run)), factories.labelled_rows("classification", 40, 3)
    data = Data(rows, predictor.prepare(rows))
    context = calibrate.CalibrationContext(predictor.network, predictor.model.method, data)
    monkeypatch.setattr(calibrate, "FEW_ROWS", 40)
    found = [point for point in calibrate.explore_settings(context, context.record()) if point.settings["scales"]]
    assert found and all(len(point.settings["scales"]) == predictor.network.depth for point in found)
    assert all(
        len(point.row_losses) == 20 and point.family == "scales" for point in found
    )  # the other half of the rows
    monkeypatch.setattr(calibrate, "FEW_ROWS", 41)
    few = calibrate.explore_settings(context, context.record())
    assert not any(point.settings["scales"] for point in few)


def test_model_of_one_layer_trains_its_threshold(tmp_path: Path) -> None:
    net, data = network_and_rows(config={"num_hidden_layers": 1})
    found = gradients(prepared_stage(net, data, tmp_path, phi=1.0), all_rows(net, data))
    assert net.depth == 1 and found["added.cuts.eta"].abs().max() > 0


def test_too_large_scale_is_refused() -> None:
    with pytest.raises(OfframpError, match=r"largest_scale=1001.*\n.*use 0 to 1000"):
        AdapLeROptions(largest_scale=1001.0)


def test_length_training_starts_from_the_pretrained_model(tmp_path: Path) -> None:
    net, data = network_and_rows(start="pretrained")
    first, stage, _ = methods.get("adapler").stages(net, AdapLeROptions(start="pretrained"))
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
