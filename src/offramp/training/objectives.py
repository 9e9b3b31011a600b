"""Training regimes that several methods share: joint, alternating, frozen, self-distilling, with tokens gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from offramp.core.policy import Policy
from offramp.nn.batches import Batch
from offramp.nn.exit_policies import ExitOptions, JointOptions, WeightedOptions, exit_weights
from offramp.nn.network import Network
from offramp.training.distillation import distillation_loss
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers
from offramp.training.forward_dropping import forward_with_dropping
from offramp.training.losses import exit_loss, exit_losses, last_exit_loss
from offramp.training.stage import Backward, Stage, forward_frozen

Objective = Callable[[Network, LayerStates, Batch], Tensor]


def weighted_exit_loss(network: Network, options: WeightedOptions, made: LayerStates, batch: Batch) -> Tensor:
    """Weighted sum of all exits' losses, the last exit included."""
    layers = [*sorted(network.exit_heads), network.depth]
    losses = exit_losses(network, made, batch, layers)
    return losses @ losses.new_tensor(exit_weights(len(layers), options.weights))


def weighted_objective(options: WeightedOptions) -> Objective:
    """The objective of methods that train all exits together by a weighted sum."""

    def objective(network: Network, made: LayerStates, batch: Batch) -> Tensor:
        return weighted_exit_loss(network, options, made, batch)

    return objective


def detached_exits_objective(exit_heads: Objective) -> Callable[[ExitOptions], Objective]:
    """The objective of methods whose off-ramps learn from a frozen model, where the model learns at the same time: its
    own head by its loss, the off-ramps by `exit_heads` from states they cannot pull on."""

    def objective(network: Network, made: LayerStates, batch: Batch) -> Tensor:
        return last_exit_loss(network, made, batch) + exit_heads(network, made.detached(), batch)

    return lambda options: objective


def self_distillation(network: Network, made: LayerStates, batch: Batch) -> Tensor:
    """Sum over off-ramps of KL(last exit ‖ off-ramp): the model teaches its own exits, no label needed."""
    with torch.no_grad():
        taught = network(network.depth, made.after(network.depth))
    said = [network(layer, made.after(layer)) for layer in sorted(network.exit_heads)]
    return torch.stack([distillation_loss(network, one, taught, batch.packed) for one in said]).sum()


@dataclass
class JointStage(Stage):
    """Everything learns together by one objective over the whole trace."""

    objective: Objective = field(kw_only=True)
    hooks: ForwardHooks = field(default_factory=ForwardHooks)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = self.objective(self.network, forward_all_layers(self.network.encoder, batch.packed, self.hooks), batch)
        backward(loss)
        return {"loss": loss.detach()}


def joint_stages(network: Network, options: WeightedOptions) -> list[Stage]:
    """All exits and the backbone together, by the weighted sum; the backbone alone before that if asked."""
    return after_fine_tuning(
        options,
        JointStage(
            network, "joint", options.head_lr, objective=weighted_objective(options), hooks=joint_hooks(options)
        ),
    )


def joint_hooks(options: JointOptions) -> ForwardHooks:
    """How gradients of the exits meet in the backbone."""
    return ForwardHooks(equilibrium=options.equilibrium)


def after_fine_tuning(options: JointOptions, stage: Stage) -> list[Stage]:
    """A joint stage, the backbone fine-tuned alone before it if asked."""
    return [*([Stage(stage.network, "fine-tune", options.head_lr, fine_tuning=True)] if options.mixed else []), stage]


@dataclass
class AlternatingStage(JointStage):
    """One step for the last exit alone, the next for all exits: neither starves the other (BERxiT)."""

    all_exits_next: bool = False

    def begin_epoch(self, epoch: int, epochs: int, step: int) -> None:
        self.all_exits_next = step % 2 == 1

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        odd, self.all_exits_next = self.all_exits_next, not self.all_exits_next
        if odd:
            return super().step(batch, backward)
        depth = self.network.depth
        loss = exit_loss(
            self.network, depth, forward_all_layers(self.network.encoder, batch.packed).after(depth), batch
        )
        backward(loss)
        return {"loss": loss.detach()}


@dataclass
class ExitHeadStage(Stage):
    """Only what the method added learns, from a frozen model in evaluation mode."""

    objective: Objective = field(kw_only=True)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.network.named_parameters() if name.startswith("added.")]

    def set_train_mode(self) -> None:
        self.network.train(backbone=False, added=True)

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = self.objective(self.network, forward_frozen(self.network, batch.packed), batch)
        backward(loss)
        return {"loss": loss.detach()}


def sum_of_exit_losses(network: Network, made: LayerStates, batch: Batch) -> Tensor:
    """Every off-ramp on its own loss, unweighted."""
    return exit_losses(network, made, batch, sorted(network.exit_heads)).sum()


@dataclass
class DroppingStage(Stage):
    """Tokens are gone in training as at run time: who leaves is settled, the rest learns to answer without them."""

    objective: Objective = last_exit_loss

    frozen_prefixes: ClassVar[tuple[str, ...]]  # how the names of parameters begin that say who leaves

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.network.named_parameters() if not name.startswith(self.frozen_prefixes)]

    def training_policy(self) -> Policy:
        """How the next batch is run; as dev rows are, unless a method varies it."""
        return self.policy()

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = self.objective(
            self.network, forward_with_dropping(self.network, batch.packed, self.training_policy()), batch
        )
        backward(loss)
        return {"loss": loss.detach()}
