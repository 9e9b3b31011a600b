"""BranchyNet (Teerapittayanon et al. 2016): joint training of all exits, leave when entropy is low.

What it does: an off-ramp after every layer (and on the embeddings), all trained together with the backbone by a
weighted sum of losses; at run time a row leaves at the first off-ramp whose entropy is below the threshold.
Modifications from the paper: made for Transformer encoders; one global threshold (per-exit ones come from calibration);
weights default to i/Σi instead of 1; the last exit is never tested against the threshold; off-ramp 0.
Relations: DeeBERT uses the same rule with a frozen backbone; Shallow-Deep tests confidence instead of entropy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from offramp.parts.batch import Batch
from offramp.parts.exits import EntropyPolicy, EntropySettings, ExitOptions, exit_weights, ramps
from offramp.parts.losses import exit_losses
from offramp.parts.network import Network
from offramp.parts.space import Threshold
from offramp.parts.stage import Backward, Stage
from offramp.parts.trace import Trace, trace

SPACE = Threshold("threshold", loosest=0.0, unit="nats", sooner="higher")
HF_EQUAL = True
NEEDS = ("distribution",)
Settings = EntropySettings
Options = ExitOptions
Policy = EntropyPolicy


def modules(network: Network, options: ExitOptions) -> nn.ModuleDict:
    """An off-ramp per layer."""
    return nn.ModuleDict({"ramps": ramps(network, options.pool, options.ramp0)})


def objective(network: Network, options: ExitOptions, made: Trace, batch: Batch) -> Tensor:
    """Weighted sum of all exits' losses, the last exit included."""
    layers = [*sorted(network.ramps), network.depth]
    losses = exit_losses(network, made, batch, layers)
    return losses @ losses.new_tensor(exit_weights(layers, options.weights))


@dataclass
class Joint(Stage):
    """Everything learns together."""

    options: ExitOptions = field(default_factory=ExitOptions)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        made = trace(self.network.encoder, batch.packed)
        loss = objective(self.network, self.options, made, batch)
        backward(loss)
        return {"loss": loss.detach()}


def stages(network: Network, options: ExitOptions) -> list[Stage]:
    """One: joint training."""
    return [Joint(network, "joint", options.head_lr, options=options)]
