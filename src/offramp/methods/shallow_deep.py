"""Shallow-Deep Networks (Kaya et al. 2019): exit weights grow during training; a row exits where confidence is high.

What it does: all exits are trained together with the backbone; exit i has the weight min(C_i, 0.01 + progress·C_i),
where C_i is its share of the full model's depth, so that early exits hardly disturb the backbone at the beginning. At
run time a row exits at the first exit whose best answer has a probability above `confidence`.

Modifications (ours, not the paper's): C_i = layer/depth (0.05 for exit 0) instead of measured operations of
convolutional blocks; progress is counted in steps instead of epochs, of which there are few here; exit heads read mean
and maximum over tokens (`pool=first`: the first token); an exit 0 on the embeddings, whose head also reads a bag of
words (`bag_of_words`) and which trains its own head only: where single words tell the answer, the cheapest settings use
it. `exit0=false`, or `offramp calibrate --close-exit 0`, is without it.

Relations: BranchyNet with confidence instead of entropy and scheduled instead of fixed weights.
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
from offramp.training.losses import detached_exit0_loss, exit_losses
from offramp.training.objectives import JointStage, Objective, after_fine_tuning, joint_hooks
from offramp.training.stage import Stage

EXIT0_SHARE = 0.05  # C_0


@dataclass(frozen=True)
class ShallowDeepSettings(ThresholdSettings):
    """`threshold` is compared with 1 − the probability of the best answer; `confidence` is 1 − threshold."""

    confidence: float = 0.0  # if above 0, it replaces the threshold

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.confidence <= 1.0:
            raise OfframpError("a confidence, a probability", f"confidence={self.confidence}", "use e.g. 0.9")

    def threshold_of(self, place: int) -> float:
        return 1.0 - self.confidence if self.confidence > 0.0 else super().threshold_of(place)


@dataclass
class GrowingWeightsStage(JointStage):
    """Joint training whose exit weights grow from step to step."""

    progress: float = 0.0

    def set_progress(self, share: float) -> None:
        self.progress = share

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        return len(history) - 1  # dev rows are scored by the last exit, and early exits are trained most at the end


def scheduled_exit_loss(progress: float, net: Network, states: LayerStates, batch: Batch) -> Tensor:
    """Return the loss of all exits, weighted as at this point of training (0…1)."""
    layers = [layer for layer in sorted(net.exit_heads) if layer > 0]
    share = torch.tensor([EXIT0_SHARE, *(layer / net.depth for layer in layers)])
    weight = torch.minimum(share, 0.01 + progress * share)
    losses = exit_losses(net, states, batch, [*layers, net.depth])
    on_embeddings = weight[0] * detached_exit0_loss(net, states, batch)
    return losses @ torch.cat((weight[1:], torch.ones(1))).to(losses) + on_embeddings


class ShallowDeep(DepthMethod):
    """Rows exit where the best answer is likely; exit weights grow during training."""

    name = "shallow_deep"
    settings = ShallowDeepSettings
    options = JointOptions
    space = ThresholdSpace("threshold", full_value=0.0, unit="1 - confidence")

    def policy(self, network: Network, settings: ShallowDeepSettings) -> Policy:
        return LeastConfidencePolicy(network, settings)

    def objective(self, options: JointOptions) -> Objective:
        """Return the loss with fully grown weights: in a pair the backbone is already fine-tuned."""
        return partial(scheduled_exit_loss, 1.0)

    def stages(self, network: Network, options: JointOptions) -> list[Stage]:
        """Return joint training with growing weights, by option after fine-tuning the backbone alone."""
        stage = GrowingWeightsStage(
            network,
            "joint",
            options.head_lr,
            objective=lambda *inputs: scheduled_exit_loss(stage.progress, *inputs),
            hooks=joint_hooks(options),
            distil=options.distil,
        )
        return after_fine_tuning(options.mixed, stage)
