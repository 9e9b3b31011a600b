"""Shallow-Deep Networks (Kaya et al. 2019): exit weights that grow during training, leave when confident.

What it does: all exits train together with the backbone; off-ramp i weighs min(C_i, 0.01 + progress·C_i) where C_i is
its share of the full model's depth, so early exits do not disturb the backbone while it is still finding its feet. At
run time a row leaves at the first off-ramp that gives its best answer more than `confidence`.
Modifications from the paper: C_i = layer/depth (at least 0.05, for the off-ramp on the embeddings) instead of measured
operations of convolutional blocks; progress counts steps instead of epochs, of which there are few here.
Relations: BranchyNet with confidence for entropy and scheduled weights for fixed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods._base import DepthMethod
from offramp.nn.batches import Batch
from offramp.nn.exit_policies import JointOptions, LeastConfidencePolicy, ThresholdSettings
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.training.forward import LayerStates
from offramp.training.losses import exit_losses
from offramp.training.objectives import JointStage, Objective, after_fine_tuning, joint_hooks
from offramp.training.stage import Stage


@dataclass(frozen=True)
class ShallowDeepSettings(ThresholdSettings):
    """`threshold` is on hesitation, 1 − probability of the best answer; `confidence` says the same the other way."""

    confidence: float = 0.0  # if above 0, replaces threshold by 1 − confidence

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.confidence <= 1.0:
            raise OfframpError("a confidence, a probability", f"confidence={self.confidence}", "use e.g. 0.9")

    def threshold_of(self, place: int) -> float:
        return 1.0 - self.confidence if self.confidence > 0.0 else super().threshold_of(place)


@dataclass
class Scheduled(JointStage):
    """Joint training whose exit weights grow from step to step."""

    progress: float = 0.0

    def set_progress(self, share: float) -> None:
        self.progress = share

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        return len(history) - 1  # dev rows see the last exit alone, and off-ramps hardly learn before the end


def grown(progress: float, net: Network, made: LayerStates, batch: Batch) -> Tensor:
    """All exits, weighted as they are at this point of training."""
    layers = sorted(net.exit_heads)
    share = torch.tensor([max(0.05, layer / net.depth) for layer in layers])
    weight = torch.minimum(share, 0.01 + progress * share)
    losses = exit_losses(net, made, batch, [*layers, net.depth])
    return losses @ torch.cat((weight, torch.ones(1))).to(losses)


class ShallowDeep(DepthMethod):
    """Rows exit where the best answer is likely; exit weights grow during training."""

    name = "shallow_deep"
    settings = ShallowDeepSettings
    options = JointOptions
    space = ThresholdSpace("threshold", full_value=0.0, unit="1 - confidence")

    def policy(self, network: Network, settings: ShallowDeepSettings) -> Policy:
        return LeastConfidencePolicy(network, settings)

    def objective(self, options: JointOptions) -> Objective:
        """In a pair the model has found its feet already: weights are fully grown."""
        return partial(grown, 1.0)

    def stages(self, network: Network, options: JointOptions) -> list[Stage]:
        """Joint training with growing weights; the backbone alone before that if asked."""
        stage = Scheduled(
            network,
            "joint",
            options.head_lr,
            objective=lambda *given: grown(stage.progress, *given),
            hooks=joint_hooks(options),
        )
        return after_fine_tuning(options, stage)
