"""BranchyNet (Teerapittayanon et al. 2016): joint training of all exits, leave when entropy is low.

What it does: an off-ramp after every layer (and on the embeddings), all trained together with the backbone by a
weighted sum of losses; at run time a row leaves at the first off-ramp whose entropy is below the threshold.
Modifications from the paper: made for Transformer encoders; weights default to i/Σi instead of 1; the last exit is
never tested against a threshold; off-ramp 0.
Relations: DeeBERT uses the same rule with a frozen backbone; Shallow-Deep tests confidence instead of entropy.
"""

from __future__ import annotations

from offramp.core.policy import Policy
from offramp.methods._base import DepthMethod
from offramp.nn.exit_policies import EntropyPolicy, EntropySettings
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace


class BranchyNet(DepthMethod):
    """Rows exit where entropy is low; all exits are trained together."""

    name = "branchynet"
    settings = EntropySettings
    space = ThresholdSpace("threshold", full_value=0.0, unit="nats")

    def policy(self, network: Network, settings: EntropySettings) -> Policy:
        return EntropyPolicy(network, settings)
