"""Evolutionary search for lengths (Kim and Cho 2021): which share of its tokens a row keeps after each layer.

The first population drops the same share at every layer, evenly spread in cost, or keeps every token up to a layer and
few from there on. Each iteration takes the configurations on the Pareto front and the best of every range of costs as
parents, mutates some and averages pairs of them; a child that would keep exactly as many tokens of every row as an
earlier configuration is not tried. For a pair, the exits are recorded once per configuration and their thresholds
searched under it, so one front covers both. The children of an iteration depend on the seed, the number of the
iteration and what was found before it, so an interrupted search continues to the same result.

Configurations are found on some rows and scored on the others, so points promise what new rows show. The file
`search.json` in the run folder always holds a complete state; it belongs to one model, one set of rows and one way of
breeding, and is refused for any other.

Modifications from the published code: costs are those of the real rows, not of one padded to the maximum; a dominated
configuration leaves the front whatever it costs; when nothing new can be bred the search ends. Added: cliffs in the
first population, and parents from every range of costs, since fronts on few rows are short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offramp.calibration.calibrate import (
    ENGINE,
    PRECISION,
    CalibrationContext,
    Predictions,
    Settings,
    pair_points_at_lengths,
    point_evaluator,
)
from offramp.calibration.grids import cliff_lengths, constant_length_grid, length_macs
from offramp.calibration.loss_bounds import bound_losses, loss_bounds, stored_points, without_rows
from offramp.calibration.scores import monotone_scores, shrink_scores
from offramp.calibration.usefulness import keep_useful_points
from offramp.errors import OfframpError
from offramp.inference.operating_points import (
    LossBounds,
    OperatingPoint,
    OperatingPoints,
    load_points,
    pareto_front,
    weights_fingerprint,
)
from offramp.methods import Method, PairMethod
from offramp.nn.lengths import kept_counts
from offramp.nn.setting_space import LengthSpace
from offramp.tasks import Task
from offramp.utils.files import read_json, write_json
from offramp.utils.hardware import best_precision

Gene = tuple[int, ...]  # percentage of the row's tokens kept after each layer
ALL_TOKENS = 100
FIRST_POPULATION = 20  # configurations of each kind in the first population
COST_RANGES = 16  # ranges of costs whose best configurations become parents
ATTEMPTS = 20  # per child that is wanted
SCORED_POINTS = 40  # promising points that are scored on the other rows, at most
SEARCH_FILE = "search.json"
FILE_FORMAT = 3  # changes when a search would breed other configurations than those in the file
SAVE_SECONDS = 5.0  # between two writes of the file …
SAVE_RATIO = 20.0  # … or so many times as long as the last write took
ReportProgress = Callable[["SearchProgress"], None]
ReportScoring = Callable[[int, int], None]  # configurations scored, and how many there are


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
class SearchRequest:
    """How to search, on how many rows, and whether to continue an interrupted search."""

    plan: SearchPlan
    rows: int = 500
    resume: bool = False


@dataclass(frozen=True)
class TriedConfiguration:
    """A configuration and its points on the search rows: one, or several for a pair."""

    gene: Gene
    iteration: int
    points: tuple[OperatingPoint, ...]


@dataclass(frozen=True)
class SearchProgress:
    """The state of a search after a configuration was tried."""

    found: list[TriedConfiguration]
    best: list[OperatingPoint]  # the front, cheapest first
    left: int  # configurations this iteration has yet to try
    iteration: int


def length_space(method: Method) -> LengthSpace:
    """Return the lengths that can be searched for a method, or refuse a method that has none."""
    space = method.length.space if isinstance(method, PairMethod) else method.space
    if not isinstance(space, LengthSpace):
        raise OfframpError(
            "a search over lengths",
            f"a run of {method.name!r}, which has none to choose",
            "train with --method length_adaptive (or length_adaptive+branchynet …); others: `offramp calibrate`",
        )
    return space


def check_searchable(method: Method, task: Task, rows: int, source: str) -> None:
    """Refuse a run whose lengths cannot be searched, and fewer than two rows."""
    length_space(method)
    if task.scores_by_loss:
        given, fix = f"the task {task.name}, which has no score to search by", "choose by hand: --set lengths=0.9,0.8,…"
        raise OfframpError("a search over lengths", given, fix)
    if rows < 2:
        asked, given = "rows to search on and others to score on", f"{rows} in {source}"
        raise OfframpError(asked, given, "give two or more, better some hundreds")


def split_search_rows(count: int, wanted: int) -> tuple[list[int], list[int]]:
    """Return the rows to search on, at most half of them, and the others, to score on."""
    if wanted < 1:
        raise OfframpError("rows to search on", f"--rows {wanted}", "give 1 or more, e.g. 500")
    order = np.random.default_rng(0).permutation(count)
    searched = min(wanted, count // 2)
    return sorted(order[:searched].tolist()), sorted(order[searched:].tolist())


def find_length_points(
    context: CalibrationContext,
    request: SearchRequest,
    folder: Path,
    name: str,
    fingerprint: str,
    report: ReportProgress = lambda _: None,
    report_scoring: ReportScoring = lambda done, total: None,
) -> OperatingPoints:
    """Search the lengths of a run on some of the rows and return the points of the best on the other rows.

    `folder` keeps the state of the search, `name` and `fingerprint` are those of the rows.
    """
    task, count = context.network.task, len(context.data.rows)
    search_rows, scoring_rows = split_search_rows(count, request.rows)
    precision = best_precision()
    identity = {"rows": fingerprint, "search_rows": len(search_rows), "precision": precision}
    state = SearchState(folder, {**identity, **_breeding_options(request.plan)})
    known = state.read(request.resume)
    searching, scoring = (context.subset(np.isin(np.arange(count), rows)) for rows in (search_rows, scoring_rows))
    searching = replace(searching, bfloat16=precision == "bf16")
    found = state.write_during(lambda note: search_lengths(searching, request.plan, known, note), report)
    data = {"name": name, "rows": len(scoring_rows), "fingerprint": fingerprint}
    points, bounds, scored = score_found(scoring, found, report_scoring)
    data |= {"search_rows": len(search_rows), "tried": len(found), "scored": scored}
    result = OperatingPoints(
        task.metric, task.higher_is_better, data, points, engine=ENGINE, precision=PRECISION, bounds=bounds
    )
    return keep_useful_points(result, task, scoring.data.rows)


def rows_not_searched_on(folder: Path, fingerprint: str, count: int) -> tuple[list[int] | None, int]:
    """Return which rows of a length search did not find its lengths, and how many lengths they scored.

    Without a search on these very rows: None and 0.
    """
    try:
        data = load_points(folder).data
    except OfframpError:  # none, damaged, or another model's
        return None, 0
    wanted = data.get("search_rows")
    if data["fingerprint"] != fingerprint or not isinstance(wanted, int) or not 1 <= wanted <= count // 2:
        return None, 0
    return split_search_rows(count, wanted)[1], int(data.get("scored", SCORED_POINTS))


def searched_settings(folder: Path) -> list[Settings]:
    """Return the settings that a search found for these weights, unless a training has since replaced them."""
    try:
        points = load_points(folder)
    except OfframpError:  # none, damaged, or another model's
        return []
    searched = {"search_rows", "searched"} & points.data.keys()
    return [point.settings for point in points.points[:-1]] if searched else []


def search_lengths(
    context: CalibrationContext, plan: SearchPlan, known: Sequence[TriedConfiguration], report: ReportProgress
) -> list[TriedConfiguration]:
    """Return everything tried, in order. `known` is what an interrupted search had tried."""
    found = {one.gene: one for one in known}
    full_predictions = context.predictions(context.run({}, None))
    for iteration in range(plan.iterations + 1):
        before = [one for one in found.values() if one.iteration < iteration]
        genes = list(first_population(context)) if iteration == 0 else breed(context, before, plan, iteration)
        if not genes:
            break
        waiting = [gene for gene in genes if gene not in found]
        for number, gene in enumerate(waiting, start=1):
            points = evaluate_configuration(context, gene, full_predictions)
            found[gene] = TriedConfiguration(gene, iteration, points)
            tried = list(found.values())
            best = [point for _, point in configuration_front(tried, context.network.task.higher_is_better)]
            report(SearchProgress(tried, best, len(waiting) - number, iteration))
    return sorted(found.values(), key=lambda one: one.iteration)


def configuration_front(
    found: Sequence[TriedConfiguration], higher_is_better: bool
) -> list[tuple[TriedConfiguration, OperatingPoint]]:
    """Return the points that no other beats on both cost and score, cheapest first, with their configurations."""
    owner = {id(point): one for one in found for point in one.points}
    points = [point for one in found for point in one.points]
    sentinel = replace(points[0], mac_share=float("inf"))  # stands in for the full model, which may be dominated here
    return [(owner[id(point)], point) for point in pareto_front(points, sentinel, higher_is_better)[:-1]]


def promising_configurations(
    found: Sequence[TriedConfiguration], higher_is_better: bool
) -> list[tuple[TriedConfiguration, OperatingPoint]]:
    """Return the front and the best point of every range of costs, cheapest first.

    On few rows one lucky point dominates all others; without the best of every range they would have no children.
    """
    sign, best = 1.0 if higher_is_better else -1.0, dict[int, tuple[TriedConfiguration, OperatingPoint]]()
    everything = [(one, point) for one in found for point in one.points]
    costs = [point.mac_share for _, point in everything]
    width = (max(costs) - min(costs)) / COST_RANGES or 1.0
    for one, point in sorted(everything, key=lambda item: (-sign * item[1].score, item[1].mac_share)):
        best.setdefault(int((point.mac_share - min(costs)) / width), (one, point))
    both = [*configuration_front(found, higher_is_better), *best.values()]
    return sorted({id(point): (one, point) for one, point in both}.values(), key=lambda item: item[1].mac_share)


def kept_shares(gene: Gene) -> tuple[float, ...]:
    """Return a configuration as the method's setting."""
    return tuple(percentage / ALL_TOKENS for percentage in gene)


def evaluate_configuration(
    context: CalibrationContext, gene: Gene, full_predictions: Predictions
) -> tuple[OperatingPoint, ...]:
    """Return the points of a configuration on the context's rows; for a pair, at settings spread over its front."""
    lengths: Settings = {length_space(context.method).name: kept_shares(gene)}
    if not isinstance(context.method, PairMethod):
        return (without_rows(point_evaluator(context, None, full_predictions)(lengths)),)
    return tuple(without_rows(point) for point in pair_points_at_lengths(context, lengths, full_predictions))


def first_population(context: CalibrationContext) -> Iterator[Gene]:
    """Yield constant drops from the shortest lengths to all tokens, then cliffs; equal ones once."""
    network, lengths = context.network, row_lengths(context)
    grid = [*constant_length_grid(network, lengths, FIRST_POPULATION), *cliff_lengths(network, FIRST_POPULATION)]
    genes = [tuple(int(np.ceil(share * ALL_TOKENS - 1e-9)) for share in shares) for shares in grid]
    yield from dict.fromkeys([*genes, (ALL_TOKENS,) * network.depth])


def row_lengths(context: CalibrationContext) -> torch.Tensor:
    """Return the number of tokens of every encoded row."""
    return torch.tensor([len(e.ids) for e in context.data.encoded])


def breed(
    context: CalibrationContext, before: list[TriedConfiguration], plan: SearchPlan, iteration: int
) -> list[Gene]:
    """Return new configurations bred from promising ones, none cheaper than the shortest the model was trained for."""
    rng = np.random.default_rng((plan.seed, iteration))
    promising = promising_configurations(before, context.network.task.higher_is_better)
    parents = list(dict.fromkeys(one.gene for one, _ in promising))
    lengths = row_lengths(context)
    known = {_token_counts(one.gene, lengths) for one in before}
    least = length_macs(context.network, kept_shares(before[0].gene), lengths).sum()  # the shortest was tried first
    children: list[Gene] = []

    def add_children(count: int, new_child: Callable[[], Gene]) -> None:
        wanted = len(children) + count
        for _ in range(ATTEMPTS * count):
            gene = new_child()
            tokens = _token_counts(gene, lengths)
            if tokens not in known and length_macs(context.network, kept_shares(gene), lengths).sum() >= least:
                known.add(tokens)
                children.append(gene)
            if len(children) == wanted:
                return

    add_children(plan.mutations, lambda: mutate(parents[rng.integers(len(parents))], rng))
    if len(parents) > 1:
        add_children(
            plan.crossovers, lambda: crossover(*(parents[i] for i in rng.choice(len(parents), 2, replace=False)))
        )
    return children


def _token_counts(gene: Gene, lengths: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Return how many tokens rows of each length keep after each layer: on short rows many configurations agree."""
    return tuple(tuple(kept_counts(lengths.unique(), share).tolist()) for share in kept_shares(gene))


def mutate(gene: Gene, rng: np.random.Generator) -> Gene:
    """Change each layer with probability one half, to a value between the old next layer and the new previous one."""
    child: list[int] = []
    for layer, percentage in enumerate(gene):
        low = gene[layer + 1] if layer + 1 < len(gene) else 1
        high = child[-1] if child else ALL_TOKENS
        child.append(int(rng.integers(low, high + 1)) if rng.random() < 0.5 else percentage)
    return tuple(child)


def crossover(first: Gene, second: Gene) -> Gene:
    """Return the mean of two configurations layer by layer, rounded up."""
    return tuple((a + b + 1) // 2 for a, b in zip(first, second, strict=True))


def score_found(
    context: CalibrationContext, found: Sequence[TriedConfiguration], report: ReportScoring
) -> tuple[tuple[OperatingPoint, ...], LossBounds, int]:
    """Score promising configurations on the context's rows and return the front there, the full setting last.

    Also return how the losses were bounded, and how many configurations were scored. They were found on other rows.
    """
    higher = context.network.task.higher_is_better
    promising = promising_configurations(found, higher)
    index = np.unique(np.linspace(0, len(promising) - 1, SCORED_POINTS).round().astype(int))
    chosen: dict[Gene, list[OperatingPoint]] = {}
    for i in index:
        chosen.setdefault(promising[i][0].gene, []).append(promising[i][1])
    report(0, len(chosen))
    full_predictions, scored = context.predictions(context.run({}, None)), list[OperatingPoint]()
    full_point = point_evaluator(context, None, full_predictions)({})
    for done, (gene, points) in enumerate(chosen.items(), start=1):
        scored += _score_again(context, gene, points, full_predictions)
        report(done, len(chosen))
    scored = bound_losses(scored, context.loss_confidence)
    bounds = loss_bounds(scored, context.loss_confidence)
    front = pareto_front(shrink_scores(scored, higher), full_point, higher)[:-1]
    return stored_points((*monotone_scores(front, higher), full_point)), bounds, len(chosen)


def _score_again(
    context: CalibrationContext, gene: Gene, points: list[OperatingPoint], full_predictions: Predictions
) -> list[OperatingPoint]:
    """Return the points of the same settings on the context's rows."""
    pair, lengths = context.method, {length_space(context.method).name: kept_shares(gene)}
    if not isinstance(pair, PairMethod):
        return [point_evaluator(context, None, full_predictions)(lengths)]
    exits = context.exits_at_lengths(lengths)
    evaluate = point_evaluator(exits, exits.record() if exits.method.replays else None, full_predictions)
    scored = [evaluate(pair.merged_settings.part(1, point.settings)) for point in points]
    return [replace(new, settings=point.settings) for new, point in zip(scored, points, strict=True)]


def _breeding_options(plan: SearchPlan) -> dict[str, Any]:
    """Return what decides which configurations an iteration tries; the number of iterations does not."""
    return {name: value for name, value in asdict(plan).items() if name != "iterations"}


class SearchState:
    """The state of a search in a file: which search it is, and everything tried so far."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.path = folder / SEARCH_FILE
        self.identity = {"format": FILE_FORMAT, "model": weights_fingerprint(folder), **identity}

    def read(self, resume: bool) -> list[TriedConfiguration]:
        """Return what an interrupted search of this model on these rows tried, to continue it.

        A new search starts empty. It replaces a damaged file only: what hours have found is not overwritten.
        """
        if not self.path.is_file():
            return []
        try:
            content = dict(read_json(self.path))
            found = configurations_from_json(content["found"])
        except (OfframpError, KeyError, TypeError, ValueError) as error:
            if not resume:
                return []
            fix = "leave --resume out, or remove the file, to start a new one"
            raise OfframpError("to continue a search", f"a damaged {self.path}", fix) from error
        different = [name for name, value in self.identity.items() if content.get(name) != value]
        if not different and resume:
            return found
        words = {"model": "another model", "rows": "other rows", "search_rows": "another number of search rows"}
        listed = f"a search of {' and '.join(words.get(name, f'other {name}') for name in different)}"
        given = f"{self.path}, {listed if different else 'this very search'}: {len(found)} configurations tried"
        again = f"give --resume to continue, or remove {SEARCH_FILE} to start over"
        fix = f"move {SEARCH_FILE} away to start a new one" if different else again
        raise OfframpError(f"to {'continue' if resume else 'start'} a search", given, fix)

    def write_during(
        self, search: Callable[[ReportProgress], list[TriedConfiguration]], report: ReportProgress
    ) -> list[TriedConfiguration]:
        """Run the search, writing its state every few seconds and whenever it stops."""
        due, latest = time.monotonic() + SAVE_SECONDS, list[TriedConfiguration]()

        def note(progress: SearchProgress) -> None:
            nonlocal due, latest
            latest, began = progress.found, time.monotonic()
            if began > due:
                self._write(latest)
                due = max(began + SAVE_SECONDS, time.monotonic() + SAVE_RATIO * (time.monotonic() - began))
            report(progress)

        try:
            return search(note)
        finally:
            if latest:
                self._write(latest)

    def _write(self, found: list[TriedConfiguration]) -> None:
        write_json(self.path, {**self.identity, "found": configurations_to_json(found)})


def configurations_to_json(found: Iterable[TriedConfiguration]) -> list[dict[str, Any]]:
    """Return configurations as JSON values."""
    return [asdict(one) for one in found]


def configurations_from_json(content: Iterable[dict[str, Any]]) -> list[TriedConfiguration]:
    """Return configurations from JSON values."""
    return [
        TriedConfiguration(
            tuple(one["gene"]), one["iteration"], tuple(OperatingPoint(**point) for point in one["points"])
        )
        for one in content
    ]
