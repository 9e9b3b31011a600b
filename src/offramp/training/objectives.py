"""Objectives and stages that several methods share: joint, alternating, frozen backbone, dropped tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from offramp.core.policy import Policy
from offramp.nn.batches import Batch, Data
from offramp.nn.exit_policies import JointOptions, WeightedOptions, exit_weights
from offramp.nn.network import Network
from offramp.training.distillation import (
    TeacherLogits,
    distillation_loss,
    stored_teacher_folder,
    teacher_logits,
)
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers, forward_with_dropping
from offramp.training.losses import detached_exit0_loss, exit_loss, exit_losses, last_exit_loss
from offramp.training.schedule import LATER_LR_SHARE
from offramp.training.stage import Backward, Stage, forward_frozen

Objective = Callable[[Network, LayerStates, Batch], Tensor]


def weighted_exit_loss(network: Network, options: WeightedOptions, states: LayerStates, batch: Batch) -> Tensor:
    """Return the weighted sum of the losses of all exits, the last exit included.

    The exit on the embeddings has the weight of the first exit after a layer, and trains its own head alone.
    """
    layers = [*(layer for layer in sorted(network.exit_heads) if layer > 0), network.depth]
    losses = exit_losses(network, states, batch, layers)
    weights = losses.new_tensor(exit_weights(len(layers), options.weights))
    return losses @ weights + weights[0] * detached_exit0_loss(network, states, batch)


def weighted_objective(options: WeightedOptions) -> Objective:
    """Return the objective of methods that train all exits together by a weighted sum."""

    def objective(network: Network, states: LayerStates, batch: Batch) -> Tensor:
        return weighted_exit_loss(network, options, states, batch)

    return objective


def sum_of_exit_losses(network: Network, states: LayerStates, batch: Batch) -> Tensor:
    """Return the unweighted sum of the losses of all exit heads; the last exit is left out."""
    return exit_losses(network, states, batch, sorted(network.exit_heads)).sum()


def self_distillation(network: Network, states: LayerStates, batch: Batch) -> Tensor:
    """Return the sum over exit heads of KL(last exit ‖ exit head): the model is its own teacher, without labels."""
    with torch.no_grad():
        teacher = network(network.depth, states.after(network.depth))
    students = [network(layer, states.after(layer)) for layer in sorted(network.exit_heads)]
    return torch.stack([distillation_loss(network, student, teacher, batch.packed) for student in students]).sum()


def detached_exits_objective(exit_objective: Objective) -> Objective:
    """Return the objective of methods that train exit heads on a frozen model, for a model that trains with them.

    The model learns from the last exit's loss; exit heads learn by `exit_objective` from detached states, so that
    their gradients do not reach the backbone.
    """

    def objective(network: Network, states: LayerStates, batch: Batch) -> Tensor:
        return last_exit_loss(network, states, batch) + exit_objective(network, states.detached(), batch)

    return objective


@dataclass
class StageWithTeacher(Stage):
    """A stage that with `distil`, after fine-tuning, also learns the logits of the fine-tuned model.

    Trained on the same labels again, without them, the full model loses accuracy.
    """

    distil: bool = field(default=False, kw_only=True)
    teacher: TeacherLogits | None = field(default=None, kw_only=True)

    def prepare(self, data: Data, folder: Path) -> None:
        if self.distil and self.follows_fine_tuning and self.network.task.outputs > 0:
            self.teacher = teacher_logits(self.network, data, folder)

    def with_teacher(self, batch: Batch) -> Batch:
        """Return the batch with the logits that its exits learn beside the labels, if there are any."""
        return batch if self.teacher is None else replace(batch, teacher=self.teacher.for_batch(batch))


@dataclass
class JointStage(StageWithTeacher):
    """Trains all parameters together by one objective over the states of all layers."""

    objective: Objective = field(kw_only=True)
    hooks: ForwardHooks = field(default_factory=ForwardHooks)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        states = forward_all_layers(self.network.encoder, batch.packed, self.hooks)
        loss = self.objective(self.network, states, self.with_teacher(batch))
        backward(loss)
        return {"loss": loss.detach()}


def joint_stages(network: Network, options: WeightedOptions, later_share: float = LATER_LR_SHARE) -> list[Stage]:
    """Return the joint stage of the weighted sum, after fine-tuning the backbone alone if `options.mixed`."""
    stage = JointStage(
        network,
        "joint",
        options.head_lr,
        objective=weighted_objective(options),
        hooks=joint_hooks(options),
        distil=options.distil,
        later_share=later_share,
    )
    return after_fine_tuning(options.mixed, stage)


def joint_hooks(options: JointOptions) -> ForwardHooks:
    """Return how the gradients of several exits are combined in the backbone."""
    return ForwardHooks(equilibrium=options.equilibrium)


def after_fine_tuning(mixed: bool, stage: Stage) -> list[Stage]:
    """Return a stage, if `mixed` with a stage before it that fine-tunes the backbone alone."""
    first = [Stage(stage.network, "fine-tune", stage.head_lr, fine_tuning=True)] if mixed else []
    return [*first, stage]


@dataclass
class AlternatingStage(JointStage):
    """Alternates steps on the last exit's loss alone with steps on all exits, so that neither dominates (BERxiT)."""

    all_exits_next: bool = False

    def begin_epoch(self, epoch: int, epochs: int, step: int) -> None:
        self.all_exits_next = step % 2 == 1

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        all_exits, self.all_exits_next = self.all_exits_next, not self.all_exits_next
        if all_exits:
            return super().step(batch, backward)
        depth = self.network.depth
        last = forward_all_layers(self.network.encoder, batch.packed).after(depth)
        loss = exit_loss(self.network, depth, last, self.with_teacher(batch))
        backward(loss)
        return {"loss": loss.detach()}


@dataclass
class ExitHeadStage(Stage):
    """Trains only the modules that the method added; the backbone is frozen and in evaluation mode."""

    objective: Objective = field(kw_only=True)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.network.named_parameters() if name.startswith("added.")]

    def set_train_mode(self) -> None:
        self.network.train(backbone=False, added=True)

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = self.objective(self.network, forward_frozen(self.network, batch.packed), batch)
        backward(loss)
        return {"loss": loss.detach()}


@dataclass
class DroppingStage(Stage):
    """Trains with tokens really dropped: the parameters that choose them are frozen, the others adapt to the loss.

    With `distillation` above 0 they also learn the logits of the full model: those that an earlier stage stored (before
    it trained for fewer tokens), else the model's own with all tokens when this stage begins.
    """

    objective: Objective = last_exit_loss
    distillation: float = 0.0  # weight of the loss against the teacher
    teacher: TeacherLogits | None = None

    frozen_prefixes: ClassVar[tuple[str, ...]]  # how the names of the parameters begin that choose tokens

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.network.named_parameters() if not name.startswith(self.frozen_prefixes)]

    def prepare(self, data: Data, folder: Path) -> None:
        if self.distillation > 0.0:
            self.teacher = teacher_logits(self.network, data, stored_teacher_folder(folder))

    def training_policy(self) -> Policy:
        """Return the policy of the next training batch: that of dev rows, unless a method varies it."""
        return self.policy()

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = self.loss(forward_with_dropping(self.network, batch.packed, self.training_policy()), batch)
        backward(loss)
        return {"loss": loss.detach()}

    def loss(self, states: LayerStates, batch: Batch) -> Tensor:
        """Return the loss of the states after a pass with dropped tokens."""
        loss, net = self.objective(self.network, states, batch), self.network
        if self.teacher is None:
            return loss
        logits = net(net.depth, states.after(net.depth))
        return loss + self.distillation * distillation_loss(net, logits, self.teacher.for_batch(batch), batch.packed)
