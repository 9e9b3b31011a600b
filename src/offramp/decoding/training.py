"""Training exits of decoders: all of them at once (aligned) or along sampled exit sequences (mixed), then their unit.

Aligned: every word through every block, the loss averaged over exits with weights ω; one pass. Mixed: M exit sequences
are drawn, a word's state is copied up from its exit, and it answers there; M passes. Then the exit loss, weighted α:
cross-entropy of the deciding unit against an oracle that saw all exits, back into the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.decoding.exits import DecoderOptions, DecoderSettings, SentenceUnit, decoder_policy
from offramp.decoding.teacher_forcing import IGNORED, UNIT, Lesson, Taught, decoder_of, exits
from offramp.decoding.vocabulary_loss import word_loss
from offramp.nn.batches import Batch
from offramp.nn.exit_oracles import (
    GeometricExitUnit,
    MultinomialExitUnit,
    correctness_oracle,
    geometric_loss,
    likelihood_oracle,
    multinomial_loss,
    row_oracle,
)
from offramp.nn.exit_policies import exit_weights
from offramp.nn.network import Network
from offramp.training.stage import Backward, Stage

SMOOTHING = 0.1


@dataclass(frozen=True)
class Marks:
    """How every exit did on every word."""

    loss: list[Tensor]  # per exit, mean over words, labels smoothed
    misses: Tensor  # [exits, words] −log p of the right piece, no gradient
    right: Tensor  # [exits, words] whether it was the likeliest; empty where nobody asked


def marks(network: Network, taught: Taught, smoothing: float, wanted: Sequence[int], judged: bool = True) -> Marks:
    """Score the vocabulary after each of these blocks; whether words are right costs one more look at it."""
    losses, misses, right = [], [], []
    for block in wanted:
        scores = exits(network)[block - 1](taught.words[block - 1])
        loss, missed = word_loss(scores, taught.targets, smoothing)
        losses.append(loss)
        misses.append(missed)
        if judged:
            right.append(scores.detach().gather(1, taught.targets[:, None]).squeeze(1) >= scores.detach().amax(1))
    return Marks(losses, torch.stack(misses), torch.stack(right) if right else torch.empty(0))


@dataclass
class Speaking(Stage):
    """Sentences taught word by word; every exit of positive weight learns to say the next word."""

    weights: tuple[float, ...] = field(kw_only=True)  # one per block, summing to 1
    smoothing: float = SMOOTHING

    def is_done_in(self, run: Mapping[str, Any]) -> bool:
        """Exits are trained by runs that trained them the same way; a plain model knows its last one only."""
        return self.fine_tuning and (self.weights[-1] == 1.0 or run["options"].get("training") == self.name)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        fixed = {f"model.{name}" for name in decoder_of(self.network).fixed}
        unit = f"added.{UNIT}."
        return [(n, p) for n, p in self.network.named_parameters() if n not in fixed and not n.startswith(unit)]

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        lesson = Lesson(self.network, batch)
        loss = self.words_loss(lesson, lesson.source())
        backward(loss)
        return {"loss": loss.detach()}

    def words_loss(self, lesson: Lesson, source: Packed) -> Tensor:
        """What the words lose."""
        return self._weighed(lesson.taught(source), judged=False)[0]

    def _weighed(self, taught: Taught, judged: bool) -> tuple[Tensor, Marks]:
        wanted = [block for block, weight in enumerate(self.weights, 1) if weight > 0.0]
        made = marks(self.network, taught, self.smoothing, wanted, judged)
        return torch.stack([self.weights[b - 1] * loss for b, loss in zip(wanted, made.loss, strict=True)]).sum(), made


@dataclass
class Mixed(Speaking):
    """Every word answers at an exit of its own, drawn anew for each of M passes."""

    samples: int = 3

    def words_loss(self, lesson: Lesson, source: Packed) -> Tensor:
        total = source.states.new_zeros((), dtype=torch.float32)
        targets = lesson.batch.targets
        for _ in range(self.samples):
            leave = torch.randint(1, self.network.depth + 1, targets.shape, device=targets.device)
            taught = lesson.taught(source, leave)
            scores = self._said(taught.words[-1], leave[targets != IGNORED])
            total = total + word_loss(scores, taught.targets, self.smoothing)[0]
        return total / self.samples

    def _said(self, words: Tensor, leave: Tensor) -> Tensor:
        scores = exits(self.network)
        if all(one is scores[0] for one in scores):
            said: Tensor = scores[0](words)
            return said
        parts = [(leave == block).nonzero().squeeze(1) for block in range(1, self.network.depth + 1)]
        each = [scores[b](words.index_select(0, part)) for b, part in enumerate(parts)]
        return torch.cat(each).index_select(0, torch.cat(parts).argsort())


@dataclass
class Deciding(Stage):
    """The words as before, and the unit that decides their depth."""

    before: Speaking = field(kw_only=True)
    options: DecoderOptions = field(kw_only=True)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        unit = [(n, p) for n, p in self.network.named_parameters() if n.startswith(f"added.{UNIT}.")]
        return [*self.before.trainable(), *unit]

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        lesson = Lesson(self.network, batch)
        source = lesson.source()
        taught = lesson.taught(source)
        if isinstance(self.before, Mixed):
            words = self.before.words_loss(lesson, source)
            with torch.no_grad():
                made = marks(self.network, taught, 0.0, range(1, self.network.depth + 1))
        else:
            words, made = self.before._weighed(taught, judged=True)
        leaving = self._exit_loss(taught, made)
        loss = words + self.options.alpha * leaving
        backward(loss)
        return {"loss": loss.detach(), "exit": leaving.detach()}

    def policy(self) -> Policy:
        """Dev rows leave as published: where the unit says so more likely than not, or at the likeliest depth."""
        block_by_block = isinstance(self.network.added[UNIT], GeometricExitUnit)
        return decoder_policy(self.network, DecoderSettings(0.5) if block_by_block else DecoderSettings(argmax=True))

    def _exit_loss(self, taught: Taught, made: Marks) -> Tensor:
        o, unit = self.options, self.network.added[UNIT]
        if o.detach:
            taught = taught.detached()
        worth = made.right.float() if o.oracle == "correctness" else -made.misses
        if isinstance(unit, SentenceUnit):
            return multinomial_loss(unit(taught.source.mean()), row_oracle(worth, taught.lengths, o.penalty))
        if o.oracle == "correctness":
            oracle = correctness_oracle(made.right, taught.lengths, o.penalty, o.sigma)
        else:
            oracle = likelihood_oracle(made.misses, taught.lengths, o.penalty, o.sigma)
        if isinstance(unit, GeometricExitUnit):
            stops = [unit(place, states) for place, states in enumerate(taught.words[:-1])]
            return geometric_loss(torch.stack(stops, dim=1), oracle)
        assert isinstance(unit, MultinomialExitUnit)
        return multinomial_loss(unit(taught.words[0]), oracle)


def plain_stages(network: Network, head_lr: float) -> list[Stage]:
    """Ordinary training of a translation model: its last exit alone."""
    weights = (*(0.0 for _ in range(network.depth - 1)), 1.0)
    return [Speaking(network, "translate", head_lr, fine_tuning=True, weights=weights)]


def decoder_stages(network: Network, options: DecoderOptions) -> list[Stage]:
    """All exits, then the unit that decides, if there is one to learn."""
    weights = tuple(exit_weights(network.depth, options.weights))
    given = (network, options.training, options.head_lr)
    if options.training == "mixed":
        first: Speaking = Mixed(*given, True, weights=weights, smoothing=options.smoothing, samples=options.samples)
    else:
        first = Speaking(*given, True, weights=weights, smoothing=options.smoothing)
    if options.form == "threshold":
        return [first]
    second = Deciding(network, "exits and halting", options.head_lr, before=first, options=options)
    return [second] if options.together else [first, second]
