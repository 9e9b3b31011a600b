"""What entropy exits share: their options, their settings, their run-time policy and their weighted loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from offramp.core.loop import State
from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.parts.criteria import row_entropy
from offramp.parts.heads import OffRamp, Pool, SharedRamp
from offramp.parts.network import Network


@dataclass(frozen=True)
class ExitOptions:
    """How exits are built and trained; fixed once trained."""

    pool: Pool = "meanmax"
    ramp0: bool = True  # an off-ramp on the embeddings, before any layer
    weights: Literal["index", "uniform"] = "index"  # index: later exits count more, i/Σi
    head_lr: float = 5e-4  # fresh heads learn faster than the pretrained body


@dataclass(frozen=True)
class EntropySettings:
    """Leave when the entropy of the answer, in nats, is below the threshold; 0 never leaves early."""

    threshold: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold < 20.0:
            raise OfframpError(
                "an entropy threshold in nats",
                f"threshold={self.threshold}",
                "use 0 (never leave early) up to ln(number of labels), e.g. 0.3",
            )


class EntropyPolicy(Policy):
    """A row leaves at the first off-ramp whose answer is sure enough."""

    def __init__(self, network: Network, settings: EntropySettings) -> None:
        self.task, self.exits, self.threshold = network.task, frozenset(network.ramps), settings.threshold

    def leave(self, layer: int, s: State) -> Tensor | None:
        if layer not in self.exits or self.threshold == 0.0:
            return None
        packed = s.whole() if s.heads.per_token else s.packed
        return row_entropy(self.task, s.logits(), packed) < self.threshold


def ramps(network: Network, pool: Pool, ramp0: bool = True) -> nn.ModuleDict:
    """One off-ramp per layer below the last, and one on the embeddings if asked."""
    if pool not in get_args(Pool):
        raise OfframpError("a pooling for off-ramps", repr(pool), f"use one of: {', '.join(get_args(Pool))}")
    layers = [str(layer) for layer in range(0 if ramp0 else 1, network.depth)]
    outputs = network.task.outputs
    if outputs == 0:  # a vocabulary: every exit shares the model's own head
        return nn.ModuleDict({layer: SharedRamp(network.last.apply, network.last.cost) for layer in layers})
    kind: Pool | None = None if network.per_token else pool
    return nn.ModuleDict({layer: OffRamp(network.encoder.hidden, outputs, kind) for layer in layers})


def exit_weights(layers: list[int], rule: Literal["index", "uniform"]) -> list[float]:
    """One weight per exit, summing to 1."""
    raw = [layer + 1.0 if rule == "index" else 1.0 for layer in layers]
    return [w / sum(raw) for w in raw]
