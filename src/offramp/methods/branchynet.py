"""BranchyNet (Teerapittayanon et al. 2016): all exits are trained together; a row exits where entropy is low.

What it does: an exit head after every layer (and on the embeddings), all trained with the backbone by a weighted sum of
losses; at run time a row exits at the first exit whose entropy is below the threshold.

Modifications (ours, not the paper's): Transformer encoders instead of convolutional networks; weights are i/Σi by
default instead of 1; the last exit is never compared with a threshold; exit heads read mean and maximum over tokens
(`pool=first`: the first token); an exit 0 on the embeddings, whose head also reads a bag of words (`bag_of_words`) and
which trains its own head only: where single words tell the answer, the cheapest settings use it. `exit0=false`, or
`offramp calibrate --close-exit 0`, is without it.

Relations: DeeBERT uses the same rule with a frozen backbone; Shallow-Deep compares confidence instead of entropy.
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
