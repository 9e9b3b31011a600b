"""LayerDrop (Fan et al. 2020): layers are skipped at random in training; at run time only some of them are executed.

What it does: in training every layer is skipped with probability `rate` for the whole batch; at run time only `layers`
of them, evenly spread, are executed for every row.

Modifications (ours, not the paper's): layers are dropped in fine-tuning only (in the paper also in pre-training).

Relations: a static baseline for adaptive methods; `truncate` keeps the first layers instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offramp.core.columns import ORIGIN
from offramp.core.loop import State
from offramp.core.policy import Needs, Policy
from offramp.errors import OfframpError
from offramp.methods._base import Method
from offramp.nn.batches import Batch
from offramp.nn.network import Network
from offramp.nn.setting_space import IntegerSpace
from offramp.training.forward import ForwardHooks, forward_all_layers
from offramp.training.losses import exit_loss
from offramp.training.stage import Backward, Stage


@dataclass(frozen=True)
class LayerDropSettings:
    """How many layers are executed; 0 means all."""

    layers: int = 0

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise OfframpError("a number of layers to keep", f"layers={self.layers}", "use 1, 2, …; 0 keeps all")


@dataclass(frozen=True)
class LayerDropOptions:
    """How LayerDrop is trained."""

    rate: float = 0.2
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate < 1.0:
            raise OfframpError("a share of layers to skip", f"rate={self.rate}", "use 0 up to below 1, e.g. 0.2")


class LayerDropPolicy(Policy):
    """Makes every token idle in layers that are skipped."""

    def __init__(self, network: Network, settings: LayerDropSettings) -> None:
        if settings.layers > network.depth:
            given = f"layers={settings.layers}"
            raise OfframpError("a number of layers to keep", given, f"this model has {network.depth}")
        kept = settings.layers or network.depth
        self.kept = {round((i + 1) * network.depth / kept) for i in range(kept)}
        self.keeps_all = len(self.kept) >= network.depth

    def needs(self, layer: int) -> Needs:
        return Needs(before_layer=not self.keeps_all)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        if not self.keeps_all:
            gate = torch.full_like(s.packed.tokens[ORIGIN], float(layer in self.kept), dtype=torch.float32)
            s.packed = s.packed.with_tokens(gate=gate)
        return None


@dataclass
class LayerDropStage(Stage):
    """Fine-tuning in which layers are skipped at random."""

    rate: float = 0.2

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        depth = self.network.depth
        skipped = (torch.rand(depth) < self.rate).tolist()
        states = forward_all_layers(
            self.network.encoder, batch.packed, ForwardHooks(skip=lambda layer: skipped[layer - 1])
        )
        loss = exit_loss(self.network, depth, states.after(depth), batch)
        backward(loss)
        return {"loss": loss.detach()}


class LayerDrop(Method):
    """Some layers, evenly spread, are executed for every row."""

    name = "layerdrop"
    settings = LayerDropSettings
    options = LayerDropOptions
    space = IntegerSpace("layers", full_value=0, replay=False)

    def modules(self, network: Network, options: LayerDropOptions) -> nn.ModuleDict:
        return nn.ModuleDict()

    def policy(self, network: Network, settings: LayerDropSettings) -> Policy:
        return LayerDropPolicy(network, settings)

    def stages(self, network: Network, options: LayerDropOptions) -> list[Stage]:
        return [LayerDropStage(network, "fine-tune with layer drop", options.head_lr, rate=options.rate)]
