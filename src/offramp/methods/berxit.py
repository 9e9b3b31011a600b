"""BERxiT (Xin et al. 2021): alternating training and a learned unit that says when to leave.

What it does: training alternates between the last exit alone and all exits together, which keeps the full model intact
and the early exits strong. One unit shared by all layers learns how likely an exit is wrong (classification: 1 −
right; regression: tanh of the absolute error); at run time a row leaves where that doubt is below the threshold.
Modifications from the paper and its code: the unit reads pooled states (mean, or mean and maximum), detached (the
code let it pull on the backbone); its squared error is added in the steps that train all exits; parity restarts each
epoch, as in the code; the sum over exits keeps the last one, as in the paper. `weights=index` makes later exits count
more, at the same total.
Relations: BranchyNet with another schedule and a learned rule; with PABEE the exits that can serve regression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from offramp.backbones import linear_macs
from offramp.core.cost import HeadCost
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Needs, Policy
from offramp.methods._base import DepthMethod
from offramp.nn.batches import Batch
from offramp.nn.exit_heads import ExitHead, Pool
from offramp.nn.exit_policies import ThresholdPolicy, ThresholdSettings, WeightedOptions, build_exit_heads
from offramp.nn.keys import EXIT_HEADS, EXIT_UNIT
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.training.forward import LayerStates
from offramp.training.objectives import AlternatingStage, Objective, after_fine_tuning, joint_hooks, weighted_exit_loss
from offramp.training.stage import Stage


@dataclass(frozen=True)
class BERxiTOptions(WeightedOptions):
    """How exits are built and trained; by default every exit counts as much as the last one in its own steps."""

    weights: Literal["index", "uniform"] = "uniform"


class LearnedToExit(nn.Module):
    """One linear unit for all layers: pooled states → probability that the exit is wrong."""

    def __init__(self, hidden: int, pool: Pool) -> None:
        super().__init__()
        self.reader = ExitHead(hidden, 1, "meanmax" if pool == "meanmax" else "mean", dropout=0.0)
        self.cost = HeadCost(linear_macs(self), 0)

    def forward(self, layer: int, packed: Packed) -> Tensor:
        """Doubt per row, 0…1."""
        said: Tensor = self.reader(packed).squeeze(-1).sigmoid()
        return said


class BERxiTPolicy(ThresholdPolicy):
    """Doubt is what the learned unit says; a head is evaluated only where somebody leaves."""

    rule_measure = "exit_unit"

    def needs(self, layer: int) -> Needs:
        return super().needs(layer)._replace(logits=False)

    def uncertainty(self, layer: int, s: State) -> Tensor:
        return s.exit_unit()


def _unit_loss(net: Network, made: LayerStates, batch: Batch) -> Tensor:
    """Squared error of the unit against how wrong each off-ramp is, averaged over off-ramps and rows."""
    lengths, errors = batch.packed.lengths.to(net.device), []
    for layer in sorted(net.exit_heads):
        with torch.no_grad():
            wrong = net.task.example_error(net(layer, made.after(layer)), batch.targets, lengths)
        states = made.after(layer)
        errors.append((net.exit_unit(layer, states.with_states(states.states.detach())) - wrong).square().mean())
    return torch.stack(errors).mean()


class BERxiT(DepthMethod):
    """Rows exit where a learned unit expects the exit to be right."""

    name = "berxit"
    options = BERxiTOptions
    space = ThresholdSpace("threshold", full_value=0.0, unit="uncertainty")
    needs = frozenset({"example_error"})

    def modules(self, network: Network, options: BERxiTOptions) -> nn.ModuleDict:
        """An off-ramp per layer and the shared unit."""
        unit = LearnedToExit(network.encoder.hidden, options.pool)
        return nn.ModuleDict({EXIT_HEADS: build_exit_heads(network, options), EXIT_UNIT: unit})

    def policy(self, network: Network, settings: ThresholdSettings) -> Policy:
        return BERxiTPolicy(network, settings)

    def objective(self, options: BERxiTOptions) -> Objective:
        """The sum of all exits, and the unit by how wrong they are. (In a pair there is nothing to alternate.)"""

        def learn(net: Network, made: LayerStates, batch: Batch) -> Tensor:
            exits = len(net.exit_heads) + 1
            return exits * weighted_exit_loss(net, options, made, batch) + _unit_loss(net, made, batch)

        return learn

    def stages(self, network: Network, options: BERxiTOptions) -> list[Stage]:
        """Alternating training; the backbone alone before that if asked."""
        stage = AlternatingStage(
            network, "alternating", options.head_lr, objective=self.objective(options), hooks=joint_hooks(options)
        )
        return after_fine_tuning(options, stage)
