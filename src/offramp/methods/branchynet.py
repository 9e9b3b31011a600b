"""BranchyNet (Teerapittayanon et al. 2016): joint training of all exits, leave when entropy is low.

What it does: an off-ramp after every layer (and on the embeddings), all trained together with the backbone by a
weighted sum of losses; at run time a row leaves at the first off-ramp whose entropy is below the threshold.
Modifications from the paper: made for Transformer encoders; weights default to i/Σi instead of 1; the last exit is
never tested against a threshold; off-ramp 0.
Relations: DeeBERT uses the same rule with a frozen backbone; Shallow-Deep tests confidence instead of entropy.
"""

from __future__ import annotations

from torch import Tensor, nn

from offramp.parts.batch import Batch
from offramp.parts.exits import EntropyPolicy, EntropySettings, ExitOptions, ramps
from offramp.parts.network import Network
from offramp.parts.regimes import Joint, weighted_exits
from offramp.parts.space import Threshold
from offramp.parts.stage import Stage
from offramp.parts.trace import Trace

SPACE = Threshold("threshold", loosest=0.0, unit="nats")
HF_EQUAL = True
NEEDS = ("distribution",)
Settings = EntropySettings
Options = ExitOptions
Policy = EntropyPolicy


def modules(network: Network, options: ExitOptions) -> nn.ModuleDict:
    """An off-ramp per layer."""
    return nn.ModuleDict({"ramps": ramps(network, options.pool, options.ramp0)})


def stages(network: Network, options: ExitOptions) -> list[Stage]:
    """One: joint training."""

    def objective(net: Network, made: Trace, batch: Batch) -> Tensor:
        return weighted_exits(net, options, made, batch)

    return [Joint(network, "joint", options.head_lr, objective=objective)]
