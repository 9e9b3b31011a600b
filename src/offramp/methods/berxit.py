"""BERxiT (Xin et al. 2021): alternating training, and a learned unit that estimates how wrong an exit is.

What it does: training alternates between the last exit alone and all exits together, which preserves the full model and
makes early exits strong. One unit, shared by all layers, learns how wrong an exit is (classification: 1 − correct;
regression: tanh of the absolute error); at run time a row exits where its estimate is below the threshold.

Modifications (ours, not the paper's or its code's):
- the unit reads pooled states (mean, or mean and maximum), detached (in the code its loss also trains the backbone);
- its squared error is added in the steps that train all exits;
- alternation restarts with every epoch, as in the code; the sum over exits includes the last one, as in the paper;
- `weights=index` gives later exits more weight, with the same total;
- the model is fine-tuned before the exits are trained with it (`mixed=false`: together from the beginning), and all
  exits then learn its logits beside the labels (`distil=false`: labels alone);
- exit heads read mean and maximum over tokens (`pool=first`: the first token, as published);
- an exit 0 on the embeddings, whose head also reads a bag of words (`bag_of_words`). It trains its own head and the
  unit, which reads states only. `exit0=false`, or `offramp calibrate --close-exit 0`, is without it.

Relations: BranchyNet with another schedule and a learned rule. With PABEE, the exit method that also serves regression.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from offramp.backbones import linear_macs
from offramp.core.cost import HeadCost
from offramp.core.head_spec import ActivationStep, HeadSpec
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
from offramp.utils.merged_dataclass import SINGLE_METHOD_ONLY


@dataclass(frozen=True)
class BERxiTOptions(WeightedOptions):
    """How exits are built and trained; by default every exit has the weight of the last one in its own steps."""

    weights: Literal["index", "uniform"] = "uniform"
    mixed: bool = field(default=True, metadata=SINGLE_METHOD_ONLY)  # fine-tune the backbone alone first


class ExitErrorUnit(nn.Module):
    """One linear unit for all layers that estimates from pooled states how wrong the exit is."""

    def __init__(self, hidden: int, pool: Pool) -> None:
        super().__init__()
        self.reader = ExitHead(hidden, 1, "meanmax" if pool == "meanmax" else "mean", dropout=0.0)
        self.cost = HeadCost(linear_macs(self), 0)

    def spec(self) -> HeadSpec | None:
        """Return the unit as plain data."""
        reader = self.reader.spec()
        return None if reader is None else replace(reader, row_steps=(*reader.row_steps, ActivationStep("sigmoid")))

    def forward(self, layer: int, packed: Packed) -> Tensor:
        """Return the estimated error of every row, 0…1."""  # [rows]
        error: Tensor = self.reader(packed).squeeze(-1).sigmoid()
        return error


class BERxiTPolicy(ThresholdPolicy):
    """Compares the unit's estimate with the threshold; an exit head is evaluated only where a row exits."""

    rule_measure = "exit_unit"

    def needs(self, layer: int) -> Needs:
        return super().needs(layer)._replace(logits=False)

    def uncertainty(self, layer: int, s: State) -> Tensor:
        return s.exit_unit()


def exit_unit_loss(net: Network, states: LayerStates, batch: Batch) -> Tensor:
    """Return the squared error of the unit's estimates, averaged over exits and rows."""
    lengths, errors = batch.packed.lengths.to(net.device), []
    for layer in sorted(net.exit_heads):
        with torch.no_grad():
            target = net.task.example_error(net(layer, states.after(layer)), batch.targets, lengths)
        packed = states.after(layer)
        estimate = net.exit_unit(layer, packed.with_states(packed.states.detach()))
        errors.append((estimate - target).square().mean())
    return torch.stack(errors).mean()


class BERxiT(DepthMethod):
    """Rows exit where a learned unit expects the exit to be right."""

    name = "berxit"
    options = BERxiTOptions
    space = ThresholdSpace("threshold", full_value=0.0, unit="uncertainty")
    needs = frozenset({"example_error"})

    def modules(self, network: Network, options: BERxiTOptions) -> nn.ModuleDict:
        unit = ExitErrorUnit(network.encoder.hidden, options.pool)
        return nn.ModuleDict({EXIT_HEADS: build_exit_heads(network, options), EXIT_UNIT: unit})

    def policy(self, network: Network, settings: ThresholdSettings) -> Policy:
        return BERxiTPolicy(network, settings)

    def objective(self, options: BERxiTOptions) -> Objective:
        """Return the summed loss of all exits and the loss of the unit; in a pair, every step uses it."""

        def loss(net: Network, states: LayerStates, batch: Batch) -> Tensor:
            exits = len(net.exit_heads.keys() - {0}) + 1
            return exits * weighted_exit_loss(net, options, states, batch) + exit_unit_loss(net, states, batch)

        return loss

    def stages(self, network: Network, options: BERxiTOptions) -> list[Stage]:
        """Return alternating training, by option after fine-tuning the backbone alone."""
        stage = AlternatingStage(
            network,
            "alternating",
            options.head_lr,
            objective=self.objective(options),
            hooks=joint_hooks(options),
            distil=options.distil,
        )
        return after_fine_tuning(options.mixed, stage)
