"""Training of exits and halting units on encoders: the oracle, aligned and mixed training, and the stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.core.packed import Packed
from offramp.methods.depth_adaptive.options import DepthAdaptiveOptions
from offramp.methods.depth_adaptive.units import HaltingUnits, halting_units
from offramp.nn.batches import Batch
from offramp.nn.exit_oracles import (
    NeverRight,
    best_exit,
    correctness_oracle,
    geometric_loss,
    label_never_right,
    likelihood_oracle,
    multinomial_loss,
)
from offramp.nn.exit_policies import exit_weights
from offramp.nn.keys import PREDICTORS
from offramp.nn.network import Network
from offramp.nn.words import token_and_row_depths, words_of
from offramp.tasks import IGNORED_TARGET
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers
from offramp.training.stage import Backward, Stage


class Oracle(NamedTuple):
    """How the target exits of the units are computed."""

    kind: Literal["correctness", "likelihood"]
    penalty: float  # λ
    sigma: float
    never_right: NeverRight = "last"


class ExitPass(NamedTuple):
    """One batch through all layers, and the logits of all exits."""

    batch: Batch
    states: LayerStates
    logits: list[Tensor]  # exits after layer 1…L


def run_all_exits(network: Network, batch: Batch) -> ExitPass:
    """Return a batch after all layers and all exits."""
    states = forward_all_layers(network.encoder, batch.packed)
    return ExitPass(batch, states, [network(layer, states.after(layer)) for layer in range(1, network.depth + 1)])


def aligned_losses(network: Network, output: ExitPass) -> Tensor:
    """Return the task's loss of each exit, every state computed by its own layer."""  # [exits]
    lengths = output.batch.packed.lengths.to(network.device)
    return torch.stack([network.task.loss(logits, output.batch.targets, lengths) for logits in output.logits])


def mixed_rows_loss(network: Network, output: ExitPass, samples: int) -> Tensor:
    """Return the mean loss along sampled exits, one for each row and sample; rows exit whole: no state is missing."""
    lengths, targets = output.batch.packed.lengths.to(network.device), output.batch.targets
    losses = torch.stack([network.task.loss(logits, targets, lengths, "rows") for logits in output.logits])
    drawn = torch.randint(losses.shape[0], (samples, losses.shape[1]), device=losses.device)
    return losses.gather(0, drawn).mean()


def mixed_words_loss(network: Network, batch: Batch, samples: int) -> Tensor:
    """Return the mean loss along sampled exits, one for each word and sample; halted words are copied upward."""
    packed, losses = batch.packed, []
    words = words_of(packed)
    for _ in range(samples):
        drawn = torch.randint(1, network.depth + 1, words.key.shape, device=words.key.device)
        depth, _ = token_and_row_depths(words, drawn, packed, network.depth)
        states = forward_all_layers(network.encoder, packed, ForwardHooks(gate=partial(_going, depth)))
        for layer in range(1, network.depth + 1):
            own = ((batch.targets != IGNORED_TARGET) & (depth == layer)).nonzero().squeeze(1)
            selected = Packed(states.states[layer].index_select(0, own), torch.tensor([len(own)]))
            logits = network(layer, selected).float()
            losses.append(F.cross_entropy(logits, batch.targets[own], reduction="sum"))
    return torch.stack(losses).sum() / (samples * max(1, int((batch.targets != IGNORED_TARGET).sum())))


def _going(depth: Tensor, layer: int, _: LayerStates) -> Tensor:
    return (depth >= layer).float()


def halting_loss(network: Network, units: HaltingUnits, output: ExitPass, oracle: Oracle, detach: bool) -> Tensor:
    """Return the cross-entropy of the units' exit distribution with the oracle's exits as targets."""
    exits = oracle_exits(network, output, oracle, units.by_word)
    words = output.batch.targets != IGNORED_TARGET if units.by_word else None

    def unit_logits(layer: int) -> Tensor:
        packed = output.states.after(layer)
        packed = packed.with_states(network.encoder.final(packed.states.detach() if detach else packed.states))
        return units.unit_logits(layer, packed.mean() if words is None else packed.states[words])

    if units.form == "multinomial":
        return multinomial_loss(unit_logits(1), exits)
    return geometric_loss(torch.stack([unit_logits(layer) for layer in range(1, network.depth)], dim=1), exits)


@torch.no_grad()
def oracle_exits(network: Network, output: ExitPass, oracle: Oracle, by_word: bool) -> Tensor:
    """Return the oracle's exit for each row, or for each word with an answer, counted from 0 to L−1."""
    targets, lengths = output.batch.targets, output.batch.packed.lengths.to(network.device)
    task, by_likelihood = network.task, oracle.kind == "likelihood"
    if not by_word:
        if by_likelihood:
            losses = torch.stack([task.loss(logits, targets, lengths, "rows") for logits in output.logits])
            return best_exit(-losses, oracle.penalty)
        right = torch.stack([1.0 - task.example_error(logits, targets, lengths) for logits in output.logits])
        return label_never_right(best_exit(right, oracle.penalty), right, oracle.never_right)
    words = targets != IGNORED_TARGET
    word_logits, word_targets = [logits[words].float() for logits in output.logits], targets[words]
    counts = torch.bincount(output.batch.packed.row_of_token[words], minlength=len(lengths))
    if by_likelihood:
        losses = torch.stack([F.cross_entropy(logits, word_targets, reduction="none") for logits in word_logits])
        return likelihood_oracle(losses, counts, oracle.penalty, oracle.sigma)
    right = torch.stack([logits.argmax(1) == word_targets for logits in word_logits])
    return correctness_oracle(right, counts, oracle.penalty, oracle.sigma, oracle.never_right)


@dataclass
class ExitsAndHaltingStage(Stage):
    """Trains the exits and, with `halting`, the halting units."""

    options: DepthAdaptiveOptions = field(kw_only=True)
    halting: bool = field(kw_only=True)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        named = self.network.named_parameters()
        return [(name, p) for name, p in named if self.halting or not name.startswith(f"added.{PREDICTORS}.")]

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        options, net, units = self.options, self.network, halting_units(self.network)
        if not self.halting:
            loss = self._exit_loss(batch, None)
        else:
            output = run_all_exits(net, batch)
            oracle = Oracle(options.oracle, options.penalty, options.sigma, options.never_right)
            halting = halting_loss(net, units, output, oracle, options.detach)
            loss = self._exit_loss(batch, output) + options.alpha * halting
        backward(loss)
        return {"loss": loss.detach()}

    def _exit_loss(self, batch: Batch, output: ExitPass | None) -> Tensor:
        """Return the loss of the exits, aligned or mixed."""
        options, net = self.options, self.network
        if options.training == "mixed" and halting_units(net).by_word:
            return mixed_words_loss(net, batch, options.samples)
        output = output or run_all_exits(net, batch)
        if options.training == "mixed":
            return mixed_rows_loss(net, output, options.samples)
        losses = aligned_losses(net, output)
        return losses @ losses.new_tensor(exit_weights(net.depth, options.weights))
