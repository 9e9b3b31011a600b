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
from offramp.training.distillation import imitation
from offramp.training.forward import Soft, Trace, trace
from offramp.training.forward_dropping import tape
from offramp.training.losses import exit_loss, exit_losses, last_exit
from offramp.training.stage import Backward, Stage, frozen

Objective = Callable[[Network, Trace, Batch], Tensor]


def weighted_exits(network: Network, options: WeightedOptions, made: Trace, batch: Batch) -> Tensor:
    """Weighted sum of all exits' losses, the last exit included."""
    layers = [*sorted(network.exit_heads), network.depth]
    losses = exit_losses(network, made, batch, layers)
    return losses @ losses.new_tensor(exit_weights(len(layers), options.weights))


def weighted(options: WeightedOptions) -> Objective:
    """The objective of methods that train all exits together by a weighted sum."""

    def objective(network: Network, made: Trace, batch: Batch) -> Tensor:
        return weighted_exits(network, options, made, batch)

    return objective


def beside(exit_heads: Objective) -> Callable[[ExitOptions], Objective]:
    """The objective of methods whose off-ramps learn from a frozen model, where the model learns at the same time: its
    own head by its loss, the off-ramps by `exit_heads` from states they cannot pull on."""

    def objective(network: Network, made: Trace, batch: Batch) -> Tensor:
        return last_exit(network, made, batch) + exit_heads(network, made.detached(), batch)

    return lambda options: objective


def distillation(network: Network, made: Trace, batch: Batch) -> Tensor:
    """Sum over off-ramps of KL(last exit ‖ off-ramp): the model teaches its own exits, no label needed."""
    with torch.no_grad():
        taught = network(network.depth, made.at(network.depth))
    said = [network(layer, made.at(layer)) for layer in sorted(network.exit_heads)]
    return torch.stack([imitation(network, one, taught, batch.packed) for one in said]).sum()


@dataclass
class Joint(Stage):
    """Everything learns together by one objective over the whole trace."""

    objective: Objective = field(kw_only=True)
    soft: Soft = field(default_factory=Soft)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = self.objective(self.network, trace(self.network.encoder, batch.packed, self.soft), batch)
        backward(loss)
        return {"loss": loss.detach()}


def joint(network: Network, options: WeightedOptions) -> list[Stage]:
    """All exits and the backbone together, by the weighted sum; the backbone alone before that if asked."""
    return after(options, Joint(network, "joint", options.head_lr, objective=weighted(options), soft=soft(options)))


def soft(options: JointOptions) -> Soft:
    """How gradients of the exits meet in the backbone."""
    return Soft(equilibrium=options.equilibrium)


def after(options: JointOptions, stage: Stage) -> list[Stage]:
    """A joint stage, the backbone fine-tuned alone before it if asked."""
    return [*([Stage(stage.network, "fine-tune", options.head_lr, shared=True)] if options.mixed else []), stage]


@dataclass
class Alternating(Joint):
    """One step for the last exit alone, the next for all exits: neither starves the other (BERxiT)."""

    odd: bool = False

    def at(self, epoch: int, epochs: int, step: int) -> None:
        self.odd = step % 2 == 1

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        odd, self.odd = self.odd, not self.odd
        if odd:
            return super().step(batch, backward)
        depth = self.network.depth
        loss = exit_loss(self.network, depth, trace(self.network.encoder, batch.packed).at(depth), batch)
        backward(loss)
        return {"loss": loss.detach()}


@dataclass
class ExitHeadStage(Stage):
    """Only what the method added learns, from a frozen model in evaluation mode."""

    objective: Objective = field(kw_only=True)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.network.named_parameters() if name.startswith("added.")]

    def mode(self) -> None:
        self.network.train(backbone=False, added=True)

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = self.objective(self.network, frozen(self.network, batch.packed), batch)
        backward(loss)
        return {"loss": loss.detach()}


def sum_of_exit_losses(network: Network, made: Trace, batch: Batch) -> Tensor:
    """Every off-ramp on its own loss, unweighted."""
    return exit_losses(network, made, batch, sorted(network.exit_heads)).sum()


@dataclass
class Dropping(Stage):
    """Tokens are gone in training as at run time: who leaves is settled, the rest learns to answer without them."""

    objective: Objective = last_exit

    resting: ClassVar[tuple[str, ...]]  # how the names of parameters begin that say who leaves

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.network.named_parameters() if not name.startswith(self.resting)]

    def drawn(self) -> Policy:
        """How the next batch is run; as dev rows are, unless a method varies it."""
        return self.policy()

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = self.objective(self.network, tape(self.network, batch.packed, self.drawn()), batch)
        backward(loss)
        return {"loss": loss.detach()}
