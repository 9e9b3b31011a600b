"""Exits of decoders (Elbayad et al. 2020): who decides how many blocks a word goes through, and how sure they are.

Four deciders: the exit's own confidence (nothing is added), a unit that reads the source and plans whole sentences, one
that reads a word after the first block and plans its depth (multinomial), one that says stop or go on after every block
(geometric-like). Each is read as doubt, 0 sure … 1: one minus the largest probability, the probability that a greater
depth is needed, or that of going on. A word leaves at the first block where doubt is below the threshold, of which
there is one, or one per block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from offramp.core.cost import HeadCost
from offramp.core.policy import Policy
from offramp.decoding.teacher_forcing import OWN, UNIT, Taught, decoder_of, exits, unit_of
from offramp.errors import OfframpError
from offramp.nn.exit_oracles import GeometricExitUnit, MultinomialExitUnit
from offramp.nn.network import Network


@dataclass(frozen=True)
class DecoderOptions:
    """How exits and the units that choose among them are built and trained; fixed once trained."""

    form: Literal["multinomial", "geometric", "threshold", "sequence"] = "geometric"  # sequence: decoders only
    oracle: Literal["correctness", "likelihood"] = "correctness"
    penalty: float = 0.1  # λ: what a layer more must be worth
    sigma: float = 0.0  # smoothing over neighbouring words; 0: none
    training: Literal["aligned", "mixed"] = "aligned"
    samples: int = 3  # mixed: exit sequences drawn for a batch
    alpha: float = 1.0  # weight of the units' loss
    detach: bool = False  # units do not pull on the model
    together: bool = False  # units learn from the start, in one stage
    weights: Literal["index", "uniform"] = "uniform"
    tied: bool = True  # decoders: all exits share the model's vocabulary; else each below the last has its own
    smoothing: float = 0.1  # decoders: of labels
    head_lr: float = 2e-3

    def __post_init__(self) -> None:
        for name, fine, fix in (
            ("penalty", self.penalty >= 0.0, "0 or more, e.g. 0.1"),
            ("sigma", self.sigma >= 0.0, "0 or more, e.g. 1"),
            ("samples", self.samples >= 1, "1 or more"),
            ("alpha", self.alpha > 0.0, "a number above 0, e.g. 1"),
            ("smoothing", 0.0 <= self.smoothing < 1.0, "0 up to below 1, e.g. 0.1"),
            ("head_lr", 0.0 < self.head_lr < 1.0, "e.g. 0.002"),
        ):
            if not fine:
                raise OfframpError("options of depth_adaptive", f"{name}={getattr(self, name)}", f"use {fix}")


@dataclass(frozen=True)
class DecoderSettings:
    """Stop where the doubt that one should is below the threshold; 0 never stops early."""

    threshold: float = 0.0
    argmax: bool = False  # multinomial, sequence: stop at the likeliest exit, whatever the threshold
    thresholds: tuple[float, ...] = ()  # decoders: one for every block but the last, in place of the one
    depth: int = 0  # decoders: every word leaves after this block, whatever anybody says; 0: they decide
    beams: int = 0  # decoders: hypotheses; 0: as many as the model's generation configuration says

    def __post_init__(self) -> None:
        for value in (self.threshold, *self.thresholds):
            if not 0.0 <= value <= 1.0:
                given, fix = f"threshold={value}", "use 0 (never stop early) up to 1, e.g. 0.5"
                raise OfframpError("a threshold on the doubt about stopping", given, fix)
        for name in ("depth", "beams"):
            if getattr(self, name) < 0:
                raise OfframpError(f"a number of {name}", f"{name}={getattr(self, name)}", "use 0 (as it is), 1, 2, …")


class SentenceUnit(MultinomialExitUnit):
    """A softmax over depths that reads the mean of the source once."""

    def __init__(self, hidden: int, depth: int) -> None:
        super().__init__(hidden, depth)
        self.cost = HeadCost(hidden * depth, 0)


def decoder_modules(network: Network, options: DecoderOptions) -> nn.ModuleDict:
    """The unit that decides, and vocabularies of the exits where they do not share one."""
    decoder = decoder_of(network)
    made = nn.ModuleDict()
    if options.form == "sequence":
        made[UNIT] = SentenceUnit(decoder.hidden, decoder.depth)
    elif options.form == "multinomial":
        made[UNIT] = MultinomialExitUnit(decoder.hidden, decoder.depth)
    elif options.form == "geometric":
        made[UNIT] = GeometricExitUnit(decoder.hidden, decoder.depth)
    if not options.tied:
        names = [str(block) for block in range(1, decoder.depth)]
        made[OWN] = nn.ModuleDict({name: nn.Linear(decoder.hidden, decoder.vocabulary) for name in names})
    return made


class FixedDepth(Policy):
    """Every word leaves after the same block."""

    free: ClassVar[bool] = True

    def __init__(self, depth: int, beams: int = 0) -> None:
        self.depth, self.beams = depth, beams

    def sentence_depths(self, source: Tensor) -> Tensor | None:
        return torch.full((source.shape[0],), self.depth)


class DoubtfulPolicy(Policy):
    """Thresholds on doubt; subclasses say whose."""

    def __init__(self, network: Network, settings: DecoderSettings) -> None:
        self.depth, self.beams, self.argmax = network.depth, settings.beams, settings.argmax
        self.unit = unit_of(network)
        if settings.thresholds and len(settings.thresholds) != self.depth - 1:
            asked = f"one threshold for each of {self.depth - 1} blocks below the last"
            raise OfframpError(asked, f"{len(settings.thresholds)}", "give as many as there are, or calibrate again")
        self.limits = settings.thresholds or (settings.threshold,) * (self.depth - 1)

    def planned(self, unit: MultinomialExitUnit, states: Tensor) -> Tensor | None:
        """Depths by a softmax over them."""
        if self.argmax:
            likeliest: Tensor = unit(states).argmax(1)
            return likeliest + 1
        if not any(self.limits):
            return None
        return first_below(tail(unit(states)).T, torch.tensor(self.limits, device=states.device))


class SequencePolicy(DoubtfulPolicy):
    """Plans whole sentences from the mean of the source."""

    def sentence_depths(self, source: Tensor) -> Tensor | None:
        assert isinstance(self.unit, SentenceUnit)
        return self.planned(self.unit, source)


class MultinomialPolicy(DoubtfulPolicy):
    """Plans a word's depth after the first block."""

    def word_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        assert isinstance(self.unit, MultinomialExitUnit)
        return self.planned(self.unit, states) if block == 1 else None


class GeometricPolicy(DoubtfulPolicy):
    """Stop or go on, block by block."""

    def __init__(self, network: Network, settings: DecoderSettings) -> None:
        super().__init__(network, settings)
        assert isinstance(self.unit, GeometricExitUnit)
        weight, bias = self.unit.project.weight.detach(), self.unit.project.bias.tolist()
        rows = [0 if self.unit.shared else place for place in range(self.depth - 1)]
        least = [math.log((1.0 - t) / t) if t > 0.0 and t < 1.0 else -math.inf for t in self.limits]  # logits
        self.ask = [(weight[row], limit - bias[row]) for row, limit in zip(rows, least, strict=True)]

    def word_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        if self.limits[block - 1] == 0.0:
            return None
        weight, least = self.ask[block - 1]
        return torch.where(torch.mv(states, weight) > least, block, self.depth)


class ConfidencePolicy(DoubtfulPolicy):
    """Whatever the exit's own vocabulary says, if it is sure of it."""

    def word_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        if self.limits[block - 1] == 0.0:
            return None
        return torch.where(least_confidence(logits()) < self.limits[block - 1], block, self.depth)


def decoder_policy(network: Network, settings: DecoderSettings) -> Policy:
    """The policy for whichever unit the network has."""
    if settings.depth:
        if settings.depth > network.depth:
            raise OfframpError("a depth", f"depth={settings.depth}", f"this model has {network.depth} blocks")
        return FixedDepth(settings.depth, settings.beams)
    unit = unit_of(network)
    if settings.argmax and not isinstance(unit, MultinomialExitUnit):
        given = "argmax=true for exits that decide block by block"
        raise OfframpError("the likeliest depth", given, "use form=multinomial or sequence, or a threshold")
    if isinstance(unit, GeometricExitUnit):
        return GeometricPolicy(network, settings)
    if isinstance(unit, SentenceUnit):
        return SequencePolicy(network, settings)
    return MultinomialPolicy(network, settings) if unit is not None else ConfidencePolicy(network, settings)


def least_confidence(logits: Tensor) -> Tensor:
    """One minus the largest probability: [n, vocabulary] → [n]."""
    return 1.0 - (logits.amax(-1) - logits.logsumexp(-1)).exp()


def tail(logits: Tensor) -> Tensor:
    """The probability of needing more than each depth but the last: [n, depths] → [n, depths − 1]."""
    return (1.0 - logits.float().softmax(-1).cumsum(-1)[:, :-1]).clamp(min=0.0)


def first_below(uncertainty: Tensor, limits: Tensor) -> Tensor:
    """The first block whose doubt is below its limit, else the last: [blocks − 1, n], [blocks − 1] → depths [n]."""
    blocks = torch.arange(1, uncertainty.shape[0] + 1, device=uncertainty.device)[:, None]
    return torch.where(uncertainty < limits[:, None], blocks, uncertainty.shape[0] + 1).amin(0)


def uncertainties(network: Network, taught: Taught) -> Tensor:
    """The doubt of every taught word after every block but the last."""  # [blocks − 1, words]
    unit = unit_of(network)
    below = taught.words[:-1]
    if isinstance(unit, GeometricExitUnit):
        return torch.stack([1.0 - unit(place, states).float().sigmoid() for place, states in enumerate(below)])
    if isinstance(unit, SentenceUnit):
        return tail(unit(taught.source.mean())).repeat_interleave(taught.lengths.to(network.device), 0).T
    if unit is not None:
        return tail(unit(below[0])).T
    scored = zip(exits(network), below, strict=False)
    return torch.stack([least_confidence(score(states).float()) for score, states in scored])
