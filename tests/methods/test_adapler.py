"""AdapLeR's rules: which tokens are dropped, the soft mask, the saliency of a token, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import engines, methods
from offramp.core import cost
from offramp.core.loop import State, run
from offramp.core.packed import Packed
from offramp.errors import OfframpError
from offramp.inference.run_folder import build_network
from offramp.methods import adapler
from offramp.methods.adapler import AdapLeROptions, AdapLeRPolicy, AdapLeRSettings, SoftTokenMask, log_presence_change
from offramp.nn import row_ops as rows
from offramp.nn.batches import Batch, Data, pack_rows
from offramp.nn.network import Network
from offramp.training.forward import ForwardHooks, forward_all_layers
from offramp.training.saliency import saliency
from tests import factories

LENGTHS = [9, 3, 17, 5]
TASKS = ["classification", "regression", "tagging"]


def network_and_rows(
    task: str = "classification", config: dict[str, Any] | None = None, **options: Any
) -> tuple[Network, Data]:
    """Return a tiny network whose predictors clearly prefer some tokens, and its rows."""
    net = factories.network("adapler", task, config=config, **options)
    with torch.no_grad():
        for _, p in net.added["predictors"].named_parameters():
            p.mul_(3.0)
        adapler.token_thresholds(net).eta.fill_(0.7)
    return net, factories.data(LENGTHS)


def all_rows(net: Network, data: Data) -> Batch:
    return factories.batch(net, data)


def run_soft(net: Network, packed: Packed, sharpness: float) -> tuple[Tensor, SoftTokenMask]:
    thresholds = adapler.token_thresholds(net)
    soft = SoftTokenMask(net, thresholds.eta.detach(), torch.ones_like(thresholds.theta), sharpness)
    states = forward_all_layers(net.encoder, packed, ForwardHooks(gate=soft.gate, key_bias=lambda *_: soft.mask))
    return net(net.depth, states.after(net.depth)), soft


@pytest.mark.parametrize("task", TASKS)
def test_soft_mask_approaches_the_policy_as_it_sharpens(task: str) -> None:
    net, data = network_and_rows(task)
    packed = pack_rows(net.task, data.encoded)
    with torch.no_grad():
        hard = run(engines.make("torch", net.encoder), net, AdapLeRPolicy(net, AdapLeRSettings(scale=1.0)), packed)
        gaps = [(run_soft(net, packed, s)[0] - hard.logits).abs().max().item() for s in (10.0, 1e3, 1e7)]
        _, soft = run_soft(net, packed, 1e7)
    assert gaps[0] > gaps[2] and gaps[2] < 1e-3
    fed = cost.tokens_kept(hard.trace, net.depth, len(LENGTHS)) * net.depth
    assert fed.sum() < sum(LENGTHS) * net.depth, "no token was dropped, so nothing was tested"
    assert torch.allclose(torch.stack(soft.lengths).sum(0).double(), fed, atol=1e-3)


def test_log_presence_change_is_the_function_of_the_paper() -> None:
    limit, sharpness = torch.tensor(0.25), 27.0
    low, high, at = (log_presence_change(torch.tensor(x), limit, sharpness).item() for x in (0.1, 0.6, 0.25))
    assert low == pytest.approx(27 / 0.25 * (0.1 - 0.25) - 0.1 / 27)
    assert high == pytest.approx((0.6 - 1) * 0.1 / (0.75 * 27)) and at == pytest.approx(-0.1 / 27)
    assert log_presence_change(torch.tensor(0.0), limit, 1e9).item() == -10_000.0


class RecordingPolicy(AdapLeRPolicy):
    """Records the first tokens and the lengths of what is kept."""

    def __init__(self, network: Network, settings: AdapLeRSettings) -> None:
        super().__init__(network, settings)
        self.firsts: list[list[int]] = []
        self.lengths: list[list[int]] = []

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        keep = super().before_layer(layer, s)
        assert keep is not None
        kept = s.packed.keep_tokens(keep)
        self.firsts.append(kept.tokens["position"][kept.starts].tolist())
        self.lengths.append(kept.lengths.tolist())
        return keep


def test_first_token_is_never_dropped() -> None:
    net, data = network_and_rows()
    policy = RecordingPolicy(net, AdapLeRSettings(scale=1000.0))
    run(engines.make("torch", net.encoder), net, policy, pack_rows(net.task, data.encoded))
    assert policy.firsts == [[0] * 4] * net.depth and policy.lengths == [[1] * 4] * net.depth


def test_policy_keeps_tokens_with_at_least_eta_over_n() -> None:
    """Before layer 1: a token is kept if its softmax share is at least η/n."""
    net, data = network_and_rows()
    packed = pack_rows(net.task, data.encoded)
    policy = RecordingPolicy(net, AdapLeRSettings(scale=1.2))
    run(engines.make("torch", net.encoder), net, policy, packed)
    states = net.encoder.embed(packed).split(LENGTHS)
    for row, own in enumerate(states):
        share = net.added["predictors"]["1"](own).softmax(0)
        keep = share >= 1.2 * 0.7 / len(own)
        keep[0] = True
        assert policy.lengths[0][row] == int(keep.sum())


def test_every_layer_may_have_its_own_scale() -> None:
    net, data = network_and_rows()
    packed = pack_rows(net.task, data.encoded)

    def tokens(**settings: Any) -> list[int]:
        result = factories.run_policy(net, AdapLeRPolicy(net, AdapLeRSettings(**settings)), packed)
        kept = {e.layer: int(e.tokens.sum()) for e in result.trace if e.kind == "feed"}
        return [kept[layer] for layer in sorted(kept)]

    assert tokens(scales=(1.0, 1.0, 1.0)) == tokens(scale=1.0)
    late = tokens(scales=(0.0, 0.0, 1.5))
    assert late[0] == late[1] == packed.total > late[2]
    with pytest.raises(OfframpError, match="for each of 3 layers"):
        AdapLeRPolicy(net, AdapLeRSettings(scales=(1.0,)))


def test_predictors_cost_only_when_they_run() -> None:
    net, data = network_and_rows()
    packed = pack_rows(net.task, data.encoded)
    trace = run(engines.make("torch", net.encoder), net, AdapLeRPolicy(net, AdapLeRSettings(scale=1.0)), packed).trace
    assert net.predictor_cost(1).token == 32 * 32 + 32 and [e.layer for e in trace if e.kind == "predictor"] == [
        1,
        2,
        3,
    ]
    idle = run(engines.make("torch", net.encoder), net, AdapLeRPolicy(net, AdapLeRSettings()), packed).trace
    assert not [e for e in idle if e.kind == "predictor"]


def test_dummy_variable_gives_the_gradient_of_theta() -> None:
    """Where predictors equal the amplified saliency, ∂/∂θ = ∂/∂θ_d ÷ θ (Appendix B of the paper)."""
    net, data = network_and_rows()
    packed = pack_rows(net.task, data.encoded)
    raw, first = torch.rand(packed.total) + 0.1, rows.first_tokens(packed)
    theta = torch.tensor(2.5, requires_grad=True)
    target = torch.where(first, raw * theta, raw)
    target = target / rows.sum_by_row(target, packed)[packed.row_of_token]
    dummy = torch.ones((), requires_grad=True)
    predicted = rows.log_softmax_by_row(target.detach().log() + first * dummy.log(), packed).exp()
    assert torch.allclose(predicted, target)
    weights = torch.randn(packed.total)
    (by_theta,) = torch.autograd.grad((target * weights).sum(), theta)
    (by_dummy,) = torch.autograd.grad((predicted * weights).sum(), dummy)
    assert by_theta.item() == pytest.approx((by_dummy / theta).item(), rel=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_saliency_is_the_norm_of_gradient_times_input(task: str) -> None:
    """Each row alone through Hugging Face's model, from its embedding output."""
    net, data = network_and_rows(task, config={"hidden_dropout_prob": 0.0})
    result = saliency(net, all_rows(net, data)).split(LENGTHS)
    targets = all_rows(net, data).targets
    for i, encoded in enumerate(data.encoded):
        hidden = net.hf.base_model.embeddings(input_ids=torch.tensor([encoded.ids])).detach().requires_grad_()
        body = net.hf.base_model
        states = body.encoder(hidden).last_hidden_state
        if task == "tagging":
            own = targets.split(LENGTHS)[i]
            log_probabilities = net.hf.classifier(states)[0].log_softmax(-1)
            score = log_probabilities[torch.arange(len(own)), own].mean()
        else:
            logits = net.hf.classifier(body.pooler(states))[0]
            score = logits[int(targets[i])] if task == "classification" else logits[0]
        (grad,) = torch.autograd.grad(score, hidden)
        assert torch.allclose(result[i], (grad * hidden).norm(dim=2)[0], rtol=1e-3, atol=1e-6)


def test_invalid_settings_and_tasks_are_refused() -> None:
    with pytest.raises(OfframpError, match="all tokens are kept"):
        AdapLeRSettings(scale=-1.0)
    for phi in (-0.1, float("inf"), float("nan")):
        with pytest.raises(OfframpError, match="phi"):
            AdapLeROptions(phi=phi)
    task = factories.make_task("masked_lm")
    with pytest.raises(OfframpError, match=r"as wide as a vocabulary\n.*use one of: length_adaptive; or .*branchynet"):
        build_network(factories.hf_model("bert", task.auto_class), task, methods.get("adapler"), AdapLeROptions())
