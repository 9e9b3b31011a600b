"""DeeBERT (Xin et al. 2020): fine-tune, freeze, then train the off-ramps; leave when entropy is low.

What it does: stage 1 fine-tunes the model as usual; stage 2 freezes it and trains only the off-ramps, each on its own
loss. At run time a row leaves at the first off-ramp whose entropy, in nats, is below the threshold.
Modifications from the paper and its code: the backbone is in evaluation mode and without gradients while off-ramps
train (the code left dropout on and let clipping see frozen gradients); the last exit is the fine-tuned head and is
never tested; off-ramps pool as `pool` says; off-ramp 0; entropy that neither overflows nor becomes NaN.
Relations: BranchyNet with a frozen backbone, so the full model keeps its accuracy and early exits are weaker.
"""

from __future__ import annotations

from offramp.nn.exit_policies import EntropyPolicy, EntropySettings, ExitOptions, exit_modules
from offramp.nn.network import Network
from offramp.nn.setting_space import Threshold
from offramp.training.objectives import ExitHeadStage, beside, sum_of_exit_losses
from offramp.training.stage import Stage

SPACE = Threshold("threshold", loosest=0.0, unit="nats")
HF_EQUAL = True
NEEDS = ("distribution",)
Settings = EntropySettings
Options = ExitOptions
modules = exit_modules
Policy = EntropyPolicy
objective = beside(sum_of_exit_losses)


def stages(network: Network, options: ExitOptions) -> list[Stage]:
    """Two: fine-tune (shared with every run that starts from the same weights), then off-ramps."""
    return [
        Stage(network, "fine-tune", options.head_lr, shared=True),
        ExitHeadStage(network, "off-ramps", options.head_lr, objective=sum_of_exit_losses),
    ]
