"""Attached exits: a model that is already fine-tuned stays as it is, exit heads learn its own answers.

What it does: every text goes once through the frozen model. Exit heads on the pooled states of a few layers are
trained to give the model's own soft answers, so no labels are needed, and the full model's answers do not change. A row
exits where the entropy of its exit's answer is low; where answers are numbers, where a small unit expects the exit to
be close to the full model. `offramp attach` runs it in one pass (training/attach.py).

Relations: ours, not a paper's. DeeBERT with the labels replaced by the model's own answers, heads that read the mean
and maximum of all tokens, a bag of words solved for at exit 0, and few exits instead of one a layer. FastBERT also
learns from the model's own answers, but trains larger heads for several epochs through the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.backbones import linear_macs
from offramp.core.cost import HeadCost
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Needs, Policy
from offramp.methods._base import DepthMethod
from offramp.nn.batches import Batch
from offramp.nn.exit_heads import pool_states
from offramp.nn.exit_policies import EntropyPolicy, EntropySettings, ExitOptions, ThresholdPolicy, build_exit_heads
from offramp.nn.keys import EXIT_HEADS, EXIT_UNIT
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.training.forward import LayerStates
from offramp.training.objectives import ExitHeadStage, Objective, detached_exits_objective, sum_of_exit_losses
from offramp.training.stage import Stage


@dataclass(frozen=True)
class AttachedOptions(ExitOptions):
    """How exits are built; the tables of the bag of words are solved for."""

    bag_of_words_training: Literal["learned", "fitted"] = "fitted"
    hidden: int = 0  # units of the hidden layer of exit heads; 0: linear heads


class DeviationUnit(nn.Module):
    """Estimates from pooled states how far an exit's number is from the full model's; one linear unit an exit."""

    def __init__(self, layers: list[int], hidden: int) -> None:
        super().__init__()
        self.width = 2 * hidden  # of mean and maximum, with which what heads read begins
        self.units = nn.ModuleDict({str(layer): nn.Linear(2 * hidden, 1) for layer in layers})
        self.norm = nn.LayerNorm(2 * hidden)
        self.cost = HeadCost(linear_macs(self.units) / max(1, len(layers)), 0)

    def forward(self, layer: int, packed: Packed) -> Tensor:
        """Return the estimated deviation of every row."""  # [rows]
        return self.estimate(layer, pool_states(packed, "meanmax"))

    def estimate(self, layer: int, pooled: Tensor) -> Tensor:
        """Return the estimate for pooled states [rows, 2 · hidden]."""
        return F.softplus(self.units[str(layer)](self.norm(pooled))).squeeze(-1)


class DeviationPolicy(ThresholdPolicy):
    """Exits where the estimated deviation from the full model is below the threshold."""

    rule_measure = "exit_unit"

    def needs(self, layer: int) -> Needs:
        return super().needs(layer)._replace(logits=False)

    def uncertainty(self, layer: int, s: State) -> Tensor:
        return s.exit_unit()


def attached_loss(net: Network, states: LayerStates, batch: Batch) -> Tensor:
    """Return the sum of the exits' losses, and where answers are numbers that of the unit's estimates."""
    loss = sum_of_exit_losses(net, states, batch)
    if EXIT_UNIT not in net.added:
        return loss
    with torch.no_grad():
        full = net(net.depth, states.after(net.depth))
    for layer in sorted(net.exit_heads):
        packed = states.after(layer)
        with torch.no_grad():
            deviation = (net(layer, packed) - full).abs().squeeze(-1)
        loss = loss + F.smooth_l1_loss(net.exit_unit(layer, packed.with_states(packed.states.detach())), deviation)
    return loss


class Attached(DepthMethod):
    """Exit heads of a frozen model that learn its own answers."""

    name = "attached"
    settings = EntropySettings
    options = AttachedOptions
    space = ThresholdSpace("threshold", full_value=0.0, unit="nats")
    needs = frozenset({"example_error"})

    def modules(self, network: Network, options: AttachedOptions) -> nn.ModuleDict:
        modules = nn.ModuleDict({EXIT_HEADS: build_exit_heads(network, options, options.hidden)})
        if "distribution" not in network.task.provides:
            modules[EXIT_UNIT] = DeviationUnit(options.layers(network.depth), network.encoder.hidden)
        return modules

    def policy(self, network: Network, settings: EntropySettings) -> Policy:
        return (DeviationPolicy if EXIT_UNIT in network.added else EntropyPolicy)(network, settings)

    def objective(self, options: AttachedOptions) -> Objective:
        return detached_exits_objective(attached_loss)

    def stages(self, network: Network, options: AttachedOptions) -> list[Stage]:
        """Return plain fine-tuning and training of the exit heads on labelled rows; `attach` needs neither."""
        return [
            Stage(network, "fine-tune", options.head_lr, fine_tuning=True),
            ExitHeadStage(network, "exit heads", options.head_lr, objective=attached_loss),
        ]
