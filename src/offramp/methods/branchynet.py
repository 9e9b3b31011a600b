"""BranchyNet (Teerapittayanon et al. 2016): joint training of all exits, leave when entropy is low.

What it does: an off-ramp after every layer (and on the embeddings), all trained together with the backbone by a
weighted sum of losses; at run time a row leaves at the first off-ramp whose entropy is below the threshold.
Modifications from the paper: made for Transformer encoders; weights default to i/Σi instead of 1; the last exit is
never tested against a threshold; off-ramp 0.
Relations: DeeBERT uses the same rule with a frozen backbone; Shallow-Deep tests confidence instead of entropy.
"""

from __future__ import annotations

from offramp.nn.exit_policies import EntropyPolicy, EntropySettings, WeightedOptions, exit_modules
from offramp.nn.setting_space import Threshold
from offramp.training.objectives import joint, weighted

SPACE = Threshold("threshold", loosest=0.0, unit="nats")
HF_EQUAL = True
NEEDS = ("distribution",)
Settings = EntropySettings
Options = WeightedOptions
modules = exit_modules
stages = joint
objective = weighted
Policy = EntropyPolicy
