"""DeeBERT (Xin et al. 2020): fine-tune, freeze, then train the off-ramps; leave when entropy is low.

What it does: stage 1 fine-tunes the model as usual; stage 2 freezes it and trains only the off-ramps, each on its own
loss. At run time a row leaves at the first off-ramp whose entropy, in nats, is below the threshold.
Modifications from the paper and its code: the backbone is in evaluation mode and without gradients while off-ramps
train (the code left dropout on and let clipping see frozen gradients); the last exit is the fine-tuned head and is
never tested; off-ramps pool as `pool` says; off-ramp 0; entropy that neither overflows nor becomes NaN.
Relations: BranchyNet with a frozen backbone, so the full model keeps its accuracy and early exits are weaker.
"""

from __future__ import annotations

from offramp.core.policy import Policy
from offramp.methods._base import DepthMethod
from offramp.nn.exit_policies import EntropyPolicy, EntropySettings, ExitOptions
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.training.objectives import ExitHeadStage, Objective, detached_exits_objective, sum_of_exit_losses
from offramp.training.stage import Stage


class DeeBERT(DepthMethod):
    """Rows exit where entropy is low; exits are trained on a frozen model."""

    name = "deebert"
    settings = EntropySettings
    options = ExitOptions
    space = ThresholdSpace("threshold", full_value=0.0, unit="nats")

    def policy(self, network: Network, settings: EntropySettings) -> Policy:
        return EntropyPolicy(network, settings)

    def objective(self, options: ExitOptions) -> Objective:
        return detached_exits_objective(sum_of_exit_losses)

    def stages(self, network: Network, options: ExitOptions) -> list[Stage]:
        """Two: fine-tune (shared with every run that starts from the same weights), then off-ramps."""
        return [
            Stage(network, "fine-tune", options.head_lr, fine_tuning=True),
            ExitHeadStage(network, "off-ramps", options.head_lr, objective=sum_of_exit_losses),
        ]
