"""The training protocol: a method is a list of stages; the trainer runs each to its end, resumably.

A stage names its parameters, owns its loss and its backward pass, and says which epoch was best. The trainer owns data
order, schedules, clipping, checkpoints and logging. Randomness inside `step` must come from torch's global generator:
the trainer seeds it from (seed, stage, step), which is what makes a resumed run equal an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.nn.batches import Batch, Data
from offramp.nn.network import Network
from offramp.training.forward import LayerStates, forward_all_layers
from offramp.training.losses import exit_loss

Backward = Callable[[Tensor], None]
ParameterGroups = list[dict[str, Any]]


@dataclass
class Stage:
    """One part of a method's training. The base class is ordinary fine-tuning of the backbone and its own head."""

    network: Network
    name: str = "fine-tune"
    head_lr: float = 5e-4
    fine_tuning: bool = False  # plain fine-tuning that `--init RUN` replaces
    needs_labels: bool = True  # whether its loss needs targets; if no stage does, rows without labels will do
    reference: dict[str, float] = field(default_factory=dict, kw_only=True)  # dev scores before it, if it `compares`

    needs_reference: ClassVar[bool] = False  # `select` asks what the model scored before this stage

    def is_done_in(self, run: Mapping[str, Any]) -> bool:
        """Whether a run that `--init` names, told by its offramp.json, has done this stage already."""
        return self.fine_tuning

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters this stage changes; gradients must reach exactly these."""
        return [(name, p) for name, p in self.network.named_parameters() if name.startswith("model.")]

    def optimisers(self, lr: float) -> list[ParameterGroups]:
        """Parameter groups, one list per optimiser. The default: one AdamW, fresh heads at their own rate."""
        fresh = newly_initialized_parameters(self.network)
        body = [p for name, p in self.trainable() if name not in fresh]
        heads = [p for name, p in self.trainable() if name in fresh]
        return [[{"params": p, "lr": rate} for p, rate in ((body, lr), (heads, max(lr, self.head_lr))) if p]]

    def prepare(self, data: Data, folder: Path) -> None:
        """Make artifacts (tables, saliencies, teacher logits) in `folder`; called again on resume."""

    def set_train_mode(self) -> None:
        """Which parts are in training mode; called before every epoch."""
        self.network.train(backbone=True, added=True)

    def begin_epoch(self, epoch: int, epochs: int, step: int) -> None:
        """Where training stands, told before every epoch (a resumed run may begin in the middle of one)."""

    def set_progress(self, share: float) -> None:
        """How much of the stage is done, 0…1, told before every step: growing schedules span the whole stage."""

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """Loss and backward pass of one batch; what is returned is logged."""
        depth = self.network.depth
        loss = exit_loss(
            self.network, depth, forward_all_layers(self.network.encoder, batch.packed).after(depth), batch
        )
        backward(loss)
        return {"loss": loss.detach()}

    def policy(self) -> Policy:
        """How dev rows are run after each epoch: by default through the whole model."""
        return Policy()

    def end_epoch(self, history: Sequence[dict[str, float]]) -> None:
        """After every epoch, its dev scores last in the history; the network is in evaluation mode."""

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        """Which epoch was best, by the task's metric on dev rows; of equals the later."""
        return rank_epochs(self.network, history)[0]


def rank_epochs(network: Network, history: Sequence[dict[str, float]]) -> list[int]:
    """Epochs by the task's metric on dev rows, the best first; of equals the later."""
    sign = 1.0 if network.task.higher_is_better else -1.0
    scores = [sign * epoch[network.task.metric] for epoch in history]
    return sorted(range(len(scores)), key=lambda i: (scores[i], i), reverse=True)


def cheapest_epoch(
    network: Network, history: Sequence[dict[str, float]], reference: dict[str, float], slack: float
) -> int:
    """The epoch that spends least among those that score within `slack` of the reference; else the best one."""
    sign = 1.0 if network.task.higher_is_better else -1.0
    floor = sign * reference[network.task.metric] - slack
    fine = [i for i, epoch in enumerate(history) if sign * epoch[network.task.metric] >= floor]
    return min(fine, key=lambda i: (history[i]["mac_share"], -i)) if fine else rank_epochs(network, history)[0]


def newly_initialized_parameters(network: Network) -> set[str]:
    """Names of parameters that were never pretrained: the model's own head (with a pooler, if it had to be made) and
    whatever a method added."""
    base = {id(p) for p in network.hf.base_model.parameters()}
    made = {f"model.{name}" for name in network.newly_initialized}
    return {name for name, p in network.named_parameters() if id(p) not in base or name in made}


def forward_frozen(network: Network, packed: Packed) -> LayerStates:
    """A trace of the backbone without gradients, dropout off."""
    with torch.no_grad():
        return forward_all_layers(network.encoder, packed)
