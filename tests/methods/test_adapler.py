"""AdapLeR's rules: who leaves, what fades, what the saliency of a token is, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import engines, methods, tasks
from offramp.core import cost
from offramp.core.loop import State, run
from offramp.core.packed import Packed
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.inference.run_folder import build_network
from offramp.methods import adapler
from offramp.methods.adapler import AdapLeROptions, AdapLeRPolicy, AdapLeRSettings, SoftTokenMask, log_presence_change
from offramp.nn import row_ops as rows
from offramp.nn.batches import Batch, Data, build_batch, pack_rows
from offramp.nn.network import Network
from offramp.training.forward import ForwardHooks, forward_all_layers
from offramp.training.saliency import saliency
from tests import factories

LENGTHS = [9, 3, 17, 5]
GIVEN = {
    "classification": [{"text": "a", "label": i % 3} for i in range(4)],
    "regression": [{"text": "a", "label": i / 2} for i in range(4)],
    "tagging": [{"tokens": ["a"] * n, "tags": (["O", "B-X", "I-X"] * n)[:n]} for n in LENGTHS],
}


def build(task: str = "classification", options: AdapLeROptions | None = None, **config: Any) -> tuple[Network, Data]:
    """A tiny network whose predictors really prefer some tokens, and rows."""
    spec = tasks.get(task).from_rows(GIVEN[task], "rows")
    hf = factories.hf_model("bert", spec.auto_class, num_labels=spec.outputs, **config)
    torch.manual_seed(1)
    net = build_network(hf, spec, methods.get("adapler"), options or AdapLeROptions())
    with torch.no_grad():
        for _, p in net.added["predictors"].named_parameters():
            p.mul_(3.0)
        adapler.token_thresholds(net).eta.fill_(0.7)
    net.eval()
    ids = factories.token_ids(LENGTHS)
    return net, Data(GIVEN[task], [Encoded(r, [0] * len(r), i, list(range(len(r))), [], 0) for i, r in enumerate(ids)])


def everyone(net: Network, data: Data) -> Batch:
    return build_batch(net.task, data, range(len(LENGTHS)), None)


def softly(net: Network, packed: Packed, sharpness: float) -> tuple[Tensor, SoftTokenMask]:
    token_thresholds = adapler.token_thresholds(net)
    fading = SoftTokenMask(net, token_thresholds.eta.detach(), torch.ones_like(token_thresholds.theta), sharpness)
    made = forward_all_layers(net.encoder, packed, ForwardHooks(gate=fading.gate, key_bias=lambda *_: fading.mask))
    return net(net.depth, made.after(net.depth)), fading


@pytest.mark.parametrize("task", sorted(GIVEN))
def test_soft_and_hard_agree_as_the_mask_sharpens(task: str) -> None:
    net, data = build(task)
    packed = pack_rows(net.task, data.encoded)
    with torch.no_grad():
        hard = run(engines.make("torch", net.encoder), net, AdapLeRPolicy(net, AdapLeRSettings(scale=1.0)), packed)
        gaps = [(softly(net, packed, s)[0] - hard.logits).abs().max().item() for s in (10.0, 1e3, 1e7)]
        _, fading = softly(net, packed, 1e7)
    assert gaps[0] > gaps[2] and gaps[2] < 1e-3
    fed = cost.tokens_kept(hard.trace, net.depth, len(LENGTHS)) * net.depth
    assert fed.sum() < sum(LENGTHS) * net.depth, "nobody left, so nothing was tested"
    assert torch.allclose(torch.stack(fading.lengths).sum(0).double(), fed, atol=1e-3)


def test_the_soft_mask_is_the_papers_function() -> None:
    limit, sharpness = torch.tensor(0.25), 27.0
    low, high, at = (log_presence_change(torch.tensor(x), limit, sharpness).item() for x in (0.1, 0.6, 0.25))
    assert low == pytest.approx(27 / 0.25 * (0.1 - 0.25) - 0.1 / 27)
    assert high == pytest.approx((0.6 - 1) * 0.1 / (0.75 * 27)) and at == pytest.approx(-0.1 / 27)
    assert log_presence_change(torch.tensor(0.0), limit, 1e9).item() == -10_000.0


class Watched(AdapLeRPolicy):
    """Notes the first tokens that go on."""

    def __init__(self, network: Network, settings: AdapLeRSettings) -> None:
        super().__init__(network, settings)
        self.firsts: list[list[int]] = []
        self.lengths: list[list[int]] = []

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        keep = super().before_layer(layer, s)
        assert keep is not None
        left = s.packed.keep_tokens(keep)
        self.firsts.append(left.tokens["position"][left.starts].tolist())
        self.lengths.append(left.lengths.tolist())
        return keep


def test_the_first_token_never_leaves_even_alone() -> None:
    net, data = build()
    watched = Watched(net, AdapLeRSettings(scale=1000.0))
    run(engines.make("torch", net.encoder), net, watched, pack_rows(net.task, data.encoded))
    assert watched.firsts == [[0] * 4] * net.depth and watched.lengths == [[1] * 4] * net.depth


def test_the_rule_counts_the_tokens_left() -> None:
    """Before layer 1: a token stays if its softmax share is at least η/n."""
    net, data = build()
    packed = pack_rows(net.task, data.encoded)
    watched = Watched(net, AdapLeRSettings(scale=1.2))
    run(engines.make("torch", net.encoder), net, watched, packed)
    states = net.encoder.embed(packed).split(LENGTHS)
    for row, own in enumerate(states):
        share = net.added["predictors"]["1"](own).softmax(0)
        keep = share >= 1.2 * 0.7 / len(own)
        keep[0] = True
        assert watched.lengths[0][row] == int(keep.sum())


def test_predictors_are_paid_for_only_when_they_run() -> None:
    net, data = build()
    packed = pack_rows(net.task, data.encoded)
    log = run(engines.make("torch", net.encoder), net, AdapLeRPolicy(net, AdapLeRSettings(scale=1.0)), packed).trace
    assert net.predictor_cost(1).token == 32 * 32 + 32 and [e.layer for e in log if e.kind == "predictor"] == [1, 2, 3]
    idle = run(engines.make("torch", net.encoder), net, AdapLeRPolicy(net, AdapLeRSettings()), packed).trace
    assert not [e for e in idle if e.kind == "predictor"]


def test_the_dummy_variable_carries_the_gradient_of_the_amplifier() -> None:
    """Where predictors say exactly what the amplified saliency is, ∂/∂θ = ∂/∂θ_d ÷ θ (the paper's Appendix B)."""
    net, data = build()
    packed = pack_rows(net.task, data.encoded)
    raw, first = torch.rand(packed.total) + 0.1, rows.first_tokens(packed)
    theta = torch.tensor(2.5, requires_grad=True)
    wanted = torch.where(first, raw * theta, raw)
    wanted = wanted / rows.sum_by_row(wanted, packed)[packed.row_of_token]
    dummy = torch.ones((), requires_grad=True)
    said = rows.log_softmax_by_row(wanted.detach().log() + first * dummy.log(), packed).exp()
    assert torch.allclose(said, wanted)
    weights = torch.randn(packed.total)
    (by_theta,) = torch.autograd.grad((wanted * weights).sum(), theta)
    (by_dummy,) = torch.autograd.grad((said * weights).sum(), dummy)
    assert by_theta.item() == pytest.approx((by_dummy / theta).item(), rel=1e-4)


@pytest.mark.parametrize("task", sorted(GIVEN))
def test_saliency_is_the_norm_of_gradient_times_input(task: str) -> None:
    """Each row alone through Hugging Face's model, from its embedding output."""
    net, data = build(task, hidden_dropout_prob=0.0)
    made = saliency(net, everyone(net, data)).split(LENGTHS)
    targets = everyone(net, data).targets
    for i, encoded in enumerate(data.encoded):
        hidden = net.hf.base_model.embeddings(input_ids=torch.tensor([encoded.ids])).detach().requires_grad_()
        body = net.hf.base_model
        states = body.encoder(hidden).last_hidden_state
        if task == "tagging":
            own = targets.split(LENGTHS)[i]
            said = net.hf.classifier(states)[0].log_softmax(-1)
            said = said[torch.arange(len(own)), own].mean()
        else:
            logits = net.hf.classifier(body.pooler(states))[0]
            said = logits[int(targets[i])] if task == "classification" else logits[0]
        (grad,) = torch.autograd.grad(said, hidden)
        assert torch.allclose(made[i], (grad * hidden).norm(dim=2)[0], rtol=1e-3, atol=1e-6)


def test_bad_settings_and_tasks_are_refused() -> None:
    with pytest.raises(OfframpError, match="all tokens are kept"):
        AdapLeRSettings(scale=-1.0)
    for phi in (-0.1, float("inf"), float("nan")):
        with pytest.raises(OfframpError, match="phi"):
            AdapLeROptions(phi=phi)
    spec = tasks.get("masked_lm").from_rows([{"text": "a"}], "rows")
    with pytest.raises(OfframpError, match=r"as wide as a vocabulary\n.*use one of: length_adaptive; or .*branchynet"):
        build_network(factories.hf_model("bert", spec.auto_class), spec, methods.get("adapler"), AdapLeROptions())
