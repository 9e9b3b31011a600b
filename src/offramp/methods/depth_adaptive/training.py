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
from offramp.methods.depth_adaptive.units import Halting, halting_units
from offramp.nn.batches import Batch
from offramp.nn.exit_oracles import best_exit, geometric_loss, multinomial_loss, smooth_over_neighbours
from offramp.nn.exit_policies import exit_weights
from offramp.nn.keys import PREDICTORS
from offramp.nn.network import Network
from offramp.nn.words import token_and_row_depths, words_of
from offramp.tasks import IGNORED_TARGET
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers
from offramp.training.stage import Backward, Stage


class Oracle(NamedTuple):
    """Who teaches the units."""

    kind: Literal["correctness", "likelihood"]
    penalty: float  # λ
    sigma: float


class Pass(NamedTuple):
    """One batch through all layers, and what every exit says of it."""

    batch: Batch
    made: LayerStates
    logits: list[Tensor]  # exits after layer 1…L


def through(network: Network, batch: Batch) -> Pass:
    """All layers, all exits."""
    made = forward_all_layers(network.encoder, batch.packed)
    return Pass(batch, made, [network(layer, made.after(layer)) for layer in range(1, network.depth + 1)])


def aligned_losses(network: Network, seen: Pass) -> Tensor:
    """The task's loss of each exit, every state computed by its own layer."""  # [exits]
    lengths = seen.batch.packed.lengths.to(network.device)
    return torch.stack([network.task.loss(said, seen.batch.targets, lengths) for said in seen.logits])


def mixed_rows_loss(network: Network, seen: Pass, samples: int) -> Tensor:
    """The mean loss along sampled exits, one exit a row and sample: rows leave, so no state is ever missing."""
    lengths = seen.batch.packed.lengths.to(network.device)
    each = torch.stack([network.task.loss(said, seen.batch.targets, lengths, "rows") for said in seen.logits])
    drawn = torch.randint(each.shape[0], (samples, each.shape[1]), device=each.device)
    return each.gather(0, drawn).mean()


def mixed_words_loss(network: Network, batch: Batch, samples: int) -> Tensor:
    """The mean loss along sampled exits, one exit a word and sample: words that stopped are copied upward."""
    packed, losses = batch.packed, []
    words = words_of(packed)
    for _ in range(samples):
        drawn = torch.randint(1, network.depth + 1, words.key.shape, device=words.key.device)
        depth, _ = token_and_row_depths(words, drawn, packed, network.depth)
        made = forward_all_layers(network.encoder, packed, ForwardHooks(gate=partial(_going, depth)))
        for layer in range(1, network.depth + 1):
            own = ((batch.targets != IGNORED_TARGET) & (depth == layer)).nonzero().squeeze(1)
            some = Packed(made.states[layer].index_select(0, own), torch.tensor([len(own)]))
            said = network(layer, some).float()
            losses.append(F.cross_entropy(said, batch.targets[own], reduction="sum"))
    return torch.stack(losses).sum() / (samples * max(1, int((batch.targets != IGNORED_TARGET).sum())))


def _going(depth: Tensor, layer: int, _: LayerStates) -> Tensor:
    return (depth >= layer).float()


def halting_loss(network: Network, units: Halting, seen: Pass, oracle: Oracle, detach: bool) -> Tensor:
    """Cross-entropy of the units' exit distribution against the oracle's exit."""
    place = right_exits(network, seen, oracle, units.by_word)
    asked = seen.batch.targets != IGNORED_TARGET if units.by_word else None

    def ask(layer: int) -> Tensor:
        states = seen.made.after(layer)
        states = states.with_states(network.encoder.final(states.states.detach() if detach else states.states))
        return units.ask(layer, states.mean() if asked is None else states.states[asked])

    if units.form == "multinomial":
        return multinomial_loss(ask(1), place)
    return geometric_loss(torch.stack([ask(layer) for layer in range(1, network.depth)], dim=1), place)


@torch.no_grad()
def right_exits(network: Network, seen: Pass, oracle: Oracle, by_word: bool) -> Tensor:
    """The oracle's exit for each row, or each word with an answer: places 0…L−1."""
    targets, lengths = seen.batch.targets, seen.batch.packed.lengths.to(network.device)
    task, likely = network.task, oracle.kind == "likelihood"
    if not by_word:
        if likely:
            worth = torch.stack([-task.loss(said, targets, lengths, "rows") for said in seen.logits])
        else:
            worth = torch.stack([1.0 - task.example_error(said, targets, lengths) for said in seen.logits])
        return best_exit(worth, oracle.penalty)
    asked = targets != IGNORED_TARGET
    answers, truth = [said[asked].float() for said in seen.logits], targets[asked]
    if likely:
        worth = torch.stack([-F.cross_entropy(said, truth, reduction="none") for said in answers])
    else:
        worth = torch.stack([(said.argmax(1) == truth).float() for said in answers])
    counts = torch.bincount(seen.batch.packed.row_of_token[asked], minlength=len(lengths))
    return best_exit(smooth_over_neighbours(worth, counts, oracle.sigma), oracle.penalty)


@dataclass
class Adaptive(Stage):
    """Exits learn, and (where `halting`) the units with them."""

    options: DepthAdaptiveOptions = field(kw_only=True)
    halting: bool = field(kw_only=True)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        named = self.network.named_parameters()
        return [(name, p) for name, p in named if self.halting or not name.startswith(f"added.{PREDICTORS}.")]

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        options, net, units = self.options, self.network, halting_units(self.network)
        if not self.halting:
            loss = self._exits(batch, None)
        else:
            seen, oracle = through(net, batch), Oracle(options.oracle, options.penalty, options.sigma)
            loss = self._exits(batch, seen) + options.alpha * halting_loss(net, units, seen, oracle, options.detach)
        backward(loss)
        return {"loss": loss.detach()}

    def _exits(self, batch: Batch, seen: Pass | None) -> Tensor:
        """The loss of the exits, aligned or mixed."""
        options, net = self.options, self.network
        if options.training == "mixed" and halting_units(net).by_word:
            return mixed_words_loss(net, batch, options.samples)
        seen = seen or through(net, batch)
        if options.training == "mixed":
            return mixed_rows_loss(net, seen, options.samples)
        each = aligned_losses(net, seen)
        return each @ each.new_tensor(exit_weights(net.depth, options.weights))
