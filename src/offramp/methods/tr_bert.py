"""TR-BERT (Ye et al. 2021): a policy at two layers decides by reinforcement which tokens go on.

What it does: before layer 2 and layer L/2 + 1 a small selector gives every token a probability of staying; at run
time those at or above the threshold stay, and the first token always. Training: fine-tune; then selectors alone, by
policy gradient: several random choices a row, each rewarded by −loss − α·(share of tokens kept), judged against their
mean, while for the first half of the stage one of them imitates a heuristic (how much the loss would feel a token's
change between the cut and two thirds of the layers); then everything together, with the fine-tuned model's answers as
the aim and in the reward.
Modifications from the paper's code: rows of a batch keep their own tokens (the code keeps the longest row's number in
all of them); the threshold is a knob, 0 lets everybody stay, 0.5 is as trained. Policy gradients end at 0 or 1 (on TREC
thresholds from 0.99 down to 1e-7 all kept 0.47 to 0.49 of the MACs), but what a selector says still ranks tokens, so
probabilities are taken at a high temperature. Other tasks than the paper's work: a token that left keeps its last
state. The last stage keeps the fastest epoch that loses at most `slack` on dev rows. Alone, selectors learn faster than
the rest by default (`select_lr`; published: one rate for everything), because runs here are short.
Relations: AdapLeR learns the same from saliency without sampling, and cuts before every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp import engines
from offramp.core.columns import ORIGIN
from offramp.core.loop import State, run
from offramp.core.packed import Packed
from offramp.core.policy import Needs, Policy
from offramp.errors import OfframpError
from offramp.methods._base import LengthMethod
from offramp.nn import row_ops as rows
from offramp.nn.batches import Batch, Data
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.nn.token_scorers import TokenScorer
from offramp.training import saliency
from offramp.training.distillation import TeacherLogits, distillation_loss_by_row, teacher_logits
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers
from offramp.training.objectives import Objective
from offramp.training.stage import Backward, ParameterGroups, Stage, cheapest_epoch

TEMPERATURE = 20.0  # of run-time probabilities; at 0.5 it changes nothing
GRID = (0.9, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.02)
GONE = -10_000.0


@dataclass(frozen=True)
class TRBERTSettings:
    """Tokens stay whose tempered probability is at least this; 0 lets everybody stay, 0.5 is as trained."""

    threshold: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            given = f"threshold={self.threshold}"
            raise OfframpError("a probability of staying", given, "use 0 (everybody stays) up to 1, e.g. 0.5")


@dataclass(frozen=True)
class TRBERTOptions:
    """How it is trained."""

    alpha: float = 1.0  # what keeping all tokens costs, in units of the loss, while only selectors learn
    alpha_both: float = 1.0  # the same while everything learns
    samples: int = 8  # random choices a row
    guide: float = 0.5  # share of the selectors' stage in which one choice imitates the heuristic
    slack: float = 0.01  # what the metric may lose on dev rows; the fastest epoch within it is kept
    select_lr: float = 2e-3  # learning rate of selectors while they learn alone
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        if self.samples < 2:
            fix = "use 2 or more: a choice is judged against the others"
            raise OfframpError("a number of random choices a row", f"samples={self.samples}", fix)
        if not (0.0 <= self.alpha < inf and 0.0 <= self.alpha_both < inf and 0.0 <= self.guide <= 1.0):
            given = f"alpha={self.alpha}, alpha_both={self.alpha_both}, guide={self.guide}"
            raise OfframpError("options of tr_bert", given, "use costs of 0 or more, and a share from 0 to 1")
        if not (self.slack >= 0.0 and 0.0 < self.select_lr < 1.0):
            given = f"slack={self.slack}, select_lr={self.select_lr}"
            raise OfframpError("a loss and a learning rate", given, "use e.g. slack=0.01, select_lr=0.002")


def points(depth: int) -> tuple[int, ...]:
    """The layers before which tokens leave: the second, and the first of the upper half."""
    return tuple(sorted({min(2, depth), depth // 2 + 1}))


class TRBERTPolicy(Policy):
    """Drops tokens that are unlikely to be needed, before two layers."""

    def __init__(self, network: Network, settings: TRBERTSettings) -> None:
        self.network, self.threshold = network, settings.threshold
        self.points = frozenset(points(network.depth)) if settings.threshold > 0.0 else frozenset()

    def needs(self, layer: int) -> Needs:
        return Needs(before_layer=layer in self.points)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        if layer not in self.points:
            return None
        return ((s.predictor() / TEMPERATURE).sigmoid() >= self.threshold) | rows.first_tokens(s.packed)


def worth(network: Network, some: Batch) -> Tensor:
    """The heuristic to imitate: |∂loss/∂h_b · (h_b − h_a)|, h_a at each cut and h_b two thirds up."""  # [tokens, cuts]
    depth = network.depth
    with torch.no_grad():
        leaf = network.encoder.embed(some.packed)
    leaf.requires_grad_()  # no gradient is asked of it, but states need a graph where all parameters are frozen
    with torch.enable_grad():
        made = forward_all_layers(replace(network.encoder, embed=lambda _: leaf), some.packed)
        logits = network(depth, made.after(depth))
        loss = network.task.loss(logits, some.targets, some.packed.lengths.to(logits.device), "rows").sum()
    high = made.states[min(depth, 2 * depth // 3 + 1)]
    (grad,) = torch.autograd.grad(loss, high)
    low = [made.states[layer - 1] for layer in points(depth)]
    return torch.stack([(grad * (high - h)).sum(1).abs() for h in low], dim=1).detach()


def tiled(packed: Packed, count: int) -> Packed:
    """The same rows several times over, one block after the other."""
    columns = {name: t.repeat(count, *[1] * (t.dim() - 1)) for name, t in packed.tokens.items()}
    columns["origin"] = torch.arange(packed.total * count, device=packed.device)
    numbered = {"origin": torch.arange(packed.count * count, device=packed.device)}
    return Packed(torch.empty(0), packed.lengths.repeat(count), numbered, columns)


@dataclass
class Rollout(Policy):
    """Draws who stays and remembers it. For training only, one object a pass: run-time policies keep no memory."""

    network: Network
    worth: Tensor | None = None  # [tokens of the batch, points] a heuristic
    guided: int = 0  # so many first rows follow the heuristic instead of chance
    surprise: list[Tensor] = field(default_factory=list)  # per point [rows], mean −log p of what was decided
    stayed: list[Tensor] = field(default_factory=list)  # per point, which tokens of the batch

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        places = points(s.depth)
        if layer not in places:
            return None
        packed, first = s.packed, rows.first_tokens(s.packed)
        with torch.enable_grad():  # the model may be frozen, its selectors are not
            logits = self.network.predictor(layer, packed)
        chance = logits.detach().sigmoid()
        keep = torch.rand_like(chance) < chance
        if self.guided and self.worth is not None:
            keep = self._guide(keep, chance, packed, places.index(layer))
        keep = keep | first
        with torch.enable_grad():
            each = F.binary_cross_entropy_with_logits(logits, keep.float(), reduction="none").masked_fill(first, 0.0)
            count = (packed.lengths.to(each.device) - 1).clamp(min=1)
            self.surprise.append(rows.sum_by_row(each, packed) / count)  # no row leaves, so rows keep their order
        self.stayed.append(packed.tokens[ORIGIN][keep])
        return keep

    def _guide(self, keep: Tensor, chance: Tensor, packed: Packed, place: int) -> Tensor:
        """The first rows keep as many tokens as the policy expects, but those the heuristic ranks highest."""
        assert self.worth is not None
        wanted = rows.sum_by_row(chance, packed).round()[packed.row_of_token]
        best = rows.rank_by_row(self.worth[packed.tokens[ORIGIN], place], packed) < wanted
        return torch.where(packed.row_of_token < self.guided, best, keep)

    def kept(self, packed: Packed) -> Tensor:
        """The share of each row's tokens that stayed, averaged over the points."""  # [rows]
        whole = packed.lengths.to(packed.device)
        counts = [torch.bincount(packed.row_of_token[stayed], minlength=packed.count) for stayed in self.stayed]
        return torch.stack([count / whole for count in counts]).mean(0)

    def loss(self, losses: Tensor, alpha: float, many: Packed, blocks: int) -> Tensor:
        """Choices that did better than the mean of their row's become likelier. `losses` [blocks × rows]."""
        reward = (-losses - alpha * self.kept(many)).view(blocks, -1)
        advantage = (reward - reward.mean(0)).reshape(-1).detach()
        return (advantage * torch.stack(self.surprise).mean(0)).mean()


def hard(rolled: Rollout, packed: Packed, network: Network) -> ForwardHooks:
    """The last block's choices as masks of a differentiable pass over the rows themselves."""
    places, offset = points(network.depth), int(rolled.stayed[0].max()) // packed.total * packed.total
    there = torch.ones(packed.total, device=packed.device)
    present: dict[int, Tensor] = {}
    for layer in range(1, network.depth + 1):
        if layer in places:
            own = rolled.stayed[places.index(layer)] - offset
            there = torch.zeros_like(there).index_fill(0, own[own >= 0], 1.0)
        present[layer] = there

    def gate(layer: int, made: LayerStates) -> Tensor | None:
        made.present[layer] = present[layer]
        return present[layer] if network.per_token else None

    return ForwardHooks(gate=gate, key_bias=lambda layer, _: (1.0 - present[layer]) * GONE)


@dataclass
class Reinforced(Stage):
    """Only selectors learn, from the rewards of random choices; the model is frozen."""

    options: TRBERTOptions = field(kw_only=True)
    guides: saliency.TokenTable | None = None
    guided: bool = True

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.network.named_parameters() if name.startswith("added.predictors.")]

    def optimisers(self, lr: float) -> list[ParameterGroups]:
        return [[{"params": [p for _, p in self.trainable()], "lr": self.head_lr}]]  # smaller than lr, if so asked

    def set_train_mode(self) -> None:
        self.network.train(backbone=False, added=True)

    def prepare(self, data: Data, folder: Path) -> None:
        self.guides = saliency.token_table(self.network, data, folder / "worth.safetensors", worth)

    def set_progress(self, share: float) -> None:
        self.guided = share < self.options.guide

    def policy(self) -> Policy:
        return TRBERTPolicy(self.network, TRBERTSettings(threshold=0.5))

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        return len(history) - 1  # the metric alone would choose whoever keeps most

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        assert self.guides is not None, "prepare comes first"
        net, count = self.network, self.options.samples
        rolled = Rollout(net, self.guides.for_batch(batch).repeat(count, 1), batch.packed.count if self.guided else 0)
        many = tiled(batch.packed, count)
        with torch.no_grad():
            said = run(engines.make("torch", net.encoder), net, rolled, many)
        targets = batch.targets.repeat(count, *[1] * (batch.targets.dim() - 1))
        losses = net.task.loss(said.logits, targets, many.lengths.to(net.device), "rows")
        loss = rolled.loss(losses, self.options.alpha, many, count)
        backward(loss)
        return {"loss": losses.mean().detach(), "kept": rolled.kept(many).mean()}


@dataclass
class Everything(Stage):
    """Model and selectors together: random choices again, their answers drawn towards the fine-tuned model's."""

    options: TRBERTOptions = field(kw_only=True)
    objective: Objective | None = None
    taught: TeacherLogits | None = None

    needs_reference: ClassVar[bool] = True

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def prepare(self, data: Data, folder: Path) -> None:
        self.taught = teacher_logits(self.network, data, folder)

    def policy(self) -> Policy:
        return TRBERTPolicy(self.network, TRBERTSettings(threshold=0.5))

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        return cheapest_epoch(self.network, history, self.reference, self.options.slack)

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        assert self.taught is not None, "prepare comes first"
        net, count = self.network, self.options.samples
        rolled, many = Rollout(net), tiled(batch.packed, count)
        with torch.set_grad_enabled(self.objective is None):
            said = run(engines.make("torch", net.encoder), net, rolled, many)
            losses = distillation_loss_by_row(net, said.logits, self.taught.for_batch(batch).repeat(count, 1), many)
        reward = rolled.loss(losses.detach(), self.options.alpha_both, many, count)
        if self.objective is None:
            loss = losses.mean()
        else:  # a depth method's objective wants the states of all layers: one of the choices, as masks
            made = forward_all_layers(net.encoder, batch.packed, hard(rolled, batch.packed, net))
            answers = net(net.depth, made.after(net.depth))
            loss = distillation_loss_by_row(net, answers, self.taught.for_batch(batch), batch.packed).mean()
            loss = loss + self.objective(net, made, batch)
        backward(loss + reward)
        return {"loss": loss.detach(), "kept": rolled.kept(many).mean()}


class TRBERT(LengthMethod):
    """Two selectors, trained by reinforcement, decide which tokens go on."""

    name = "tr_bert"
    settings = TRBERTSettings
    options = TRBERTOptions
    space = ThresholdSpace(
        "threshold", full_value=0.0, unit="probability of staying, tempered", replay=False, grid=GRID
    )
    needs = frozenset({"example_error"})  # answers of its own, not a vocabulary

    def modules(self, network: Network, options: TRBERTOptions) -> nn.ModuleDict:
        """Two selectors."""
        chosen = {str(layer): TokenScorer(network.encoder.hidden) for layer in points(network.depth)}
        return nn.ModuleDict({"predictors": nn.ModuleDict(chosen)})

    def policy(self, network: Network, settings: TRBERTSettings) -> Policy:
        return TRBERTPolicy(network, settings)

    def stages(self, network: Network, options: TRBERTOptions, objective: Objective | None = None) -> list[Stage]:
        """Fine-tune; selectors by reinforcement; everything together. A depth method's `objective` enters the last."""
        return [
            Stage(network, "fine-tune", options.head_lr, fine_tuning=True),
            Reinforced(network, "reinforce", options.select_lr, options=options),
            Everything(network, "distil and reinforce", options.head_lr, options=options, objective=objective),
        ]
