"""Halting units: every form stops where its rule says, batches change nothing, oracles teach, training reaches all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offramp
from offramp import engines, methods, tasks
from offramp.calibration.calibrate import candidate_settings
from offramp.core import cost
from offramp.core.loop import Result, State, run
from offramp.core.packed import Packed
from offramp.data.tokenization import Encoded
from offramp.decoding.exits import DecoderSettings
from offramp.errors import OfframpError
from offramp.inference import run_folder as folder
from offramp.methods.depth_adaptive.options import DepthAdaptiveOptions
from offramp.methods.depth_adaptive.policy import EncoderHaltingPolicy
from offramp.methods.depth_adaptive.training import ExitPass, Oracle, halting_loss, oracle_exits, run_all_exits
from offramp.nn.batches import Batch, Data, pack_rows
from offramp.nn.network import Network
from offramp.training.forward import LayerStates, forward_all_layers
from offramp.training.schedule import Schedule
from tests import factories

LENGTHS = [9, 3, 17, 5]
FORMS = ["multinomial", "geometric", "threshold"]


def network_and_rows(task: str = "classification", **options: Any) -> tuple[Network, Data]:
    """Return a network whose units clearly differ between rows, and rows of a special token and words of two pieces."""
    net = factories.network("depth_adaptive", task, seed=None, **options)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.startswith("added.predictors.") and name.endswith("weight"):
                parameter.mul_(3.0)
    words = [[-1, *(place // 2 for place in range(n - 1))] for n in LENGTHS]
    return net, Data(factories.examples(LENGTHS), factories.encode(factories.token_ids(LENGTHS), words))


@torch.no_grad()
def run_rows(net: Network, packed: Packed, settings: DecoderSettings) -> Result:
    return run(engines.make("torch", net.encoder), net, methods.get("depth_adaptive").policy(net, settings), packed)


def pooled(net: Network, packed: Packed, layer: int) -> Tensor:
    return forward_all_layers(net.encoder, packed).after(layer).mean()


@torch.no_grad()
def test_multinomial_form_stops_at_its_most_likely_exit() -> None:
    net, data = network_and_rows(form="multinomial")
    packed = pack_rows(net.task, data.encoded)
    q = net.added["predictors"]["1"](pooled(net, packed, 1)).softmax(1)  # type: ignore[index]  # a ModuleDict
    result = run_rows(net, packed, DecoderSettings(0.5, argmax=True))
    assert result.exit_layer.tolist() == (q.argmax(1) + 1).tolist()
    assert len(set(result.exit_layer.tolist())) > 1
    assert sum(e.kind == "predictor" for e in result.trace) == 1
    assert run_rows(net, packed, DecoderSettings(argmax=True)).exit_layer.tolist() == result.exit_layer.tolist()
    by_share = run_rows(net, packed, DecoderSettings(0.5))
    assert by_share.exit_layer.tolist() == [next(n for n in (1, 2, 3) if row[n:].sum() < 0.5) for row in q]


@torch.no_grad()
def test_geometric_form_stops_where_its_unit_is_above_the_threshold() -> None:
    net, data = network_and_rows(form="geometric")
    packed = pack_rows(net.task, data.encoded)
    chi = torch.stack([net.added["predictors"].unit_logits(n, pooled(net, packed, n)).sigmoid() for n in (1, 2)], 1)  # type: ignore[operator]
    limit = float(chi[:, 0].median()) + 1e-4
    result = run_rows(net, packed, DecoderSettings(1 - limit))
    assert result.exit_layer.tolist() == [next((n for n in (1, 2) if row[n - 1] > limit), 3) for row in chi]
    assert len(set(result.exit_layer.tolist())) > 1


@torch.no_grad()
def test_threshold_form_uses_the_confidence_of_the_exit() -> None:
    net, data = network_and_rows(form="threshold")
    packed = pack_rows(net.task, data.encoded)
    states = forward_all_layers(net.encoder, packed)
    confidence = torch.stack([net(n, states.after(n)).softmax(1).amax(1) for n in (1, 2)], 1)  # [rows, exits]
    limit = float(1 - confidence.median())
    expected = [next((n for n in (1, 2) if 1 - row[n - 1] < limit), 3) for row in confidence]
    assert run_rows(net, packed, DecoderSettings(limit)).exit_layer.tolist() == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("task", "level"), [("classification", "row"), ("tagging", "word"), ("tagging", "row")])
def test_a_batch_equals_its_rows_one_at_a_time(form: str, task: str, level: str) -> None:
    net, data = network_and_rows(task, form=form, level=level)
    most_likely = [DecoderSettings(0.5, argmax=True)] if form == "multinomial" else []
    for settings in (DecoderSettings(0.7), DecoderSettings(0.4), *most_likely):
        together = run_rows(net, pack_rows(net.task, data.encoded), settings)
        parts = together.logits.split(LENGTHS) if net.per_token else list(together.logits)
        spent = cost.macs(together.trace, net, len(LENGTHS))
        for row, item in enumerate(data.encoded):
            alone = run_rows(net, pack_rows(net.task, [item]), settings)
            assert alone.exit_layer.item() == together.exit_layer[row].item()
            assert torch.allclose(alone.logits.reshape(parts[row].shape), parts[row], atol=1e-5)
            assert cost.macs(alone.trace, net, 1).item() == pytest.approx(spent[row].item())


def test_words_stop_separately_together_with_their_pieces() -> None:
    net, data = network_and_rows("tagging", form="multinomial")
    packed = pack_rows(net.task, data.encoded)
    result = run_rows(net, packed, DecoderSettings(0.5, argmax=True))
    with torch.no_grad():
        q = net.added["predictors"]["1"](forward_all_layers(net.encoder, packed).after(1).states)  # type: ignore[index]
    exits = q.argmax(1) + 1  # of tokens; only those of first pieces are used
    for row, (start, length) in enumerate(zip(packed.starts.tolist(), LENGTHS, strict=True)):
        words = [int(exits[start + place]) for place in range(1, length, 2)]  # first pieces
        tokens = [words[place // 2] for place in range(length - 1)]
        assert result.exit_layer[row].item() == pytest.approx((max(words) + sum(tokens)) / length)


@pytest.mark.parametrize(
    ("kind", "penalty", "sigma", "expected"),
    [
        ("correctness", 0.1, 0.0, [1, 0, 2]),
        ("likelihood", 0.0, 0.0, [2, 1, 2]),
        ("likelihood", 1.0, 0.0, [1, 0, 2]),
        ("correctness", 0.1, 1.0, [1, 2, 2]),  # the second word now waits for both its neighbours
    ],
)
def test_oracle_exits_of_words(kind: Any, penalty: float, sigma: float, expected: list[int]) -> None:
    net, _ = network_and_rows("tagging")
    packed = pack_rows(net.task, [Encoded([5, 6, 7], [0] * 3, 0, [0, 1, 2], [], 0)])
    logits = [  # three tags, the first is right for words 0 and 1, the second for word 2
        torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0], [3.0, 0.0, 0.0]]),
        torch.tensor([[2.0, 0.0, 0.0], [1.5, 0.0, 0.0], [1.0, 0.0, 0.0]]),
        torch.tensor([[2.1, 0.0, 0.0], [1.2, 0.0, 0.0], [0.0, 4.0, 0.0]]),
    ]
    output = ExitPass(Batch(packed, torch.tensor([0, 0, 1]), [0]), LayerStates(packed, []), logits)
    assert oracle_exits(net, output, Oracle(kind, penalty, sigma), by_word=True).tolist() == expected


def test_oracle_exits_of_rows() -> None:
    net, data = network_and_rows()
    batch = Batch(pack_rows(net.task, data.encoded[:2]), torch.tensor([0, 2]), [0, 1])
    logits = [torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 9.0]])]
    output = ExitPass(batch, LayerStates(batch.packed, []), logits)
    assert oracle_exits(net, output, Oracle("correctness", 0.1, 0.0), by_word=False).tolist() == [1, 0]
    assert oracle_exits(net, output, Oracle("likelihood", 0.1, 0.0), by_word=False).tolist() == [1, 1]


@pytest.mark.parametrize("training", ["aligned", "mixed"])
@pytest.mark.parametrize(("form", "task"), [("multinomial", "tagging"), ("geometric", "tagging"),
                                            ("multinomial", "classification"), ("threshold", "tagging")])  # fmt: skip
def test_gradients_reach_the_declared_parameters(training: str, form: str, task: str) -> None:
    options = {"form": form, "training": training, "samples": 4}
    net, data = network_and_rows(task, **options)
    batch = factories.batch(net, data, seed=0)
    stages = methods.get("depth_adaptive").stages(net, DepthAdaptiveOptions(**options))  # type: ignore[arg-type]
    assert len(stages) == (1 if form == "threshold" else 2)
    for stage in stages:
        net.added.zero_grad()
        net.hf.zero_grad()
        torch.manual_seed(0)
        for _ in range(3):
            stage.step(batch, lambda loss: loss.backward())
        reached = {name for name, p in net.named_parameters() if p.grad is not None}
        assert {name for name, _ in stage.trainable()} - reached <= {"model.bert.pooler.dense.weight"}
        assert stage is stages[-1] or not any(name.startswith("added.predictors.") for name in reached)


def test_detached_units_have_no_gradient_for_the_model() -> None:
    grads = []
    for detach in (True, False):
        net, data = network_and_rows(form="geometric")
        output = run_all_exits(net, factories.batch(net, data, seed=0))
        oracle = Oracle("likelihood", 0.1, 0.0)
        halting_loss(net, net.added["predictors"], output, oracle, detach).backward()  # type: ignore[arg-type]
        grads.append([p.grad is not None for name, p in net.named_parameters() if "encoder.layer.0" in name])
    assert not any(grads[0]) and all(grads[1])


class RecordingReasons(EncoderHaltingPolicy):
    """Records the reason of every layer."""

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        done = super().should_exit(layer, s)
        self.reasons = [*getattr(self, "reasons", []), self.reason(layer, s)]
        return done


@torch.no_grad()
def test_reason_describes_rows_and_words() -> None:
    for task, expected in (("classification", "uncertainty"), ("tagging", "words go on")):
        net, data = network_and_rows(task)
        policy = RecordingReasons(net, DecoderSettings(0.01))
        run(engines.make("torch", net.encoder), net, policy, pack_rows(net.task, data.encoded[:1]))
        assert policy.reasons[0] == "" and expected in policy.reasons[1]
    net, data = network_and_rows(form="multinomial")
    policy = RecordingReasons(net, DecoderSettings(argmax=True))
    run(engines.make("torch", net.encoder), net, policy, pack_rows(net.task, data.encoded[:1]))
    assert "uncertainty" in policy.reasons[1]


@pytest.mark.parametrize("form", FORMS)
def test_calibration_tries_the_rule_of_the_paper_for_multinomial_units(form: str) -> None:
    net, _ = network_and_rows(form=form)
    tried = candidate_settings(net, methods.get("depth_adaptive"), None)  # type: ignore[arg-type]  # no recording is needed
    assert tried.count({"argmax": True}) == (form == "multinomial") and {"threshold": 0.5} in tried


@pytest.mark.parametrize("kind", ["classification", "tagging"])
def test_run_trains_and_calibrates(base: str, tmp_path: Path, kind: str) -> None:
    quick = Schedule(epochs=1, batch_size=8, lr=0.005)
    run_folder = factories.run_folder(
        base, tmp_path, "depth_adaptive", kind, schedule=quick, options={"form": "multinomial"}
    )
    log = folder.read_recipe(run_folder)["log"]
    assert [entry["stage"] for entry in log] == ["exits", "exits and halting"]
    model = offramp.load(run_folder)
    assert model.points is not None and model.points.points[0].mac_share < 0.99


def test_invalid_options_and_settings_are_refused() -> None:
    spec = tasks.get("regression").from_rows([{"text": "a", "label": y} for y in (0.5, 1.5)], "rows")
    with pytest.raises(OfframpError, match="form=geometric"):
        folder.build_network(
            factories.hf_model("bert", num_labels=1),
            spec,
            methods.get("depth_adaptive"),
            DepthAdaptiveOptions("threshold"),
        )
    with pytest.raises(OfframpError, match="level=row"):
        network_and_rows(level="word")
    with pytest.raises(OfframpError, match="sigma=-1"):
        DepthAdaptiveOptions(sigma=-1.0)
    with pytest.raises(OfframpError, match="threshold=2"):
        DecoderSettings(2.0)


@pytest.mark.parametrize("form", ["geometric", "threshold"])
def test_argmax_is_refused_for_units_that_decide_layer_by_layer(form: str) -> None:
    net, _ = network_and_rows(form=form)
    with pytest.raises(OfframpError, match="multinomial or sequence"):
        methods.get("depth_adaptive").policy(net, DecoderSettings(0.5, argmax=True))
