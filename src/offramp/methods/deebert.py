"""DeeBERT (Xin et al. 2020): fine-tune, freeze, then train the exit heads; a row exits where entropy is low.

What it does: stage 1 fine-tunes the model as usual; stage 2 freezes it and trains the exit heads only, each by its own
loss. At run time a row exits at the first exit whose entropy, in nats, is below the threshold.

Modifications (ours, not the paper's or its code's):
- while exit heads are trained, the backbone is in evaluation mode and without gradients (the code leaves dropout on and
  lets gradient clipping see frozen parameters);
- the last exit is the fine-tuned head and is never compared with a threshold;
- exit heads read mean and maximum over tokens (`pool=first`: the first token, as published);
- an exit 0 on the embeddings, whose head also reads a bag of words (`bag_of_words`): where single words tell the
  answer, the cheapest settings use it. `exit0=false`, or `offramp calibrate --close-exit 0`, is without it;
- an entropy that neither overflows nor becomes NaN.

Relations: BranchyNet with a frozen backbone, so that the full model keeps its accuracy and early exits are weaker.
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
        """Return fine-tuning, which runs that start from the same weights can share, and training of the exit heads."""
        return [
            Stage(network, "fine-tune", options.head_lr, fine_tuning=True),
            ExitHeadStage(network, "exit heads", options.head_lr, objective=sum_of_exit_losses),
        ]
