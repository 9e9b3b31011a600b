"""The training protocol: a method is a list of stages, and the trainer runs each to its end, resumably.

A stage names its parameters, computes its loss and its backward pass, and chooses the best epoch. The trainer owns data
order, schedule, clipping, checkpoints and logging. Randomness inside `step` must come from torch's global generator:
the trainer seeds it from (seed, stage, epoch, step), which makes a resumed run equal to an uninterrupted one.
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
from offramp.training.schedule import LATER_LR_SHARE

Backward = Callable[[Tensor], None]
ParameterGroups = list[dict[str, Any]]


@dataclass
class Stage:
    """One stage of a method's training. The base class fine-tunes the backbone and its own head as usual."""

    network: Network
    name: str = "fine-tune"
    head_lr: float = 5e-4
    fine_tuning: bool = False  # whether this is the plain fine-tuning that `--init RUN` replaces
    needs_labels: bool = True  # whether the loss needs targets; if no stage does, unlabelled rows are accepted
    reference: dict[str, float] = field(default_factory=dict, kw_only=True)  # dev scores before, if `needs_reference`
    follows_fine_tuning: bool = field(default=False, kw_only=True)  # then it has a learning rate of its own:
    later_share: float = field(default=LATER_LR_SHARE, kw_only=True)  # this share of --lr, unless --later-lr is given

    needs_reference: ClassVar[bool] = False  # whether `best_epoch` compares with the dev scores before this stage

    def is_done_in(self, run: Mapping[str, Any]) -> bool:
        """Return whether the run that `--init` names, described by its offramp.json, has already done this stage."""
        return self.fine_tuning

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters that this stage changes; gradients must reach exactly these."""
        return [(name, p) for name, p in self.network.named_parameters() if name.startswith("model.")]

    def optimisers(self, lr: float) -> list[ParameterGroups]:
        """Return parameter groups, one list per optimiser; by default one optimiser, in which newly initialized
        parameters have their own learning rate."""
        new = newly_initialized_parameters(self.network)
        pretrained = [p for name, p in self.trainable() if name not in new]
        heads = [p for name, p in self.trainable() if name in new]
        return [[{"params": p, "lr": rate} for p, rate in ((pretrained, lr), (heads, max(lr, self.head_lr))) if p]]

    def prepare(self, data: Data, folder: Path) -> None:
        """Compute artifacts (tables, saliencies, teacher logits) in `folder`; called again on resume."""

    def set_train_mode(self) -> None:
        """Set which modules are in training mode; called before every epoch."""
        self.network.train(backbone=True, added=True)

    def begin_epoch(self, epoch: int, epochs: int, step: int) -> None:
        """Receive the epoch, their number and the first step; a resumed run may begin in the middle of an epoch."""

    def set_progress(self, share: float) -> None:
        """Receive the share of the stage that is done, 0…1, before every step: schedules span the whole stage."""

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """Compute the loss of a batch, call `backward` on it and return what is logged."""
        depth = self.network.depth
        last = forward_all_layers(self.network.encoder, batch.packed).after(depth)
        loss = exit_loss(self.network, depth, last, batch)
        backward(loss)
        return {"loss": loss.detach()}

    def policy(self) -> Policy:
        """Return the policy that dev rows are run under after each epoch: by default the full model."""
        return Policy()

    def end_epoch(self, history: Sequence[dict[str, float]]) -> None:
        """Receive the dev scores of all epochs, the newest last; the network is in evaluation mode."""

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        """Return the index of the best epoch by the task's metric on dev rows; of equals the later."""
        return rank_epochs(self.network, history)[0]


def mark_later_stages(stages: Sequence[Stage]) -> None:
    """Mark the stages of a method that come after plain fine-tuning, also if `--init` replaces that."""
    fine_tuned = False
    for stage in stages:
        stage.follows_fine_tuning = fine_tuned
        fine_tuned = fine_tuned or stage.fine_tuning


def rank_epochs(network: Network, history: Sequence[dict[str, float]]) -> list[int]:
    """Return epochs by the task's metric on dev rows, the best first; of equals the later."""
    sign = 1.0 if network.task.higher_is_better else -1.0
    scores = [sign * epoch[network.task.metric] for epoch in history]
    return sorted(range(len(scores)), key=lambda i: (scores[i], i), reverse=True)


def cheapest_epoch(
    network: Network, history: Sequence[dict[str, float]], reference: dict[str, float], slack: float
) -> int:
    """Return the epoch with the fewest MACs among those that score within `slack` of the reference, else the best."""
    sign = 1.0 if network.task.higher_is_better else -1.0
    floor = sign * reference[network.task.metric] - slack
    accepted = [i for i, epoch in enumerate(history) if sign * epoch[network.task.metric] >= floor]
    if not accepted:
        return rank_epochs(network, history)[0]
    return min(accepted, key=lambda i: (history[i]["mac_share"], -i))


def newly_initialized_parameters(network: Network) -> set[str]:
    """Return the names of parameters that were not pretrained: those of the model's own head, those that the checkpoint
    lacked (a pooler, for example) and those of the modules that a method added."""
    base = {id(p) for p in network.hf.base_model.parameters()}
    missing = {f"model.{name}" for name in network.newly_initialized}
    return {name for name, p in network.named_parameters() if id(p) not in base or name in missing}


def with_embedding_rate(network: Network, groups: ParameterGroups, rate: float) -> ParameterGroups:
    """Return parameter groups in which the model's embedding tables have a learning rate of their own; 0: as given."""
    tables = {id(module.weight) for module in network.hf.modules() if isinstance(module, nn.Embedding)}
    if rate == 0.0:
        return groups
    split: ParameterGroups = []
    for group in groups:
        parts = [[p for p in group["params"] if (id(p) in tables) is is_table] for is_table in (False, True)]
        rates = group["lr"], max(group["lr"], rate)
        split += [{**group, "params": part, "lr": lr} for part, lr in zip(parts, rates, strict=True) if part]
    return split


def forward_frozen(network: Network, packed: Packed) -> LayerStates:
    """Return the states of all layers without gradients."""
    with torch.no_grad():
        return forward_all_layers(network.encoder, packed)
