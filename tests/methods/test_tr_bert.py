"""TR-BERT: where it cuts, what a choice is worth, and which choices become likelier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offramp import engines, methods, tasks
from offramp.core import cost
from offramp.core.loop import run
from offramp.core.packed import pack
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.inference.run_folder import build_network
from offramp.methods import tr_bert
from offramp.methods.tr_bert import (
    Rollout,
    TRBERTOptions,
    TRBERTPolicy,
    TRBERTSettings,
    hooks_of_last_block,
    repeat_rows,
    selector_layers,
)
from offramp.nn.batches import Batch, Data, build_batch, pack_rows
from offramp.nn.network import Network
from offramp.training.distillation import distillation_loss_by_row
from offramp.training.forward import forward_all_layers, forward_with_dropping
from offramp.training.losses import last_exit_loss
from tests import factories

LENGTHS = [9, 3, 17, 5]
GIVEN = [{"text": "a", "label": i % 3} for i in range(4)]
TAGGED = [{"tokens": ["a"] * n, "tags": (["O", "B-X", "I-X"] * n)[:n]} for n in LENGTHS]


def build(task: str = "classification") -> tuple[Network, Data]:
    given = TAGGED if task == "tagging" else GIVEN
    spec = tasks.get(task).from_rows(given, "rows")
    torch.manual_seed(1)
    hf = factories.hf_model("bert", spec.auto_class, num_labels=spec.outputs, num_hidden_layers=4)
    net = build_network(hf, spec, methods.get("tr_bert"), TRBERTOptions())
    net.eval()
    ids = factories.token_ids(LENGTHS)
    return net, Data(given, [Encoded(r, [0] * len(r), i, list(range(len(r))), [], 0) for i, r in enumerate(ids)])


def everyone(net: Network, data: Data) -> Batch:
    return build_batch(net.task, data, range(len(LENGTHS)), None)


def rolled(net: Network, many: Any, **given: Any) -> tuple[Rollout, Tensor]:
    made = Rollout(net, **given)
    torch.manual_seed(0)
    return made, run(engines.make("torch", net.encoder), net, made, many).logits


def test_cuts_are_where_the_published_models_have_them() -> None:
    assert (
        selector_layers(12) == (2, 7)
        and selector_layers(6) == (2, 4)
        and selector_layers(3) == (2,)
        and selector_layers(1) == (1,)
    )


def test_blocks_of_the_same_rows() -> None:
    net, data = build()
    packed = pack_rows(net.task, data.encoded)
    many = repeat_rows(packed, 3)
    assert many.lengths.tolist() == LENGTHS * 3 and many.rows["origin"].tolist() == list(range(12))
    assert torch.equal(many.tokens["id"].view(3, -1)[2], packed.tokens["id"])
    assert torch.equal(many.tokens["origin"], torch.arange(packed.total * 3))
    engine = engines.make("torch", net.encoder)
    once, often = (run(engine, net, TRBERTPolicy(net, TRBERTSettings()), p).logits for p in (packed, many))
    assert torch.allclose(often, once.repeat(3, 1), atol=1e-5)


def test_guided_rows_keep_the_most_worthy_tokens() -> None:
    net, data = build()
    packed = pack_rows(net.task, data.encoded)
    worth = torch.rand(packed.total, 2)
    worth[packed.starts] = 2.0
    with torch.no_grad():  # all tokens are kept with probability 1/2
        for _, p in net.added.named_parameters():
            p.zero_()
    made, _ = rolled(net, packed, worth=worth, guided=4)
    kept = [made.kept_tokens[0][packed.row_of_token[made.kept_tokens[0]] == row] for row in range(4)]
    for row, (start, n) in enumerate(zip(packed.starts.tolist(), LENGTHS, strict=True)):
        wanted = round(n / 2)  # of probabilities 1/2; Python and torch round halves to even alike
        best = worth[start : start + n, 0].topk(wanted).indices + start
        assert kept[row].tolist() == sorted(best.tolist())


def test_better_choices_become_likelier() -> None:
    """The advantage is a choice's reward less the mean of its row's; the loss is advantage × mean −log p."""
    net, data = build()
    many = repeat_rows(pack_rows(net.task, data.encoded), 2)
    made, _ = rolled(net, many)
    losses = torch.rand(8)
    kept = made.kept_share(many)
    counts = [[int((many.row_of_token[s] == row).sum()) for row in range(8)] for s in made.kept_tokens]
    by_hand = [sum(c[row] for c in counts) / 2 / many.lengths[row].item() for row in range(8)]
    assert kept.tolist() == pytest.approx(by_hand)
    reward = -losses - 0.5 * kept
    surprise = torch.stack(made.surprise).mean(0)
    expected = sum((reward[i] - (reward[i % 4] + reward[i % 4 + 4]) / 2) * surprise[i] for i in range(8)) / 8
    assert made.loss(losses, 0.5, many, 2).item() == pytest.approx(expected.item(), rel=1e-4)


def test_surprise_is_the_mean_over_tokens_that_could_leave() -> None:
    net, data = build()
    packed = pack_rows(net.task, data.encoded)
    made, _ = rolled(net, packed)
    with torch.no_grad():
        states = forward_all_layers(net.encoder, packed).states[1]
        chance = net.added["predictors"]["2"](states).sigmoid()
    stayed = torch.zeros(packed.total, dtype=torch.bool)
    stayed[made.kept_tokens[0]] = True
    told = torch.where(stayed, chance, 1 - chance).log()
    for row, (start, n) in enumerate(zip(packed.starts.tolist(), LENGTHS, strict=True)):
        assert stayed[start], "the first token left"
        own = -told[start + 1 : start + n].mean().item()
        assert made.surprise[0][row].item() == pytest.approx(own, rel=1e-4)


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_a_choice_as_masks_is_the_choice_itself(task: str) -> None:
    net, data = build(task)
    packed = pack_rows(net.task, data.encoded)
    many = repeat_rows(packed, 3)
    with torch.no_grad():
        made, logits = rolled(net, many)
        soft = forward_all_layers(net.encoder, packed, hooks_of_last_block(made, packed, net))
        again = net(net.depth, soft.after(net.depth))
    assert torch.allclose(again, logits[-len(again) :], atol=1e-4)
    assert not torch.allclose(again, logits[: len(again)], atol=1e-3), "all choices were alike"


@pytest.mark.parametrize("name", ["tr_bert+fastbert", "tr_bert+branchynet"])
def test_off_ramps_of_a_pair_read_masks_as_they_read_what_is_left(name: str) -> None:
    spec, method = tasks.get("classification").from_rows(GIVEN, "rows"), methods.get(name)
    torch.manual_seed(1)
    hf = factories.hf_model("bert", spec.auto_class, num_labels=spec.outputs, num_hidden_layers=4)
    net = build_network(hf, spec, method, method.options(bag_of_words_depth=3))
    net.eval()
    packed = pack(factories.token_ids(LENGTHS))
    with torch.no_grad():
        for parameter in net.added["exit_heads"].parameters():
            parameter.normal_(std=0.1)
        made = Rollout(net)
        left = forward_with_dropping(net, packed, made)
        faded = forward_all_layers(net.encoder, packed, hooks_of_last_block(made, packed, net))
        for layer in sorted(net.exit_heads):
            assert torch.allclose(net(layer, left.after(layer)), net(layer, faded.after(layer)), atol=1e-3), layer
    assert left.after(3).total < packed.total


def test_the_heuristic_is_gradient_times_change() -> None:
    net, data = build()
    some = everyone(net, data)
    made = tr_bert.token_worth(net, some)
    assert made.shape == (sum(LENGTHS), 2)
    at = 0
    for row, n in enumerate(LENGTHS):
        alone = build_batch(net.task, data, [row], None)
        states = forward_all_layers(net.encoder, alone.packed).states
        body = states[3].detach().requires_grad_()  # two thirds of four layers, and one
        layer = net.encoder.layers[3]
        top = layer.feed(layer.attend(body, body, alone.packed.layout, False, None)[0])
        loss = torch.nn.functional.cross_entropy(net(4, alone.packed.with_states(top)), alone.targets)
        (grad,) = torch.autograd.grad(loss, body)
        for place, cut in enumerate(selector_layers(4)):
            expected = (grad * (states[3] - states[cut - 1])).sum(1).abs()
            assert torch.allclose(made[at : at + n, place], expected, rtol=1e-3, atol=1e-6)
        at += n


def test_a_depth_methods_objective_enters_the_last_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = build()
    seen: list[Any] = []

    def objective(network: Network, made: Any, some: Batch) -> Tensor:
        seen.append(made)
        return last_exit_loss(network, made, some)

    stage = methods.get("tr_bert").stages(net, TRBERTOptions(samples=2), objective)[-1]
    stage.prepare(data, tmp_path)
    learned, rewards, real = list[Tensor](), list[Tensor](), Rollout.loss
    monkeypatch.setattr(Rollout, "loss", lambda *given: rewards.append(real(*given)) or rewards[-1])
    told = stage.step(everyone(net, data), lambda loss: (learned.append(loss.detach()), loss.backward()))
    assert torch.allclose(told["loss"] + rewards[0], learned[0]), "what is told is what is learned"
    batch = everyone(net, data)
    own, said = last_exit_loss(net, seen[0], batch), net(net.depth, seen[0].after(net.depth))
    taught = distillation_loss_by_row(net, said, stage.teacher.for_batch(batch), batch.packed).mean()
    assert torch.allclose(told["loss"], own + taught, rtol=1e-4), "the labels by the objective, and the teacher"
    assert len(seen) == 1 and sorted(seen[0].present) == [1, 2, 3, 4] and bool((seen[0].present[1] == 1).all())
    assert all(p.grad is not None for name, p in net.named_parameters() if "pooler" not in name)


def test_a_threshold_of_one_leaves_the_first_tokens_only() -> None:
    net, data = build()
    result = run(
        engines.make("torch", net.encoder),
        net,
        TRBERTPolicy(net, TRBERTSettings(threshold=1.0)),
        pack_rows(net.task, data.encoded),
    )
    kept = cost.tokens_kept(result.trace, net.depth, 4) * net.depth
    assert kept.tolist() == [n + 3 for n in LENGTHS]


def test_a_run_is_trained_and_shorter(base: str, tmp_path: Path) -> None:
    folder = factories.run_folder(base, tmp_path, "tr_bert", options={"alpha": 3.0, "samples": 3, "select_lr": 0.02})
    from offramp.inference.predictor import Predictor

    predictor = Predictor.load(str(folder))
    assert predictor.points is not None and min(p.mac_share for p in predictor.points.points) < 0.9


def test_bad_settings_are_refused() -> None:
    nan, inf = float("nan"), float("inf")
    rates = [{"select_lr": rate} for rate in (0.0, -1.0, 1.0, nan)]
    costs = [{"alpha": -1.0}, {"alpha": inf}, {"alpha_both": inf}, {"guide": 2.0}]
    for wrong in ({"samples": 1}, {"slack": -0.01}, {"slack": nan}, *costs, *rates):
        with pytest.raises(OfframpError):
            TRBERTOptions(**wrong)
    with pytest.raises(OfframpError, match="all tokens are kept"):
        TRBERTSettings(threshold=1.5)
