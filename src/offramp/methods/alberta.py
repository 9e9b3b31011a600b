"""ALBERTa (Li et al. 2024): after a short prefix a small network says how deep each row must go, once and for all.

What it does: the first `prefix` layers run for everybody. Their pooled output gives, by softmax, the probability of
each number of further layers, and by RevPC (reverse, cumulative sum, reverse) the probability p that a layer is still
needed: 1 for the first one, never rising. Training multiplies both halves of every later layer by its p, so the task's
loss alone teaches the depth and one mini-batch trains many structures. At run time a row goes on while p ≥ γ: its depth
is known before the layers run, and the model's own head reads wherever it ended. Executed layers keep their p, as in
training; `hard=true` runs them at full strength, which is another model.
Modifications from the paper: `x + p·(half(x) − x)` replaces `x + p·f(LN(x))`, the same on pre-norm layers and right on
post-norm ones, so any pretrained model serves; the predictor starts at full depth; it reads mean and maximum over
tokens (`pool=first` is the paper's) after a norm. One vector over all later layers, not one a hidden group.
Extensions, off by default: `penalty` on the expected share of layers (the paper has none, so nothing but γ asks for
less), which grows from step to step, from nothing to its full weight at the end of training; `cut=true` also cuts rows
in training at depths drawn from their own distribution, so that short stacks are no news at run time; `head` gives each
earlier depth an off-ramp of its own where the model's head reads one token.
Relations: the exits of BERxiT planned in one look; PALBERT's Q-exit with q = 1 − γ. `gamma=0` is "no early exit",
`revpc=false` the raw softmax; positions are left out in the configuration of the `alberta` backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from offramp.backbones import linear_macs
from offramp.core.cost import HeadCost
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods._base import Method
from offramp.nn.batches import Batch
from offramp.nn.exit_heads import ExitHead, Pool, SharedExitHead, pool_states
from offramp.nn.exit_policies import UncertaintyPolicy
from offramp.nn.keys import EXIT_HEADS, EXIT_UNIT
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.training.forward import ForwardHooks, LayerStates
from offramp.training.losses import exit_loss
from offramp.training.objectives import JointStage
from offramp.training.stage import Stage


@dataclass(frozen=True)
class ALBERTaSettings:
    """A layer runs while the probability that it is needed is at least γ; 0 runs all."""

    gamma: float = 0.0
    hard: bool = False  # executed layers at full strength instead of p: not what was trained

    largest_threshold: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            fix = "use 0 (all layers) up to 1 (as few as possible), e.g. 0.8"
            raise OfframpError("γ, the probability below which layers are left out", f"gamma={self.gamma}", fix)


@dataclass(frozen=True)
class ALBERTaOptions:
    """How it is built and trained."""

    prefix: int = 1  # layers that always run before the depth is predicted
    pool: Pool = "meanmax"  # what the predictor reads
    revpc: bool = True
    start: float = 8.0  # the predictor's first lead of full depth, in logits
    penalty: float = 0.0  # added to the loss, times the expected share of the gated layers
    cut: bool = False  # training also cuts rows at depths drawn from their distribution
    explore: float = 0.0  # the share of rows cut at any depth instead, so that shallow exits learn too
    head: Literal["own", "first", "mean", "meanmax"] = "own"  # who answers for rows that end early (not words)
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        if not self.penalty >= 0.0:
            raise OfframpError("a depth penalty", f"penalty={self.penalty}", "use 0 (none) or more, e.g. 0.1")
        if not 0.0 <= self.explore <= 1.0 or (self.explore > 0.0 and not self.cut):
            fix = "use 0 to 1, with cut=true"
            raise OfframpError("a share of rows cut at any depth", f"explore={self.explore}, cut={self.cut}", fix)
        if self.head != "own" and not self.cut:
            fix = "add cut=true (it trains them), or leave head=own"
            raise OfframpError("off-ramps below the last layer", f"head={self.head} with cut=false", fix)


class StructurePredictor(nn.Module):
    """Pooled states after the prefix → the probability that each later layer is needed."""

    def __init__(self, network: Network, options: ALBERTaOptions) -> None:
        super().__init__()
        self.prefix, self.pool, self.revpc = options.prefix, options.pool, options.revpc
        hidden, gated = network.encoder.hidden, network.depth - options.prefix
        wide = 2 * hidden if options.pool == "meanmax" else hidden
        self.norm, self.first, self.last = nn.LayerNorm(wide), nn.Linear(wide, hidden), nn.Linear(hidden, gated)
        nn.init.normal_(self.last.weight, std=0.02)
        nn.init.zeros_(self.last.bias)
        if options.revpc:  # without it the softmax itself gates, and no start gives all layers full strength
            self.last.bias.data[-1] = options.start
        self.cost = HeadCost(linear_macs(self), 0)

    def forward(self, layer: int, packed: Packed) -> Tensor:
        """What each gated layer is worth to each row, 0…1."""  # [rows, gated layers]
        logits = self.last(torch.tanh(self.first(self.norm(pool_states(packed, self.pool)))))
        probs: Tensor = logits.float().softmax(-1)
        return revpc(probs) if self.revpc else probs


def revpc(probs: Tensor) -> Tensor:
    """Reverse, cumulative sum, reverse: P(depth = i) → P(depth ≥ i); exactly 1 for the first."""  # [rows, n]
    summed = probs.flip(-1).cumsum(-1).flip(-1)
    return summed / summed[..., :1]


def executed(needs: Tensor, gamma: float | Tensor) -> Tensor:
    """Which gated layers run: all until the first that is needed with less than γ."""  # [rows, n] bool
    return (needs >= gamma).cumprod(-1).bool()


class ALBERTaPolicy(UncertaintyPolicy):
    """Plans at the end of the prefix; afterwards rows end where the plan says, without another look."""

    def __init__(self, network: Network, settings: ALBERTaSettings) -> None:
        unit = network.added[EXIT_UNIT]
        assert isinstance(unit, StructurePredictor)
        self.prefix, self.settings = unit.prefix, settings

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        if layer > self.prefix and not self.settings.hard:
            need = s.packed.rows["needs"][:, layer - self.prefix - 1]
            s.packed = s.packed.with_tokens(gate=need[s.packed.row_of_token])
        return None

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        if layer < self.prefix:
            return None
        if layer == self.prefix:
            needs = s.exit_unit()
            depth = self.prefix + executed(needs, self.settings.gamma).sum(-1)
            s.packed = s.packed.with_rows(needs=needs, depth=depth.cpu())
        return s.packed.rows["depth"] <= layer

    def reason(self, layer: int, s: State) -> str:
        if layer < self.prefix:
            return ""
        need, gamma = float(s.packed.rows["needs"][0, layer - self.prefix]), self.settings.gamma
        return f"next layer needed: {need:.6g} {'≥' if need >= gamma else '<'} {gamma:.6g}"

    def uncertainty(self, layer: int, s: State) -> Tensor:
        """The probability that the next layer is needed."""  # [rows]
        return s.exit_heads.exit_unit(self.prefix, s.packed)[:, layer - self.prefix]


@dataclass
class Gated(JointStage):
    """Everything learns together through the gates. A growing penalty asks for its last epoch."""

    penalty: float = 0.0
    weight: float = 0.0  # of the penalty at this step

    def set_progress(self, share: float) -> None:
        self.weight = self.penalty * share

    def policy(self) -> Policy:
        return ALBERTaPolicy(self.network, ALBERTaSettings())

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        return len(history) - 1 if self.penalty > 0.0 else super().best_epoch(history)


def _runs(needs: Tensor, options: ALBERTaOptions) -> Tensor:
    """Which gated layers run in training: all of them, or as many as a depth that is drawn."""  # [rows, gated]
    if not options.cut:
        return executed(needs, 0.0)
    own = executed(needs, torch.rand(len(needs), 1, device=needs.device))
    if options.explore == 0.0:
        return own
    many = needs.shape[1]
    fewest = int(options.revpc)  # with RevPC the first gated layer is always needed: no row ends before it
    any_ = torch.arange(many) < torch.randint(fewest, many + 1, (len(needs), 1))
    return torch.where(torch.rand(len(needs), 1, device=needs.device) < options.explore, any_.to(needs.device), own)


def _ended(net: Network, made: LayerStates, prefix: int) -> Tensor:
    """Every row's answer by the exit of the depth it was cut to."""  # [rows, outputs]
    whole, depth = made.after(net.depth), prefix + made.packed.rows["runs"].sum(-1)
    groups = [(d, (depth == d)) for d in depth.unique().tolist()]
    said = torch.cat([net(d, whole.keep_rows(here)).float() for d, here in groups])
    return said[torch.cat([here.nonzero().squeeze(1) for _, here in groups]).argsort()]


class ALBERTa(Method):
    """A predictor plans the depth of every row after a short prefix."""

    name = "alberta"
    settings = ALBERTaSettings
    options = ALBERTaOptions
    space = ThresholdSpace("gamma", full_value=0.0, unit="need", per_exit=False)
    hf_equal = False

    def modules(self, network: Network, options: ALBERTaOptions) -> nn.ModuleDict:
        """The predictor, and an exit wherever a row may end."""
        if not 0 <= options.prefix <= network.depth - 2:
            fix = f"use 0 to {network.depth - 2} for this model: two layers at least must be left to choose from"
            raise OfframpError("a number of layers before the depth is predicted", f"prefix={options.prefix}", fix)
        exits: dict[str, nn.Module] = {
            str(layer): SharedExitHead(network.model_head.apply, network.model_head.cost)
            for layer in range(options.prefix, network.depth)
        }
        if options.head != "own" and not network.per_token:
            hidden, outputs = network.encoder.hidden, network.task.outputs
            later = [layer for layer in exits if int(layer) > options.prefix]
            exits.update({layer: ExitHead(hidden, outputs, options.head) for layer in later})
        return nn.ModuleDict({EXIT_HEADS: nn.ModuleDict(exits), EXIT_UNIT: StructurePredictor(network, options)})

    def policy(self, network: Network, settings: ALBERTaSettings) -> Policy:
        return ALBERTaPolicy(network, settings)

    def stages(self, network: Network, options: ALBERTaOptions) -> list[Stage]:
        """One: the task's loss through soft gates."""

        def gate(layer: int, made: LayerStates) -> Tensor | None:
            if layer <= options.prefix:
                return None
            if layer == options.prefix + 1:
                needs = network.exit_unit(options.prefix, made.after(options.prefix))
                made.packed = made.packed.with_rows(needs=needs, runs=_runs(needs, options))
            needs, runs = (made.packed.rows[name][:, layer - options.prefix - 1] for name in ("needs", "runs"))
            # a layer that was cut is a copy, yet learns what running it would have done (straight through)
            return torch.where(runs, needs, needs - needs.detach())[made.packed.row_of_token]

        def objective(net: Network, made: LayerStates, batch: Batch) -> Tensor:
            if options.head == "own" or net.per_token:
                loss = exit_loss(net, net.depth, made.after(net.depth), batch)
            else:
                said = _ended(net, made, options.prefix)
                loss = net.task.loss(said, batch.targets, batch.packed.lengths.to(net.device))
            return loss + stage.weight * made.packed.rows["needs"].mean()

        stage = Gated(
            network,
            "gated",
            options.head_lr,
            objective=objective,
            hooks=ForwardHooks(gate=gate),
            penalty=options.penalty,
        )
        return [stage]
