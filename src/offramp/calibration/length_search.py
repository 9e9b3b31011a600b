"""Evolutionary search for lengths (Kim and Cho 2021): which shares of its tokens a row should keep after each layer.

The first population drops the same part at every layer, evenly spread in cost, or keeps every token up to a layer and
few from there on. Each iteration takes the configurations on the Pareto front and the best in every range of costs,
mutates some and averages pairs of them; no child is tried that would keep just as many tokens of every row in every
layer as something tried. Where the method is a pair, a configuration is recorded once and the exits' thresholds are
searched under it, so that one front covers both. An iteration's children depend on the seed, its number and what was
found before it: a search that was interrupted goes on to the same result.

Modifications from the published code: costs are those of the real rows, not of one padded to the maximum; a dominated
configuration leaves the front however dear it is; when nothing new can be bred the search ends. Ours too: cliffs in the
first population, and parents from every range of costs, since fronts of few rows are short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from offramp.calibration.calibrate import pair_points_at_lengths
from offramp.calibration.grids import cliff_lengths, constant_length_grid, length_macs
from offramp.calibration.subject import CalibrationContext, Predictions, Settings, point_evaluator
from offramp.errors import OfframpError
from offramp.inference.operating_points import OperatingPoint, pareto_front
from offramp.methods import Method, PairMethod
from offramp.methods._shared.lengths import counts
from offramp.nn.setting_space import LengthSpace

Gene = tuple[int, ...]  # kept after each layer, in hundredths of the row's tokens
WHOLE = 100
FIRST = 20  # configurations between the shortest and the longest in the first population
RANGES = 16  # of costs, whose best may breed
PATIENCE = 20  # attempts for each child that is wanted


@dataclass(frozen=True)
class SearchPlan:
    """How long to search and how widely."""

    iterations: int = 30
    mutations: int = 30
    crossovers: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 0:
            given = ", ".join(f"{name}={value}" for name, value in asdict(self).items())
            raise OfframpError("a plan for the search", given, "give 0 or more of each")


@dataclass(frozen=True)
class TriedConfiguration:
    """A configuration that was tried, and what it did on the search rows: one point, or with exits several."""

    gene: Gene
    iteration: int
    points: tuple[OperatingPoint, ...]


@dataclass(frozen=True)
class SearchProgress:
    """What is known after each configuration."""

    found: list[TriedConfiguration]
    best: list[OperatingPoint]  # the front, cheapest first
    left: int  # configurations this iteration has yet to try
    iteration: int


def length_space(method: Method) -> LengthSpace:
    """The lengths that a method lets be searched, or a clear answer why not."""
    space = method.length.space if isinstance(method, PairMethod) else method.space
    if not isinstance(space, LengthSpace):
        raise OfframpError(
            "a search over lengths",
            f"a run of {method.name!r}, which has none to choose",
            "train with --method length_adaptive (or length_adaptive+branchynet …); others: `offramp calibrate`",
        )
    return space


def search_lengths(
    subject: CalibrationContext,
    plan: SearchPlan,
    known: Sequence[TriedConfiguration],
    say: Callable[[SearchProgress], None],
) -> list[TriedConfiguration]:
    """Everything tried, in order. `known` is what an interrupted search had."""
    found, full = {one.gene: one for one in known}, subject.predictions(subject.run({}, None))
    for iteration in range(plan.iterations + 1):
        before = [one for one in found.values() if one.iteration < iteration]
        genes = list(_first(subject)) if iteration == 0 else breed(subject, before, plan, iteration)
        if not genes:
            break
        waiting = [gene for gene in genes if gene not in found]
        for number, gene in enumerate(waiting, start=1):
            found[gene] = TriedConfiguration(gene, iteration, evaluate_configuration(subject, gene, full))
            tried = list(found.values())
            best = [point for _, point in configuration_front(tried, subject.network.task.higher_is_better)]
            say(SearchProgress(tried, best, len(waiting) - number, iteration))
    return sorted(found.values(), key=lambda one: one.iteration)


def configuration_front(
    found: Sequence[TriedConfiguration], higher_is_better: bool
) -> list[tuple[TriedConfiguration, OperatingPoint]]:
    """What no other beats on both cost and score, cheapest first."""
    owner = {id(point): one for one in found for point in one.points}
    points = [point for one in found for point in one.points]
    dearest = replace(points[0], mac_share=float("inf"))  # stands in for the full model, which may be dominated here
    return [(owner[id(point)], point) for point in pareto_front(points, dearest, higher_is_better)[:-1]]


def promising_configurations(
    found: Sequence[TriedConfiguration], higher_is_better: bool
) -> list[tuple[TriedConfiguration, OperatingPoint]]:
    """The front and the best of every range of costs, cheapest first: on few rows one lucky point drives all others off
    the front, and what nobody is bred from is never found."""
    sign, best = 1.0 if higher_is_better else -1.0, dict[int, tuple[TriedConfiguration, OperatingPoint]]()
    everything = [(one, point) for one in found for point in one.points]
    costs = [point.mac_share for _, point in everything]
    wide = (max(costs) - min(costs)) / RANGES or 1.0
    for one, point in sorted(everything, key=lambda item: (-sign * item[1].score, item[1].mac_share)):
        best.setdefault(int((point.mac_share - min(costs)) / wide), (one, point))
    both = [*configuration_front(found, higher_is_better), *best.values()]
    return sorted({id(point): (one, point) for one, point in both}.values(), key=lambda item: item[1].mac_share)


def kept_shares(gene: Gene) -> tuple[float, ...]:
    """A configuration as the method's setting."""
    return tuple(part / WHOLE for part in gene)


def evaluate_configuration(subject: CalibrationContext, gene: Gene, full: Predictions) -> tuple[OperatingPoint, ...]:
    """What a configuration does on the subject's rows; with exits, at settings spread over their front. `full`: what
    the full model answers to these rows."""
    lengths: Settings = {length_space(subject.method).name: kept_shares(gene)}
    if not isinstance(subject.method, PairMethod):
        return (point_evaluator(subject, None, full)(lengths),)
    return tuple(pair_points_at_lengths(subject, lengths, full))


def _first(subject: CalibrationContext) -> Iterator[Gene]:
    """Constant drops from the shortest to all tokens, then cliffs; equal ones once."""
    steps = [*constant_length_grid(subject.network, _lengths(subject), FIRST), *cliff_lengths(subject.network, FIRST)]
    genes = [tuple(int(np.ceil(share * WHOLE - 1e-9)) for share in step) for step in steps]
    yield from dict.fromkeys([*genes, (WHOLE,) * subject.network.depth])


def _lengths(subject: CalibrationContext) -> torch.Tensor:
    return torch.tensor([len(e.ids) for e in subject.data.encoded])


def breed(
    subject: CalibrationContext, before: list[TriedConfiguration], plan: SearchPlan, iteration: int
) -> list[Gene]:
    """New configurations bred from promising ones, none dearer than all tokens or cheaper than the shortest trained."""
    rng = np.random.default_rng((plan.seed, iteration))
    parents = list(
        dict.fromkeys(one.gene for one, _ in promising_configurations(before, subject.network.task.higher_is_better))
    )
    lengths = _lengths(subject)
    known = {_effect(one.gene, lengths) for one in before}
    least = length_macs(subject.network, kept_shares(before[0].gene), lengths).sum()  # the shortest was tried first

    def fresh(count: int, breed: Callable[[], Gene]) -> None:
        wanted = len(made) + count
        for _ in range(PATIENCE * count):
            gene = breed()
            effect = _effect(gene, lengths)
            if effect not in known and length_macs(subject.network, kept_shares(gene), lengths).sum() >= least:
                known.add(effect)
                made.append(gene)
            if len(made) == wanted:
                return

    made: list[Gene] = []
    fresh(plan.mutations, lambda: mutate(parents[rng.integers(len(parents))], rng))
    if len(parents) > 1:
        fresh(plan.crossovers, lambda: crossover(*(parents[i] for i in rng.choice(len(parents), 2, replace=False))))
    return made


def _effect(gene: Gene, lengths: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """How many tokens rows of each length keep after each layer: on short rows many configurations do the same."""
    return tuple(tuple(counts(lengths.unique(), share).tolist()) for share in kept_shares(gene))


def mutate(gene: Gene, rng: np.random.Generator) -> Gene:
    """Each layer, with a chance of one half, anywhere between the layer above as it was and the one below as it is."""
    made: list[int] = []
    for layer, part in enumerate(gene):
        low = gene[layer + 1] if layer + 1 < len(gene) else 1
        high = made[-1] if made else WHOLE
        made.append(int(rng.integers(low, high + 1)) if rng.random() < 0.5 else part)
    return tuple(made)


def crossover(mother: Gene, father: Gene) -> Gene:
    """Layer by layer the mean, rounded up."""
    return tuple((a + b + 1) // 2 for a, b in zip(mother, father, strict=True))


def configurations_to_json(found: Iterable[TriedConfiguration]) -> list[dict[str, Any]]:
    """What was found, for a file."""
    return [asdict(one) for one in found]


def configurations_from_json(content: Iterable[dict[str, Any]]) -> list[TriedConfiguration]:
    """The way back."""
    return [
        TriedConfiguration(
            tuple(one["gene"]), one["iteration"], tuple(OperatingPoint(**point) for point in one["points"])
        )
        for one in content
    ]
