"""Truncation: only the first k layers are kept, plain or distilled from the full model.

What it does: the model's own head is moved to layer `k` and fine-tuned there with the layers below; the layers above
are never executed. With `distil=true` the full model is fine-tuned first, and its logits are the targets of the short
one.

Relations: a stand-in for DistilBERT, and the static baseline at equal cost for every exit method; its cost is counted
against all layers of the model it was cut from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from offramp.core.loop import State
from offramp.core.policy import Needs, Policy
from offramp.errors import OfframpError
from offramp.methods._base import Method, NoSettings
from offramp.nn.batches import Batch, Data
from offramp.nn.exit_heads import SharedExitHead
from offramp.nn.keys import EXIT_HEADS
from offramp.nn.network import Network
from offramp.nn.setting_space import FixedSpace
from offramp.training.distillation import TeacherLogits, distillation_loss, teacher_logits
from offramp.training.forward import ForwardHooks, forward_all_layers
from offramp.training.losses import exit_loss
from offramp.training.stage import Backward, Stage


@dataclass(frozen=True)
class TruncateOptions:
    """How many layers are kept, and how they are trained."""

    k: int = 3
    distil: bool = False
    head_lr: float = 5e-4


class TruncatePolicy(Policy):
    """Lets all rows exit at the last layer that is kept."""

    def __init__(self, network: Network, settings: NoSettings) -> None:
        self.last = max(network.exit_heads)

    def needs(self, layer: int) -> Needs:
        return Needs(should_exit=layer == self.last)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        return torch.ones(s.packed.count, dtype=torch.bool) if layer == self.last else None


@dataclass
class TruncatedStage(Stage):
    """Fine-tunes the layers that are kept, through the moved head."""

    k: int = field(kw_only=True)
    distil: bool = False
    teacher: TeacherLogits | None = None

    def prepare(self, data: Data, folder: Path) -> None:
        self.teacher = teacher_logits(self.network, data, folder) if self.distil else None

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        layers = self.network.encoder.layers
        kept = {id(p) for layer in layers[: self.k] for p in layer.parameters()}
        removed = {id(p) for layer in layers[self.k :] for p in layer.parameters()} - kept
        return [(name, p) for name, p in super().trainable() if id(p) not in removed]

    def policy(self) -> Policy:
        return TruncatePolicy(self.network, NoSettings())

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        states = forward_all_layers(self.network.encoder, batch.packed, ForwardHooks(skip=lambda layer: layer > self.k))
        if self.teacher is None:
            loss = exit_loss(self.network, self.k, states.after(self.k), batch)
        else:
            logits = self.network(self.k, states.after(self.k))
            loss = distillation_loss(self.network, logits, self.teacher.for_batch(batch), batch.packed)
        backward(loss)
        return {"loss": loss.detach()}


class Truncate(Method):
    """Only the first layers are executed."""

    name = "truncate"
    settings = NoSettings
    options = TruncateOptions
    space = FixedSpace()
    hf_equal = False

    def modules(self, network: Network, options: TruncateOptions) -> nn.ModuleDict:
        if options.distil and network.task.outputs == 0:
            asked = f"a distilled truncation for {network.task.name}"
            raise OfframpError(asked, "answers as wide as a vocabulary", "leave distil out")
        if not 1 <= options.k < network.depth:
            fix = f"use 1 to {network.depth - 1} for this model"
            raise OfframpError("a number of layers to keep", f"k={options.k}", fix)
        own = network.model_head
        head = SharedExitHead(own.apply, own.cost, own.spec)
        return nn.ModuleDict({EXIT_HEADS: nn.ModuleDict({str(options.k): head})})

    def policy(self, network: Network, settings: NoSettings) -> Policy:
        return TruncatePolicy(network, settings)

    def stages(self, network: Network, options: TruncateOptions) -> list[Stage]:
        """Return fine-tuning of the short model, with `distil` after that of the full one."""
        first = [Stage(network, "fine-tune", options.head_lr, fine_tuning=True)] if options.distil else []
        return [*first, TruncatedStage(network, "fine-tune short", options.head_lr, k=options.k, distil=options.distil)]
