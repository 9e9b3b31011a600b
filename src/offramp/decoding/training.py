"""Training of decoders: all exits at once (aligned) or along sampled exit sequences (mixed), then the halting unit.

Aligned: every token goes through every block, and the loss is averaged over exits with weights ω; one pass. Mixed: M
exit sequences are drawn, a token's state is copied up from its exit, and its loss is taken there; M passes. The exit
loss, weighted by α, is the cross-entropy of the deciding unit against an oracle that compares all exits; its
gradient reaches the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.decoding.decoder import decoder_of, vocabulary_heads
from offramp.decoding.exits import (
    DecoderOptions,
    DecoderSettings,
    SentenceUnit,
    block_uncertainties,
    decoder_policy,
    threshold_of_average_exit,
)
from offramp.decoding.teacher_forcing import TeacherForced, encode_source, teacher_force
from offramp.nn.batches import Batch, Data, build_batch
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
from offramp.nn.keys import HALTING_UNIT, VOCABULARIES
from offramp.nn.network import Network
from offramp.tasks import IGNORED_TARGET
from offramp.training.stage import Backward, Stage
from offramp.utils.vocabulary_loss import vocabulary_loss

LABEL_SMOOTHING = 0.1
ROWS_FOR_THRESHOLD = 128  # training rows by which the threshold of an epoch's score is found


@dataclass(frozen=True)
class ExitScores:
    """How well every exit predicts every token."""

    losses: list[Tensor]  # per exit: mean over tokens, labels smoothed
    nll: Tensor  # [exits, tokens] −log p of the target, no gradient
    correct: Tensor  # [exits, tokens] whether the target is the likeliest piece; empty if it was not computed


def score_exits(
    network: Network, forced: TeacherForced, smoothing: float, blocks: Sequence[int], correctness: bool = True
) -> ExitScores:
    """Score the vocabulary after each of these blocks; `correctness` costs one more pass over the scores."""
    heads = vocabulary_heads(network)
    losses, nll, correct = [], [], []
    for block in blocks:
        scores = heads[block - 1](forced.states[block - 1])
        loss, exit_nll = vocabulary_loss(scores, forced.targets, smoothing)
        losses.append(loss)
        nll.append(exit_nll)
        if correctness:
            of_target = scores.detach().gather(1, forced.targets[:, None]).squeeze(1)
            correct.append(of_target >= scores.detach().amax(1))
    return ExitScores(losses, torch.stack(nll), torch.stack(correct) if correct else torch.empty(0))


@dataclass
class AlignedStage(Stage):
    """Teacher forcing in which every exit of positive weight learns to predict every token."""

    weights: tuple[float, ...] = field(kw_only=True)  # one per block, summing to 1
    smoothing: float = LABEL_SMOOTHING

    def is_done_in(self, run: Mapping[str, Any]) -> bool:
        """Return whether a run trained the same exits the same way; a plain model has trained its last exit only."""
        same_heads = run["options"].get("tied") == (VOCABULARIES not in self.network.added)
        same_training = same_heads and run["options"].get("training") == self.name
        return self.fine_tuning and (self.weights[-1] == 1.0 or same_training)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        fixed = {f"model.{name}" for name in decoder_of(self.network).fixed}
        unit = f"added.{HALTING_UNIT}."
        return [(n, p) for n, p in self.network.named_parameters() if n not in fixed and not n.startswith(unit)]

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = self.token_loss(batch, encode_source(self.network, batch))
        backward(loss)
        return {"loss": loss.detach()}

    def token_loss(self, batch: Batch, source: Packed) -> Tensor:
        """Return the loss of predicting the target tokens, given the encoded source."""
        return self.weighted_loss(teacher_force(self.network, batch, source), correctness=False)[0]

    def weighted_loss(self, forced: TeacherForced, correctness: bool) -> tuple[Tensor, ExitScores]:
        """Return the weighted sum of the exits' losses, and the exits' scores."""
        blocks = [block for block, weight in enumerate(self.weights, 1) if weight > 0.0]
        scores = score_exits(self.network, forced, self.smoothing, blocks, correctness)
        weighted = [self.weights[block - 1] * loss for block, loss in zip(blocks, scores.losses, strict=True)]
        return torch.stack(weighted).sum(), scores


@dataclass
class MixedStage(AlignedStage):
    """Teacher forcing in which every token is predicted at one exit, drawn anew for each of M passes."""

    samples: int = 3

    def token_loss(self, batch: Batch, source: Packed) -> Tensor:
        total = source.states.new_zeros((), dtype=torch.float32)
        targets = batch.targets
        for _ in range(self.samples):
            exit_block = torch.randint(1, self.network.depth + 1, targets.shape, device=targets.device)
            forced = teacher_force(self.network, batch, source, exit_block)
            scores = self.scores_at(forced.states[-1], exit_block[targets != IGNORED_TARGET])
            total = total + vocabulary_loss(scores, forced.targets, self.smoothing)[0]
        return total / self.samples

    def scores_at(self, states: Tensor, exit_block: Tensor) -> Tensor:
        """Return vocabulary scores of every token by the head of its exit: [tokens, hidden] → [tokens, vocabulary]."""
        heads = vocabulary_heads(self.network)
        if all(head is heads[0] for head in heads):
            scores: Tensor = heads[0](states)
            return scores
        groups = [(exit_block == block).nonzero().squeeze(1) for block in range(1, self.network.depth + 1)]
        parts = [heads[place](states.index_select(0, group)) for place, group in enumerate(groups)]
        return torch.cat(parts).index_select(0, torch.cat(groups).argsort())


@dataclass
class HaltingStage(Stage):
    """Trains the tokens as `before` does, and the unit that decides their depth."""

    before: AlignedStage = field(kw_only=True)
    options: DecoderOptions = field(kw_only=True)
    rows: Batch | None = None  # by which the threshold of an epoch's score is found

    def prepare(self, data: Data, folder: Path) -> None:
        step = max(1, len(data.encoded) // ROWS_FOR_THRESHOLD)
        chosen = range(0, len(data.encoded), step)[:ROWS_FOR_THRESHOLD]
        self.rows = build_batch(self.network.task, data, chosen, seed=None).to(self.network.device)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        unit = [(n, p) for n, p in self.network.named_parameters() if n.startswith(f"added.{HALTING_UNIT}.")]
        return [*self.before.trainable(), *unit]

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        source = encode_source(self.network, batch)
        forced = teacher_force(self.network, batch, source)
        if isinstance(self.before, MixedStage):
            token_loss = self.before.token_loss(batch, source)
            with torch.no_grad():
                scores = score_exits(self.network, forced, 0.0, range(1, self.network.depth + 1))
        else:
            token_loss, scores = self.before.weighted_loss(forced, correctness=True)
        exit_loss = self._exit_loss(forced, scores)
        loss = token_loss + self.options.alpha * exit_loss
        backward(loss)
        return {"loss": loss.detach(), "exit": exit_loss.detach()}

    def policy(self) -> Policy:
        """Return the rule for dev rows: the threshold whose average exit is midway between the first and the last.

        At the published settings (stop if that is more likely than not; the likeliest depth) a unit in training may
        send nearly all tokens to one exit, and then epochs would be chosen by that exit alone.
        """
        assert self.rows is not None
        self.network.eval()
        with torch.no_grad():
            forced = teacher_force(self.network, self.rows, encode_source(self.network, self.rows))
            uncertainty = block_uncertainties(self.network, forced).float()
        middle = (1 + self.network.depth) / 2
        return decoder_policy(self.network, DecoderSettings(threshold_of_average_exit(uncertainty, middle)))

    def _exit_loss(self, forced: TeacherForced, scores: ExitScores) -> Tensor:
        o, unit = self.options, self.network.added[HALTING_UNIT]
        if o.detach:
            forced = forced.detached()
        values = scores.correct.float() if o.oracle == "correctness" else -scores.nll
        if isinstance(unit, SentenceUnit):
            return multinomial_loss(unit(forced.source.mean()), row_oracle(values, forced.lengths, o.penalty))
        if o.oracle == "correctness":
            oracle = correctness_oracle(scores.correct, forced.lengths, o.penalty, o.sigma, o.never_right)
        else:
            oracle = likelihood_oracle(scores.nll, forced.lengths, o.penalty, o.sigma)
        if isinstance(unit, GeometricExitUnit):
            stops = [unit(place, states) for place, states in enumerate(forced.states[:-1])]
            return geometric_loss(torch.stack(stops, dim=1), oracle)
        assert isinstance(unit, MultinomialExitUnit)
        return multinomial_loss(unit(forced.states[0]), oracle)


def translation_stages(network: Network, head_lr: float) -> list[Stage]:
    """Return ordinary training of a translation model: its last exit alone."""
    weights = (*(0.0 for _ in range(network.depth - 1)), 1.0)
    return [AlignedStage(network, "translate", head_lr, fine_tuning=True, weights=weights)]


def decoder_stages(network: Network, options: DecoderOptions) -> list[Stage]:
    """Return the training of all exits, then of the unit that decides, if there is one to learn."""
    weights = tuple(exit_weights(network.depth, options.weights))
    common = (network, options.training, options.head_lr, True)
    if options.training == "mixed":
        samples = options.samples
        first: AlignedStage = MixedStage(*common, weights=weights, smoothing=options.smoothing, samples=samples)
    else:
        first = AlignedStage(*common, weights=weights, smoothing=options.smoothing)
    if options.form == "threshold":
        return [first]
    second = HaltingStage(network, "exits and halting", options.head_lr, before=first, options=options)
    return [second] if options.together else [first, second]
