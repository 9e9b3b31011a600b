"""`offramp train` as a function: read, build, fit, calibrate, write. Work happens beside `out`, which appears whole."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from offramp import __version__, methods, tasks
from offramp.calibration.calibrate import calibrate, calibration_subset
from offramp.data import readers as reading
from offramp.data.tokenization import max_tokens as length_limit
from offramp.errors import OfframpError
from offramp.evaluation.demo_data import bundled_model
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.batching import score_for_training
from offramp.inference.model_card import render_model_card
from offramp.inference.new_model import build_translation_model, is_model_configuration
from offramp.inference.operating_points import OperatingPoints
from offramp.inference.run_folder import LoadedRun
from offramp.methods import Method
from offramp.nn.batches import Data
from offramp.tasks import Task
from offramp.training import checkpoint
from offramp.training.run_lock import check_output_free, locked_working_folder
from offramp.training.stage import Stage
from offramp.training.trainer import Schedule, Trainer
from offramp.utils.files import atomic_replace, write_text

Report = Callable[..., None]  # receives what happens during training as keyword arguments


@dataclass(frozen=True)
class TrainRequest:
    """What a user asks for; all of it decides the result, none of it is read from elsewhere."""

    model: str
    train: str
    out: str
    task: str = "classification"
    method: str = "full"
    dev: str | None = None
    dev_split: float = 0.1
    init: str | None = None
    max_length: int | None = None
    limit: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True)
class TrainedRun:
    """A trained run."""

    model: LoadedRun
    points: OperatingPoints
    log: list[dict[str, Any]]


@dataclass(frozen=True)
class Rows:
    """What is trained and chosen on, and the task they define."""

    task: Task
    train: list[dict[str, Any]]
    dev: list[dict[str, Any]]
    dev_name: str
    file_mark: str  # fingerprint of the whole training file, before any rows were held out
    labelled: bool = True  # the training rows; dev rows always are


def rows_of(request: TrainRequest) -> Rows:
    """All rows are checked as they stand in their files; only then some are held out, if there is no dev file."""
    kind, rows = tasks.get(request.task), reading.read_rows(request.train, columns=request.columns, limit=request.limit)
    if request.init and kind.target and not any(kind.target in row for row in rows):
        return _unlabelled(request, kind, rows)
    task, mark = kind.from_rows(rows, request.train), reading.fingerprint(request.train, rows)
    if request.dev is not None:
        dev = reading.read_rows(request.dev, columns=request.columns)
        task.check(dev, request.dev)
        return Rows(task, rows, dev, request.dev, mark)
    if not 0.0 < request.dev_split < 1.0:
        raise OfframpError("a share of the rows to hold out", f"--dev-split {request.dev_split}", "give e.g. 0.1")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(request.schedule.seed)).tolist()
    held = max(1, round(len(rows) * request.dev_split))
    if held >= len(rows):
        raise OfframpError("rows to train on", f"{len(rows)} rows in {request.train}", "give more rows, or --dev FILE")
    name = f"{request.train} ({request.dev_split:g} held out, seed {request.schedule.seed})"
    return Rows(task, [rows[i] for i in order[held:]], [rows[i] for i in order[:held]], name, mark)


def _unlabelled(request: TrainRequest, kind: type[Task], rows: list[dict[str, Any]]) -> Rows:
    """Rows to learn an earlier run's own answers on; the task is that run's."""
    task = folders.task_from_description(folders.read_description(request.init or ""))
    if not isinstance(task, kind) or request.dev is None:
        what = f"rows without {kind.target!r} in {request.train}" + (" and no --dev" if request.dev is None else "")
        raise OfframpError("to train without labels", what, "give labelled rows with --dev, and the task of --init")
    task.check_inputs(rows, request.train)
    dev = reading.read_rows(request.dev, columns=request.columns)
    task.check(dev, request.dev)
    return Rows(task, rows, dev, request.dev, reading.fingerprint(request.train, rows), labelled=False)


def run_training(request: TrainRequest, force: bool = False, report: Report = lambda **_: None) -> TrainedRun:
    """Train a method and write its model folder; resumes if the same request was interrupted."""
    method = methods.get(request.method)
    options = methods.configure(method.options, dict(request.options), method.name)
    check_output_free(Path(request.out), force)
    rows = rows_of(request)
    recipe = _recipe(request, rows)
    model = _build(request, method, options, rows)
    stages = _stages(request, model)
    if not rows.labelled and any(stage.needs_labels for stage in stages):
        rows.task.check(rows.train, request.train)  # says which column is missing
    train_data = replace(_encode(model, rows.train, request.train), labelled=rows.labelled)
    dev_data = _encode(model, rows.dev, rows.dev_name)
    with locked_working_folder(Path(request.out), recipe, force) as partial:
        if (partial / checkpoint.CHECKPOINT_FILE).is_file():
            report(resuming=request.out)
        report(
            rows=len(rows.train),
            dev=len(rows.dev),
            cut=train_data.truncated_rows + dev_data.truncated_rows,
            max_length=model.max_length,
        )
        trainer = Trainer(model.network, request.schedule, partial, score_for_training, report)
        progress = trainer.fit(stages, train_data, dev_data)
        chosen_on = calibration_subset(method, dev_data)
        report(choosing=len(chosen_on.rows))
        points = calibrate(model.network, method, chosen_on, rows.dev_name, recipe["dev_fingerprint"])
        if trainer.accelerator.is_main_process:
            for noticed in points.warnings:
                warnings.warn(noticed, stacklevel=2)
            done = {"processes": trainer.world, "seconds": progress.seconds, "log": progress.log}
            _publish(Path(request.out), partial, model, points, {**recipe, **done})
        trainer.accelerator.wait_for_everyone()
    return TrainedRun(model, points, progress.log)


def _build(request: TrainRequest, method: Method, options: Any, rows: Rows) -> LoadedRun:
    """The network to train: from a pretrained model, from an earlier run's fine-tuned weights, or new."""
    source, base = request.init or request.model, request.model
    theirs = folders.read_description(request.init) if request.init else None
    if is_model_configuration(source):
        torch.manual_seed(request.schedule.seed)
        hf, tokenizer = build_translation_model(source, rows.task, rows.train)
        task, fresh = rows.task.with_tokenizer(tokenizer), frozenset[str]()
    else:
        folders.check_backbone(source)
        tokenizer = folders.load_tokenizer(source)
        task = rows.task.with_tokenizer(tokenizer)
        if theirs is not None:
            _same_answers(theirs, task, source)
            base = theirs["base_model"]  # --model only names what the first run started from
        torch.manual_seed(request.schedule.seed)
        hf, fresh = folders.load_backbone_and_missing(source, task, complete=request.init is not None)
        folders.check_tokenizer_size(tokenizer, hf, source)
    net = folders.build_network(hf, task, method, options, fresh)
    if request.init is None or net.decoder is not None:  # a decoder's exits may have vocabularies of their own
        folders.reuse_added_modules(net, method, source)
    longest = length_limit(tokenizer, net.encoder.positions, request.max_length)
    return LoadedRun(net, tokenizer, method, options, longest, base)


def _stages(request: TrainRequest, model: LoadedRun) -> list[Stage]:
    """What is left to train: not the fine-tuning an earlier run did, nor off-ramps without a parameter of their own."""
    stages = [stage for stage in model.method.stages(model.network, model.options) if stage.trainable()]
    theirs = folders.read_description(request.init) if request.init else None
    return [stage for stage in stages if theirs is None or not stage.is_done_in(theirs)] or stages


def _same_answers(about: Mapping[str, Any], task: Task, run: str) -> None:
    theirs, mine = about["task"], {"name": task.name, **task.to_json()}
    if not methods.get(about["method"]).hf_equal:
        given = f"{run}, a run of {about['method']!r}, whose full model was never trained"
        raise OfframpError("to start from an earlier run", given, "give a run of another method, e.g. full")
    odd = [key for key in mine if theirs.get(key) != mine[key]]
    if odd:
        listed = "; ".join(f"{key} {str(theirs.get(key))[:200]}, here {str(mine[key])[:200]}" for key in odd)
        raise OfframpError(
            "to start from an earlier run",
            f"{run}, which was trained for other answers: {listed}",
            "use the same task and labels, or leave --init out",
        )


def _encode(model: LoadedRun, rows: list[dict[str, Any]], source: str) -> Data:
    encoded = model.network.task.encode(model.tokenizer, rows, model.max_length)
    model.network.task.check_encoded(encoded, model.max_length, source)
    return Data(rows, encoded)


def _recipe(request: TrainRequest, rows: Rows) -> dict[str, Any]:
    made = asdict(replace(request, columns=dict(request.columns), options=dict(request.options)))
    made["schedule"].pop("save_seconds")
    made.pop("out")
    train, dev = reading.fingerprint(request.train, rows.train), reading.fingerprint(rows.dev_name, rows.dev)
    marks = {"train_fingerprint": train, "dev_fingerprint": dev, "file_fingerprint": rows.file_mark}
    return {**made, **marks, "offramp": __version__}


def _publish(out: Path, partial: Path, model: LoadedRun, points: OperatingPoints, recipe: dict[str, Any]) -> None:
    """The finished folder takes its place in one step; only then does the unfinished one go."""
    with atomic_replace(out) as fresh:
        folders.save_run(fresh, model)
        operating.save_points(fresh, points)
        write_text(fresh / "recipe.yaml", yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
        write_text(fresh / "README.md", render_model_card(model, points, recipe))
    shutil.rmtree(partial, ignore_errors=True)


def model_source(name: str) -> str:
    """Return the folder of the model that is called `minilm` for short; other names stay as they are."""
    return bundled_model() if name == "minilm" else name
