"""TR-BERT (Ye et al. 2021): before two layers, selectors trained by reinforcement decide which tokens are kept.

What it does: before layer 2 and before layer L/2 + 1 a small selector gives every token a probability of being kept; at
run time tokens at or above the threshold are kept, and the first token always. Training: fine-tuning; then the
selectors alone, by policy gradient: several random choices per row, each rewarded by −loss − α·(share of tokens kept)
and compared with the mean reward of the row, while for the first half of the stage one choice imitates a heuristic (how
much the loss depends on a token's change between the selector and two thirds of the layers); then all parameters
together, with the logits of the fine-tuned model as targets and in the reward.

Modifications (ours, not the paper's or its code's):
- the rows of a batch keep their own tokens (the published code keeps the longest row's number of tokens in all rows);
- the threshold is a setting: 0 keeps all tokens, 0.5 is as trained. Policy gradients drive probabilities to 0 or 1 (on
  TREC, thresholds from 0.99 down to 1e-7 all kept 0.47 to 0.49 of the MACs), but logits still rank tokens, so run-time
  probabilities are computed at a high temperature;
- tasks other than the paper's: a dropped token keeps its last state;
- the last stage keeps the fastest epoch that loses at most `slack` on dev rows;
- selectors have a larger learning rate while they are trained alone (`select_lr`; published: one rate for all
  parameters), because runs here are short.

Relations: AdapLeR learns the same from saliency, without sampling, and drops tokens before every layer.
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
from offramp.nn.keys import PREDICTORS
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.nn.token_scorers import TokenScorer
from offramp.training import saliency
from offramp.training.distillation import TeacherLogits, distillation_loss_by_row, teacher_logits
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers
from offramp.training.objectives import Objective
from offramp.training.stage import Backward, ParameterGroups, Stage, cheapest_epoch

TEMPERATURE = 20.0  # of run-time probabilities; it changes nothing at a threshold of 0.5
GRID = (0.9, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.02)
DROPPED = -10_000.0  # attention bias of a dropped token


@dataclass(frozen=True)
class TRBERTSettings:
    """The tempered probability from which on tokens are kept: 0 keeps all, 0.5 is as trained."""

    threshold: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            given = f"threshold={self.threshold}"
            raise OfframpError("a probability of being kept", given, "use 0 (all tokens are kept) up to 1, e.g. 0.5")


@dataclass(frozen=True)
class TRBERTOptions:
    """How TR-BERT is trained."""

    alpha: float = 1.0  # cost of keeping all tokens, in units of the loss, while only selectors are trained
    alpha_both: float = 1.0  # the same while all parameters are trained
    samples: int = 8  # random choices per row
    guide: float = 0.5  # share of the selectors' stage in which one choice imitates the heuristic
    slack: float = 0.01  # how much of the metric may be lost on dev rows; of the epochs within it the fastest is kept
    select_lr: float = 2e-3  # learning rate of selectors while they are trained alone
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        if self.samples < 2:
            fix = "use 2 or more: a choice is compared with the others"
            raise OfframpError("a number of random choices per row", f"samples={self.samples}", fix)
        if not (0.0 <= self.alpha < inf and 0.0 <= self.alpha_both < inf and 0.0 <= self.guide <= 1.0):
            given = f"alpha={self.alpha}, alpha_both={self.alpha_both}, guide={self.guide}"
            raise OfframpError("options of tr_bert", given, "use costs of 0 or more, and a share from 0 to 1")
        if not (self.slack >= 0.0 and 0.0 < self.select_lr < 1.0):
            given = f"slack={self.slack}, select_lr={self.select_lr}"
            raise OfframpError("a loss and a learning rate", given, "use e.g. slack=0.01, select_lr=0.002")


def selector_layers(depth: int) -> tuple[int, ...]:
    """Return the layers before which tokens are dropped: the second, and the first of the upper half."""
    return tuple(sorted({min(2, depth), depth // 2 + 1}))


class TRBERTPolicy(Policy):
    """Drops tokens with a small probability of being kept, before two layers."""

    def __init__(self, network: Network, settings: TRBERTSettings) -> None:
        self.network, self.threshold = network, settings.threshold
        self.layers = frozenset(selector_layers(network.depth)) if settings.threshold > 0.0 else frozenset()

    def needs(self, layer: int) -> Needs:
        return Needs(before_layer=layer in self.layers)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        if layer not in self.layers:
            return None
        return ((s.predictor() / TEMPERATURE).sigmoid() >= self.threshold) | rows.first_tokens(s.packed)


def token_worth(network: Network, batch: Batch) -> Tensor:
    """Return the heuristic to imitate: |∂loss/∂h_b · (h_b − h_a)|, where h_a is the state before each selector and h_b
    that after two thirds of the layers."""  # [tokens, selectors]
    depth = network.depth
    with torch.no_grad():
        leaf = network.encoder.embed(batch.packed)
    leaf.requires_grad_()  # its gradient is not used, but states need a graph where all parameters are frozen
    with torch.enable_grad():
        states = forward_all_layers(replace(network.encoder, embed=lambda _: leaf), batch.packed)
        logits = network(depth, states.after(depth))
        loss = network.task.loss(logits, batch.targets, batch.packed.lengths.to(logits.device), "rows").sum()
    high = states.states[min(depth, 2 * depth // 3 + 1)]
    (grad,) = torch.autograd.grad(loss, high)
    low = [states.states[layer - 1] for layer in selector_layers(depth)]
    return torch.stack([(grad * (high - h)).sum(1).abs() for h in low], dim=1).detach()


def repeat_rows(packed: Packed, count: int) -> Packed:
    """Return the same rows several times, one block after the other."""
    columns = {name: t.repeat(count, *[1] * (t.dim() - 1)) for name, t in packed.tokens.items()}
    columns[ORIGIN] = torch.arange(packed.total * count, device=packed.device)
    row_columns: dict[str, Tensor] = {ORIGIN: torch.arange(packed.count * count, device=packed.device)}
    return Packed(torch.empty(0), packed.lengths.repeat(count), row_columns, columns)


@dataclass
class Rollout(Policy):
    """Draws which tokens are kept, and records it for the policy gradient.

    For training only, one object for one pass: run-time policies keep no memory.
    """

    network: Network
    worth: Tensor | None = None  # [tokens of the batch, selectors] the heuristic
    guided: int = 0  # this many first rows follow the heuristic instead of chance
    surprise: list[Tensor] = field(default_factory=list)  # for each selector [rows], mean −log p of its decisions
    kept_tokens: list[Tensor] = field(default_factory=list)  # for each selector, indices of the tokens it kept

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        layers = selector_layers(s.depth)
        if layer not in layers:
            return None
        packed, first = s.packed, rows.first_tokens(s.packed)
        with torch.enable_grad():  # the model may be frozen, its selectors are not
            logits = self.network.predictor(layer, packed)
        chance = logits.detach().sigmoid()
        keep = torch.rand_like(chance) < chance
        if self.guided and self.worth is not None:
            keep = self._guide(keep, chance, packed, layers.index(layer))
        keep = keep | first
        with torch.enable_grad():
            each = F.binary_cross_entropy_with_logits(logits, keep.float(), reduction="none").masked_fill(first, 0.0)
            count = (packed.lengths.to(each.device) - 1).clamp(min=1)
            self.surprise.append(rows.sum_by_row(each, packed) / count)  # no row exits, so rows keep their order
        self.kept_tokens.append(packed.tokens[ORIGIN][keep])
        return keep

    def _guide(self, keep: Tensor, chance: Tensor, packed: Packed, selector: int) -> Tensor:
        """Return `keep`, in which the first rows keep the tokens that the heuristic ranks highest, as many as the
        selector expects to keep."""
        assert self.worth is not None
        expected = rows.sum_by_row(chance, packed).round()[packed.row_of_token]
        best = rows.rank_by_row(self.worth[packed.tokens[ORIGIN], selector], packed) < expected
        return torch.where(packed.row_of_token < self.guided, best, keep)

    def kept_share(self, packed: Packed) -> Tensor:
        """Return the share of each row's tokens that was kept, averaged over the selectors."""  # [rows]
        lengths = packed.lengths.to(packed.device)
        counts = [torch.bincount(packed.row_of_token[kept], minlength=packed.count) for kept in self.kept_tokens]
        return torch.stack([count / lengths for count in counts]).mean(0)

    def loss(self, losses: Tensor, alpha: float, repeated: Packed, blocks: int) -> Tensor:
        """Return the loss that makes choices better than the mean of their row likelier."""  # losses: [blocks × rows]
        reward = (-losses - alpha * self.kept_share(repeated)).view(blocks, -1)
        advantage = (reward - reward.mean(0)).reshape(-1).detach()
        return (advantage * torch.stack(self.surprise).mean(0)).mean()


def hooks_of_last_block(rollout: Rollout, packed: Packed, network: Network) -> ForwardHooks:
    """Return the choices of the last block as masks of a differentiable pass over the rows themselves."""
    layers, offset = selector_layers(network.depth), int(rollout.kept_tokens[0].max()) // packed.total * packed.total
    kept = torch.ones(packed.total, device=packed.device)
    present: dict[int, Tensor] = {}
    for layer in range(1, network.depth + 1):
        if layer in layers:
            own = rollout.kept_tokens[layers.index(layer)] - offset
            kept = torch.zeros_like(kept).index_fill(0, own[own >= 0], 1.0)
        present[layer] = kept

    def gate(layer: int, states: LayerStates) -> Tensor | None:
        states.present[layer] = present[layer]
        return present[layer] if network.per_token else None

    return ForwardHooks(gate=gate, key_bias=lambda layer, _: (1.0 - present[layer]) * DROPPED)


@dataclass
class ReinforceStage(Stage):
    """Trains the selectors alone, from the rewards of random choices; the model is frozen."""

    options: TRBERTOptions = field(kw_only=True)
    heuristic: saliency.TokenTable | None = None
    guided: bool = True  # one choice of every row imitates the heuristic

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.network.named_parameters() if name.startswith(f"added.{PREDICTORS}.")]

    def optimisers(self, lr: float) -> list[ParameterGroups]:
        return [[{"params": [p for _, p in self.trainable()], "lr": self.head_lr}]]  # whatever the run's rate is

    def set_train_mode(self) -> None:
        self.network.train(backbone=False, added=True)

    def prepare(self, data: Data, folder: Path) -> None:
        self.heuristic = saliency.token_table(self.network, data, folder / "worth.safetensors", token_worth)

    def set_progress(self, share: float) -> None:
        self.guided = share < self.options.guide

    def policy(self) -> Policy:
        return TRBERTPolicy(self.network, TRBERTSettings(threshold=0.5))

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        return len(history) - 1  # the metric alone would choose the epoch that keeps most tokens

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        assert self.heuristic is not None, "prepare is called before"
        net, count = self.network, self.options.samples
        guided = batch.packed.count if self.guided else 0
        rollout = Rollout(net, self.heuristic.for_batch(batch).repeat(count, 1), guided)
        repeated = repeat_rows(batch.packed, count)
        with torch.no_grad():
            result = run(engines.make("torch", net.encoder), net, rollout, repeated)
        targets = batch.targets.repeat(count, *[1] * (batch.targets.dim() - 1))
        losses = net.task.loss(result.logits, targets, repeated.lengths.to(net.device), "rows")
        loss = rollout.loss(losses, self.options.alpha, repeated, count)
        backward(loss)
        return {"loss": losses.mean().detach(), "kept": rollout.kept_share(repeated).mean()}


@dataclass
class DistilAndReinforceStage(Stage):
    """Trains model and selectors together: random choices again, with the fine-tuned model's logits as targets."""

    options: TRBERTOptions = field(kw_only=True)
    objective: Objective | None = None
    teacher: TeacherLogits | None = None

    needs_reference: ClassVar[bool] = True

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def prepare(self, data: Data, folder: Path) -> None:
        self.teacher = teacher_logits(self.network, data, folder)

    def policy(self) -> Policy:
        return TRBERTPolicy(self.network, TRBERTSettings(threshold=0.5))

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        return cheapest_epoch(self.network, history, self.reference, self.options.slack)

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        assert self.teacher is not None, "prepare is called before"
        net, count = self.network, self.options.samples
        rollout, repeated = Rollout(net), repeat_rows(batch.packed, count)
        with torch.set_grad_enabled(self.objective is None):
            result = run(engines.make("torch", net.encoder), net, rollout, repeated)
            targets = self.teacher.for_batch(batch).repeat(count, 1)
            losses = distillation_loss_by_row(net, result.logits, targets, repeated)
        reinforce = rollout.loss(losses.detach(), self.options.alpha_both, repeated, count)
        if self.objective is None:
            loss = losses.mean()
        else:  # a depth method's objective needs the states of all layers: those of one choice, as masks
            hooks = hooks_of_last_block(rollout, batch.packed, net)
            states = forward_all_layers(net.encoder, batch.packed, hooks)
            logits = net(net.depth, states.after(net.depth))
            loss = distillation_loss_by_row(net, logits, self.teacher.for_batch(batch), batch.packed).mean()
            loss = loss + self.objective(net, states, batch)
        backward(loss + reinforce)
        return {"loss": loss.detach(), "kept": rollout.kept_share(repeated).mean()}


class TRBERT(LengthMethod):
    """Two selectors, trained by reinforcement, decide which tokens are kept."""

    name = "tr_bert"
    settings = TRBERTSettings
    options = TRBERTOptions
    space = ThresholdSpace(
        "threshold", full_value=0.0, unit="probability of staying, tempered", replay=False, grid=GRID
    )
    needs = frozenset({"example_error"})  # excludes tasks whose answers are a vocabulary

    def modules(self, network: Network, options: TRBERTOptions) -> nn.ModuleDict:
        selectors = {str(layer): TokenScorer(network.encoder.hidden) for layer in selector_layers(network.depth)}
        return nn.ModuleDict({PREDICTORS: nn.ModuleDict(selectors)})

    def policy(self, network: Network, settings: TRBERTSettings) -> Policy:
        return TRBERTPolicy(network, settings)

    def stages(self, network: Network, options: TRBERTOptions, objective: Objective | None = None) -> list[Stage]:
        """Return fine-tuning, training of the selectors, and training of all parameters, which includes `objective`."""
        return [
            Stage(network, "fine-tune", options.head_lr, fine_tuning=True),
            ReinforceStage(network, "reinforce", options.select_lr, options=options),
            DistilAndReinforceStage(
                network, "distil and reinforce", options.head_lr, options=options, objective=objective
            ),
        ]
