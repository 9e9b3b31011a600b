"""`offramp attach` as a function: exits for a model that is already fine-tuned, in one pass and without labels."""

from __future__ import annotations

import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from scipy.stats import binom

from offramp import __version__, engines, methods
from offramp.calibration.calibrate import CalibrationContext, row_uncertainties
from offramp.calibration.disagreement import (
    CONFIDENCE,
    choose_exits,
    find_disagreement_points,
    record_unlabelled,
    rows_for,
)
from offramp.calibration.latency import LatencyRequest, find_latency_point
from offramp.calibration.replay import ExitRecording
from offramp.calibration.risk import check_provable, check_task_has_risk, prove_risk_on, rows_needed
from offramp.data import readers as reading
from offramp.data.overlap import TrainingMarks, repeated_texts, row_marks, training_marks, write_training_marks
from offramp.data.tokenization import Encoded, max_tokens
from offramp.errors import OfframpError
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.batching import run_encoded, score_policy
from offramp.inference.budget import Budget
from offramp.inference.finetuned import ATTACHED, FineTunedModel, find_model
from offramp.inference.hub import push_to_hub
from offramp.inference.model_card import render_attached_card
from offramp.inference.operating_points import OperatingPoints, pareto_front
from offramp.inference.run_folder import LoadedRun
from offramp.methods.attached import AttachedOptions
from offramp.nn.batches import Data, pack_rows
from offramp.nn.keys import EXIT_UNIT
from offramp.nn.network import Network
from offramp.tasks import Row, Task
from offramp.training.attach import collect_states, fit_exit_heads, is_validation
from offramp.training.run_lock import check_output_free, locked_working_folder
from offramp.training.schedule import LARGEST_SEED
from offramp.utils.command_line import last_two_parts
from offramp.utils.files import atomic_replace, check_not_input, write_text

HELD_OUT = 5  # every fifth text is held out to test the operating points
HIDDEN = 128  # units of the hidden layer of exit heads, at most a third of the model's
FEWEST = 60  # texts below which exits cannot be trained and tested
DISAGREEMENT = 0.01  # with the full model, that a folder allows where no other budget is given
NO_TIME_SAVED = "no exits save time on this machine"
SHORT_TEXT = 3  # tokens below which a text holds little to learn from
SMALL_DEPTH = 3  # layers below which exits hardly pay
Listener = Callable[..., None]


@dataclass(frozen=True)
class AttachRequest:
    """Everything that decides the result of attaching; it is written to recipe.yaml."""

    model: str
    text: str
    out: str
    risk: float | None = None
    confidence: float = CONFIDENCE
    budget: float | None = None
    latency: str | None = None
    labels: str | None = None
    rows: int | None = None
    exits: str = "auto"
    pair: tuple[str, ...] = ()
    revision: str | None = None
    max_length: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    held_out: str | None = None


@dataclass(frozen=True)
class AttachedRun:
    """A finished run with attached exits, and what was found on the way."""

    folder: Path
    model: LoadedRun
    points: OperatingPoints
    summary: dict[str, Any]  # texts, held_out, exits and why, seconds, labelled scores

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Upload the run folder to the Hugging Face hub; arguments as of `offramp.push_to_hub`."""
        return push_to_hub(self.folder, name, **options)


def attach(
    model: str | Path,
    text: str | Path,
    out: str | Path,
    *,
    risk: float | None = None,
    confidence: float = CONFIDENCE,
    budget: float | None = None,
    latency: str | None = None,
    labels: str | Path | None = None,
    rows: int | None = None,
    exits: str | Sequence[int] = "auto",
    pair: Sequence[str] = (),
    revision: str | None = None,
    max_length: int | None = None,
    columns: Mapping[str, str] | None = None,
    seed: int = 0,
    held_out: str | Path | None = None,
    force: bool = False,
    listener: Listener = lambda **_: None,
) -> AttachedRun:
    """Give a fine-tuned model exits that learn its own answers, and operating points in terms of disagreement.

        run = offramp.attach("my-finetuned-model", "texts.txt", "runs/mine", risk=0.01)
        offramp.load("runs/mine").predict(["a fine film"], max_disagreement=0.01)

    Args:
        model: a folder, a name on the hub, or an Offramp run; its weights and its answers stay as they are.
        text: unlabelled texts like those the model will see: .txt (a text a line), .jsonl, .csv, .tsv or .parquet.
        out: where the run folder is written.
        risk: prove a setting that disagrees with the full model at most this often; it becomes the default.
        confidence: of that proof.
        budget: make the best setting within this share of the full model's compute the default.
        latency: make the best setting that answers single rows within this time ("5ms") the default.
        labels: labelled rows, to report the metric beside the disagreement.
        rows: use only the first texts.
        exits: layers that get an exit ("0,2,4"), or "auto": chosen by expected time on this machine.
        pair: the two text columns of a model that reads pairs.
        revision: of a model on the hub.
        max_length: the longest row in tokens.
        columns: columns of the file by the names that the task expects.
        seed: of the split and of training.
        held_out: texts for the operating points, instead of a fifth of `text`: where `text` is what the model was
            fine-tuned on, whose answers it knows too well, or comes from another source than the texts to be served.
        force: replace what is in `out`.
        listener: receives the progress as keyword arguments.
    """
    if not isinstance(exits, str | Sequence):
        raise OfframpError("layers with an exit", f"exits={exits!r}", 'give "auto", or a list like [0, 2, 4]')
    listed = exits if isinstance(exits, str) else ",".join(str(layer) for layer in exits)
    request = AttachRequest(
        str(model),
        str(text),
        str(out),
        risk,
        confidence,
        budget,
        latency,
        None if labels is None else str(labels),
        rows,
        listed,
        tuple(pair),
        revision,
        max_length,
        columns or {},
        seed,
        None if held_out is None else str(held_out),
    )
    return run_attach(request, force, listener)


def run_attach(request: AttachRequest, force: bool = False, listener: Listener = lambda **_: None) -> AttachedRun:
    """Attach exits to a model and write the run folder; an interrupted pass continues with the same request."""
    started = time.perf_counter()
    default = _default_budget(request)
    # a time is measured with the finished folder: until then it has the default that needs no time
    published = Budget.disagreement(DISAGREEMENT) if default.kind == "latency" else default
    check_output_free(Path(request.out), force)
    check_not_input(request.out, request.text, request.labels, request.held_out, request.model)
    if not isinstance(request.seed, int) or not 0 <= request.seed <= LARGEST_SEED:
        raise OfframpError("a seed", f"--seed {request.seed}", f"give 0 to {LARGEST_SEED}")
    if request.pair and len(request.pair) != 2:
        raise OfframpError("two text columns", f"--pair {','.join(request.pair)}", "give two, e.g. text_a,text_b")
    source = find_model(request.model, request.pair or ("text",), request.revision)
    rows = _read_texts(request, source.task, request.text)
    training, finding_rows, held_out = _split(request, source.task, rows)
    _check_counts(request, source.task, len(held_out))
    labelled = _read_labelled(request, source.task)
    listener(task=source.task.name, texts=len(training), held_out=len(held_out))
    hf, tokenizer = source.load()
    task = source.task.with_tokenizer(tokenizer)
    recipe = {**_recipe(request, rows), "model_fingerprint": operating.weights_fingerprint(source.folder)}
    method, options = methods.get(ATTACHED), _options(request, task, hf.config.hidden_size)
    torch.manual_seed(request.seed)
    network = folders.build_network(hf, task, method, options)
    for parameter in hf.parameters():
        parameter.requires_grad_(False)
    longest = max_tokens(tokenizer, network.encoder.positions, request.max_length)
    model = LoadedRun(network, tokenizer, method, options, longest, request.model)
    encoded = task.encode(tokenizer, training, longest)
    short = _check_lengths(encoded, tokenizer, request.text)
    held_data = Data(held_out, task.encode(tokenizer, held_out, longest))
    finding_data = Data(finding_rows, task.encode(tokenizer, finding_rows, longest))
    with locked_working_folder(Path(request.out), recipe, force) as partial:
        listener(stage="states", rows=len(encoded))
        stored = collect_states(network, encoded, partial / "states", request.seed)
        passed = time.perf_counter()
        listener(stage="heads")
        fit_exit_heads(network, stored, encoded, request.seed)
        trained = time.perf_counter()
        listener(stage="points", rows=len(held_out))
        finding, testing = (record_unlabelled(network, method, data) for data in (finding_data, held_data))
        chosen, why = _choose_exits(request, *finding)
        model = _keep_exits(model, chosen)
        finding, testing = (_with_exits(model.network, chosen, one) for one in (finding, testing))
        points = _find_points(request, model, finding, testing, published)
        slow = [f"{NO_TIME_SAVED}: they save compute only"] if why.startswith(NO_TIME_SAVED) else []
        scores = _score_labelled(labelled, model, points, default) if labelled and default == published else None
        broken = _broken_promise(scores, default, task)
        copies = repeated_texts(row_marks(rows, task.input_columns))
        points = replace(points, warnings=(*points.warnings, *copies, *short, *slow, *broken))
        summary = {
            "task": task.name,
            "texts": len(training),
            "held_out": len(held_out),
            "exits": sorted(model.network.exit_heads),
            "why": why,
            "seconds": {
                "one_pass": round(passed - started, 2),
                "heads": round(trained - passed, 2),
                "all": round(time.perf_counter() - started, 2),
            },
        }
        if scores:
            summary["labelled"] = scores
        for warning in points.warnings:
            warnings.warn(warning, stacklevel=2)
        seen = training_marks(row_marks([*training, *finding_rows], task.input_columns))
        _publish(Path(request.out), partial, source, model, points, {**recipe, "summary": summary}, seen)
    if default != published:
        points = _with_latency(request, points, default, held_data)
        if labelled:
            summary["labelled"] = _score_labelled(labelled, model, points, default)
            _write_recipe(Path(request.out), {**recipe, "summary": summary})
    return AttachedRun(Path(request.out), replace(model, folder=Path(request.out)), points, summary)


def _default_budget(request: AttachRequest) -> Budget:
    """Return the budget that becomes the folder's default; refuse more than one."""
    named = (request.risk, request.budget, request.latency)
    if all(value is None for value in named):
        return Budget.disagreement(DISAGREEMENT)
    return Budget.parse(request.budget, risk=request.risk, latency=request.latency)


def _options(request: AttachRequest, task: Task, width: int) -> AttachedOptions:
    one_choice = task.kind == "row" and "distribution" in task.provides
    one_choice = one_choice and "several distributions a row" not in task.provides  # the bag of words is fitted to one
    exits: tuple[int, ...] = ()
    if request.exits != "auto":
        try:
            exits = tuple(int(layer) for layer in request.exits.split(","))
        except ValueError as error:
            raise OfframpError("layers with an exit", f"--exits {request.exits}", "use auto, or e.g. 0,2,4") from error
    return AttachedOptions(pool="meanmaxfirst", exits=exits, bag_of_words=one_choice, hidden=min(HIDDEN, width // 3))


def _read_texts(request: AttachRequest, task: Task, source: str) -> list[Row]:
    """Return the texts of a file as rows with the task's input columns."""
    limit = request.rows if source == request.text else None
    named = {name: column for name, column in request.columns.items() if name != task.target}  # texts have no labels
    rows = reading.read_rows(source, columns=named, limit=limit)
    columns = task.input_columns
    _check_columns(task, rows, source)
    if words := task.words:
        rows = [row if words in row else {**row, words: row.get("text")} for row in rows]  # raw: the task splits
    kept: list[Row] = [row for row in rows if all(_filled(row.get(column)) for column in columns)]
    if len(kept) < FEWEST:
        given = f"{len(kept)} usable rows in {source} (columns {' and '.join(columns)})"
        raise OfframpError(f"at least {FEWEST} texts to attach exits with", given, "give more texts; 1,000 do well")
    task.check_inputs(kept, source)
    return kept


def _check_columns(task: Task, rows: Sequence[Row], source: str) -> None:
    """Refuse rows none of which has a column that the task reads; those of words may be raw sentences."""
    for column in task.input_columns:
        names = {column, "text"} if column == task.words else {column}
        if not any(names & row.keys() for row in rows):
            fix = f"name the one to use: --column {column}=NAME"
            if task.kind == "row":
                fix += "; of a model that reads pairs name both: --pair NAME,NAME"
            raise OfframpError(f"the column {column!r} of {source}", f"the columns {', '.join(rows[0])}", fix)


def _filled(value: Any) -> bool:
    """Return whether a column of a row holds something to read."""
    return bool(value.strip()) if isinstance(value, str) else bool(value)


def _check_lengths(encoded: Sequence[Encoded], tokenizer: Any, source: str) -> list[str]:
    """Refuse texts of which nothing is left but special tokens; return a warning if most are very short."""
    special = set(tokenizer.all_special_ids)
    lengths = [sum(token not in special for token in one.ids) for one in encoded]
    middle = statistics.median(lengths)
    if middle == 0:
        given = f"{source}, where the tokenizer finds no known piece in most texts"
        raise OfframpError("texts that the model can read", given, "give texts in the model's language and script")
    if middle < SHORT_TEXT:
        return [f"half of the texts have at most {middle:g} tokens: exits learn little from them"]
    return []


def _split(request: AttachRequest, task: Task, rows: Sequence[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Return the rows that train exits, those that thresholds are found on, and those that test them.

    A fifth of the rows tests; of the others some train nothing (`is_validation`), and thresholds are found on those.
    Where a file of held-out texts is given, a third of it finds and the others test.
    """
    rng = np.random.default_rng(request.seed)
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    if request.held_out is not None:
        own = _unseen(_read_texts(request, task, request.held_out), rows, task, request.held_out)
        own = [own[i] for i in rng.permutation(len(own))]
        return shuffled, own[: len(own) // 3], own[len(own) // 3 :]
    testing, training = shuffled[: len(rows) // HELD_OUT], shuffled[len(rows) // HELD_OUT :]
    return training, [row for i, row in enumerate(training) if is_validation(i, len(training))], testing


def _unseen(rows: list[Row], trained: Sequence[Row], task: Task, source: str) -> list[Row]:
    """Return held-out rows without those that exits are trained on: exits know those too well to be tested on them."""
    known = set(row_marks(trained, task.input_columns))
    unseen = [row for row, mark in zip(rows, row_marks(rows, task.input_columns), strict=True) if mark not in known]
    if len(unseen) < FEWEST:
        given = f"{len(unseen)} rows of {source} that are not among those of --text"
        raise OfframpError(f"at least {FEWEST} held-out texts", given, "give others, or leave --held-out out")
    if len(unseen) < len(rows):
        why = f"{len(rows) - len(unseen)} of {len(rows)} rows of {source} are among those of --text and are left out"
        warnings.warn(why, stacklevel=4)
    return unseen


def _check_counts(request: AttachRequest, task: Task, held_out: int) -> None:
    """Refuse a risk that the held-out texts cannot prove, and a task without single answers."""
    check_task_has_risk(task)
    if request.risk is not None:
        try:
            check_provable(request.risk, request.confidence, held_out)
        except OfframpError as error:
            if not 0.0 < request.risk < 1.0 or not 0.5 <= request.confidence < 1.0:
                raise
            need = HELD_OUT * rows_needed(request.risk, request.confidence)
            given = f"{held_out} held-out texts, a fifth of those given"
            fix = f"give at least {need} texts, or a larger risk"
            if request.held_out is not None:
                given = f"{held_out} texts to test with, two thirds of {request.held_out}"
                fix = f"give at least {3 * -(-need // HELD_OUT // 2)} texts there, or a larger risk"
            raise OfframpError(f"a proven risk of {request.risk:g}", given, fix) from error


def _choose_exits(
    request: AttachRequest, context: CalibrationContext, recording: ExitRecording
) -> tuple[list[int], str]:
    """Return the layers that keep their exit, chosen on rows that test nothing, and why."""
    network = context.network
    if request.exits != "auto":
        return sorted(network.exit_heads), "as given by --exits"
    uncertainties = row_uncertainties(network, context.method, {}, recording)
    layer_ms, exit_ms = measure_parts(network, context.data)
    chosen, compared = choose_exits(context, recording, uncertainties, layer_ms, exit_ms)
    listed = "; ".join(f"exits {name}: {ms:.2f}" for name, ms in compared.items())
    why = f"expected milliseconds of a row at 1 % disagreement on this machine — {listed}"
    if not chosen:  # where a head takes as long as a layer: exits that save compute, for other machines
        layer_macs, exit_macs = _macs_of_parts(network, context.data)
        chosen, _ = choose_exits(context, recording, uncertainties, layer_macs, exit_macs)
        chosen = chosen or [max(network.exit_heads)]
        why = f"{NO_TIME_SAVED}, so they were chosen by compute; {why}"
    return chosen, why


def _with_exits(
    network: Network, chosen: Sequence[int], recorded: tuple[CalibrationContext, ExitRecording]
) -> tuple[CalibrationContext, ExitRecording]:
    """Return recorded rows for a network that kept some of its exits."""
    context, recording = recorded
    return replace(context, network=network), recording.keep_exits(chosen, network.depth)


def _macs_of_parts(network: Network, data: Data) -> tuple[float, list[float]]:
    """Return the MACs of a layer and of every exit head for one row of median length."""
    tokens = statistics.median(len(one.ids) for one in data.encoded)
    layer, heads = network.layer_cost(1), [network.exit_cost(number) for number in sorted(network.exit_heads)]
    whole = (layer.query + layer.key + layer.feed) * tokens + layer.pair * tokens * tokens
    return whole, [head.row + head.token * tokens for head in heads]


def measure_parts(network: Network, data: Data, rounds: int = 9) -> tuple[float, list[float]]:
    """Return the milliseconds of a layer and of every exit head for one row of median length on the default engine."""
    lengths = sorted(range(len(data.encoded)), key=lambda i: len(data.encoded[i].ids))
    packed = pack_rows(network.task, [data.encoded[lengths[len(lengths) // 2]]])
    engine = engines.make(engines.AUTO, network.encoder)
    heads = engine.compile_heads(network)
    with torch.inference_mode(), engine.running():
        packed = packed.with_states(engine.embed(packed))

        def milliseconds(run: Callable[[], Any]) -> float:
            run()
            times = []
            for _ in range(rounds):
                began = time.perf_counter()
                run()
                times.append(1000 * (time.perf_counter() - began))
            return statistics.median(times)

        layer = milliseconds(lambda: engine.run_segment(1, 1, None, packed))
        exits = sorted(network.exit_heads)
        unit = EXIT_UNIT in network.added
        kinds = {number: milliseconds(lambda n=number: heads(n, packed)) for number in exits[:2]}  # type: ignore[misc]
        if unit:
            kinds = {
                number: ms + milliseconds(lambda: heads.exit_unit(exits[0], packed)) for number, ms in kinds.items()
            }
    return layer, [kinds.get(number, kinds[exits[min(1, len(exits) - 1)]]) for number in exits]


def _keep_exits(model: LoadedRun, chosen: Sequence[int]) -> LoadedRun:
    """Return the model with some of its exits."""
    options = replace(model.options, exits=tuple(chosen))
    network = folders.build_network(model.network.hf, model.network.task, model.method, options)
    own = network.added.state_dict()
    network.added.load_state_dict({name: t for name, t in model.network.added.state_dict().items() if name in own})
    network.eval()
    return replace(model, network=network, options=options)


def _find_points(
    request: AttachRequest,
    model: LoadedRun,
    finding: tuple[CalibrationContext, ExitRecording],
    testing: tuple[CalibrationContext, ExitRecording],
    default: Budget,
) -> OperatingPoints:
    """Return operating points whose score is the agreement with the full model, with disagreement points and proofs."""
    disagreements, tested = find_disagreement_points(finding, testing)
    rows = testing[0].data.rows
    full, *others = tested
    share = "two thirds" if request.held_out else "a fifth held out"
    data = {
        "name": last_two_parts(request.held_out or request.text) + f" ({share})",
        "rows": len(rows),
        "fingerprint": reading.fingerprint(request.held_out or request.text, rows),
    }
    points = OperatingPoints(
        "agreement",
        True,
        data,
        pareto_front(others, replace(full, score=1.0), True),
        disagreements=tuple(disagreements),
        engine="torch",
        precision="fp32",
        default=_stored(default),
    )
    if request.risk is not None:
        proven = prove_risk_on(finding, testing, request.risk, request.confidence)
        points = replace(points, guarantees=(proven,))
    return replace(points, warnings=tuple(_warnings(model.network, points)))


def _stored(budget: Budget) -> dict[str, Any]:
    return {"kind": budget.kind, "value": budget.value}


def _warnings(network: Network, points: OperatingPoints) -> list[str]:
    found = []
    one = next(point for point in points.disagreements if point.limit == DISAGREEMENT)
    if network.depth < SMALL_DEPTH:
        found.append(f"a model of {network.depth} layers has little to save: exits hardly pay")
    if one.mac_share > 0.9:
        found.append(f"exits hardly pay: 1 % disagreement costs {one.mac_share:.2f} of the full compute")
    unproven = [point.limit for point in points.disagreements if not point.proven]
    if unproven:
        need, shown = HELD_OUT * rows_for(max(unproven)), max(unproven)
        found.append(
            f"too few texts to prove disagreements of {shown:g} and less: those points are estimates; "
            f"{need} texts could prove {shown:g}"
        )
    return found


def _read_labelled(request: AttachRequest, task: Task) -> list[Row]:
    """Return the labelled rows, checked before any work is done; none where no file is given."""
    if request.labels is None:
        return []
    rows = [task.with_known_label(row) for row in reading.read_rows(request.labels, columns=request.columns)]
    task.check_rows(rows, request.labels)
    return rows


def _score_labelled(rows: Sequence[Row], model: LoadedRun, points: OperatingPoints, default: Budget) -> dict[str, Any]:
    """Return the metrics of the full model and of the default point on labelled rows."""
    task, network = model.network.task, model.network
    data = Data(rows, task.encode(model.tokenizer, rows, model.max_length))
    engine = engines.make("torch", network.encoder)
    scores: dict[str, Any] = {"rows": len(rows)}
    settings = {"full": model.method.settings(), "default": _settings_of(model, points, default)}
    for name, chosen in settings.items():
        metrics, output = score_policy(network, engine, model.method.policy(network, chosen), data)
        scores[name] = metrics
        if name == "default":
            full_output = run_encoded(network, engine, model.method.policy(network, settings["full"]), data.encoded)
            ours, theirs = (task.predictions(rows, data.encoded, one.logits) for one in (output, full_output))
            scores["disagreement"] = float(np.mean(task.disagreement(ours, theirs)))
            scores["mac_share"] = float(output.macs.sum() / full_output.macs.sum())
    return scores


def _broken_promise(scores: Mapping[str, Any] | None, default: Budget, task: Task) -> list[str]:
    """Return a warning if labelled rows differ from the full model more often than allowed, beyond chance."""
    if scores is None or default.kind not in ("disagreement", "risk") or not task.disagreement_is_binary:
        return []
    found, rows = scores["disagreement"], scores["rows"]
    if binom.sf(round(found * rows) - 1, rows, default.value) > 1 - CONFIDENCE:
        return []
    return [
        f"{100 * found:.1f} % of the labelled rows differ from the full model, where {100 * default.value:g} % may: "
        "they are unlike the texts, or the model was fine-tuned on the texts; give new ones with --held-out"
    ]


def _settings_of(model: LoadedRun, points: OperatingPoints, default: Budget) -> Any:
    if default.kind == "risk":
        chosen = points.guarantees[0].settings
    elif default.kind == "disagreement":
        chosen = points.disagreement_point_for(default.value).settings
    else:
        chosen = points.choose(default).settings if default.kind == "share" else points.latencies[0].settings
    return methods.configure(model.method.settings, chosen, model.method.name)


def _recipe(request: AttachRequest, rows: Sequence[Row]) -> dict[str, Any]:
    content = asdict(replace(request, columns=dict(request.columns)))
    for name in ("model", "text", "labels", "held_out"):
        value = content[name]
        content[name] = Path(value).name if value and Path(value).exists() else value
    content.pop("out")
    content["pair"] = list(content["pair"])
    mark = reading.fingerprint(request.text, rows)
    return {"method": ATTACHED, "train": content["text"], **content, "text_fingerprint": mark, "offramp": __version__}


def _publish(
    out: Path,
    partial: Path,
    source: FineTunedModel,
    model: LoadedRun,
    points: OperatingPoints,
    recipe: dict[str, Any],
    seen: TrainingMarks,
) -> None:
    """Write the finished folder in one step; the model's own files are copied byte for byte."""
    named = replace(model, base_model=Path(source.source).name if Path(source.source).exists() else source.source)
    with atomic_replace(out) as new:
        source.copy_to(new)
        folders.save_added(new, named)
        operating.save_points(new, points)
        write_training_marks(new, seen)
        _write_recipe(new, recipe)
        write_text(new / "README.md", render_attached_card(named, points, recipe))
    shutil.rmtree(partial, ignore_errors=True)


def _write_recipe(folder: Path, recipe: Mapping[str, Any]) -> None:
    write_text(folder / "recipe.yaml", yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))


def _with_latency(request: AttachRequest, points: OperatingPoints, default: Budget, held: Data) -> OperatingPoints:
    """Measure the setting that answers within the latency on this machine and store it as the default.

    Where there is none, the folder keeps its first default, and the error says so.
    """
    timed = LatencyRequest(default.value, 95.0, "auto", "fp32", None)
    try:
        point = find_latency_point(request.out, points, held.rows, request.text, timed)
    except OfframpError as error:
        kept = f"{request.out} is written all the same, with {points.default_budget} as its default"
        raise OfframpError(error.asked, error.given, f"{error.fix}; {kept}") from error
    points = replace(points, latencies=(point,), default=_stored(default))
    operating.save_points(Path(request.out), points)
    return points
