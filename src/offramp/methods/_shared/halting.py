"""Halting units on encoders: what reads states, who teaches it, and training along sampled exits."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.core.packed import Packed
from offramp.nn.batches import Batch
from offramp.nn.exit_oracles import Geometric, Multinomial, best_exit, geometric_loss, multinomial_loss, smoothed
from offramp.nn.network import Network
from offramp.nn.words import spread_out, words_of
from offramp.training.forward import Soft, Trace, trace
from offramp.training.losses import IGNORED

Form = Literal["multinomial", "geometric", "threshold"]


class Halting(nn.ModuleDict):
    """The units by layer: one after layer 1 that plans, or one at every exit but the last that says stop or go on."""

    def __init__(self, form: Form, by_word: bool, hidden: int, depth: int) -> None:
        super().__init__()
        self.form, self.by_word = form, by_word  # by_word: every word has its own depth, else every row
        if form == "multinomial":
            self["1"] = Multinomial(hidden, depth)
        elif form == "geometric":
            self.update({str(layer): Geometric(hidden, exits=2) for layer in range(1, depth)})

    def ask(self, layer: int, states: Tensor) -> Tensor:
        """Logits over all exits [n, exits], or of stopping here [n]."""
        unit = self[str(layer)]
        said: Tensor = unit(states) if self.form == "multinomial" else unit(0, states)
        return said


class Oracle(NamedTuple):
    """Who teaches the units."""

    kind: Literal["correctness", "likelihood"]
    penalty: float  # λ
    sigma: float


class Pass(NamedTuple):
    """One batch through all layers, and what every exit says of it."""

    batch: Batch
    made: Trace
    logits: list[Tensor]  # exits after layer 1…L


def through(network: Network, batch: Batch) -> Pass:
    """All layers, all exits."""
    made = trace(network.encoder, batch.packed)
    return Pass(batch, made, [network(layer, made.at(layer)) for layer in range(1, network.depth + 1)])


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
        depth, _ = spread_out(words, drawn, packed, network.depth)
        made = trace(network.encoder, packed, Soft(gate=partial(_going, depth)))
        for layer in range(1, network.depth + 1):
            own = ((batch.targets != IGNORED) & (depth == layer)).nonzero().squeeze(1)
            some = Packed(made.states[layer].index_select(0, own), torch.tensor([len(own)]))
            said = network(layer, some).float()
            losses.append(F.cross_entropy(said, batch.targets[own], reduction="sum"))
    return torch.stack(losses).sum() / (samples * max(1, int((batch.targets != IGNORED).sum())))


def _going(depth: Tensor, layer: int, _: Trace) -> Tensor:
    return (depth >= layer).float()


def halting_loss(network: Network, units: Halting, seen: Pass, oracle: Oracle, detach: bool) -> Tensor:
    """Cross-entropy of the units' exit distribution against the oracle's exit."""
    place = right_exits(network, seen, oracle, units.by_word)
    asked = seen.batch.targets != IGNORED if units.by_word else None

    def ask(layer: int) -> Tensor:
        states = seen.made.at(layer)
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
    asked = targets != IGNORED
    answers, truth = [said[asked].float() for said in seen.logits], targets[asked]
    if likely:
        worth = torch.stack([-F.cross_entropy(said, truth, reduction="none") for said in answers])
    else:
        worth = torch.stack([(said.argmax(1) == truth).float() for said in answers])
    counts = torch.bincount(seen.batch.packed.row_of_token[asked], minlength=len(lengths))
    return best_exit(smoothed(worth, counts, oracle.sigma), oracle.penalty)
