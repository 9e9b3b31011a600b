"""`offramp train` as a function: read rows, build the network, train, calibrate, write the run folder.

Work happens in a folder beside `out`; the finished run takes its place in one step.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml

from offramp import __version__, methods, tasks
from offramp.calibration.calibrate import calibration_subset, find_operating_points
from offramp.calibration.loss_bounds import CONFIDENCE, check_confidence
from offramp.calibration.usefulness import distrust
from offramp.commands import recipes
from offramp.commands.attach import AttachRequest, run_attach
from offramp.data import readers as reading
from offramp.data.overlap import (
    MOST_ROWS,
    TrainingMarks,
    row_marks,
    training_marks,
    training_rows_reason,
    write_training_marks,
)
from offramp.data.tokenization import max_tokens
from offramp.data.tokenizer_training import train_wordpiece_tokenizer
from offramp.errors import OfframpError
from offramp.evaluation.demo_data import MINILM, bundled_model
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.batching import score_for_training
from offramp.inference.finetuned import trained_head
from offramp.inference.model_card import render_model_card
from offramp.inference.new_model import build_translation_model, create_model, is_model_configuration
from offramp.inference.operating_points import OperatingPoints
from offramp.inference.run_folder import LoadedRun
from offramp.methods import Method
from offramp.nn.batches import Data
from offramp.tasks import Task
from offramp.training import checkpoint
from offramp.training.processes import is_main_process, wait_for_everyone
from offramp.training.run_lock import check_output_free, locked_working_folder, working_folder
from offramp.training.stage import Stage, mark_later_stages
from offramp.training.trainer import Schedule, Trainer
from offramp.utils.command_line import model_name_of, short_path
from offramp.utils.files import atomic_replace, check_not_input, write_json, write_text
from offramp.utils.run_paths import is_run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOSS_CURVE = "losses.json"  # of a run: the mean training loss in each part of every stage
FROM_SCRATCH_EMBEDDING_LR = 2e-3
TrainingListener = Callable[..., None]  # receives what happens during training as keyword arguments


@dataclass(frozen=True)
class NewModel:
    """How to create the model to train when it starts from random weights; the request's `model` is its family."""

    tokenizer: str | None = None  # a folder or a hub name; None: learned from the training rows
    vocabulary: int = 8000  # tokens of a tokenizer that is learned
    shape: Mapping[str, str] = field(default_factory=dict)  # entries of the family's config.json


@dataclass(frozen=True)
class TrainRequest:
    """Everything that decides the result of training; it is written to recipe.yaml."""

    model: str
    train: str
    out: str
    task: str = tasks.FALLBACK
    method: str = "full"
    dev: str | None = None
    dev_split: float = 0.1
    init: str | None = None
    max_length: int | None = None
    limit: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    new_model: NewModel | None = None
    loss_confidence: float = CONFIDENCE  # of the bounds on what operating points lose
    metric: str | None = None  # None: the task's first


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its folder, the model in memory, its operating points, and metrics of every epoch."""

    folder: Path
    model: LoadedRun
    points: OperatingPoints
    log: list[dict[str, Any]]


def train(
    *,
    model: str | Path | None = None,
    train: str | Path,
    out: str | Path,
    task: str | None = None,
    method: str | None = None,
    metric: str | None = None,
    dev: str | Path | None = None,
    dev_split: float = 0.1,
    init: str | Path | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    later_lr: float | None = None,
    embedding_lr: float | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    seed: int = 42,
    precision: Literal["auto", "bf16", "fp32"] = "auto",
    save_seconds: float = 120.0,
    snapshots: int = 0,
    recipe: str | None = None,
    columns: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    from_scratch: bool = False,
    tokenizer: str | Path | None = None,
    vocabulary: int | None = None,
    shape: Mapping[str, Any] | None = None,
    loss_confidence: float = CONFIDENCE,
    attach: str | Path | None = None,
    force: bool = False,
    listener: TrainingListener = lambda **_: None,
) -> TrainedRun:
    """Fine-tune a model with exits (or with token dropping), calibrate it and write a run folder.

        run = offramp.train(model="minilm", train="train.jsonl", out="runs/mine", method="deebert", epochs=3)
        run.points.full_point.score, run.folder
        offramp.load("runs/mine").predict(["a fine film"], budget=0.5)

    Training that was interrupted is continued by the same call.

    Args:
        model: a folder, a hub name, or "minilm"; a .json configuration of a translation model to create. It need not
            be given beside `init`. The head of a fine-tuned model is kept if the rows have its labels.
        train: rows: .jsonl, .csv, .tsv or .parquet (also .gz), SQuAD's .json, or the name of a data set on the hub.
        out: where the run folder is written.
        task: classification, multi_label, regression, tagging, question_answering, masked_lm or translation; by
            default that of `init`, else the one that the first rows look like, by their columns and labels.
        method: a method by name ("full" is plain fine-tuning); or two in one, "length_adaptive+branchynet". By default
            "auto": the one that did best on rows like these (docs/auto.md); the run folder names it.
        metric: what epochs and operating points are chosen by; of classification "accuracy" (the default), "f1" or
            "matthews". Only losses of accuracy are bounded; those of the others are estimates.
        dev: rows to choose epochs and operating points on.
        dev_split: the share of the training rows that is held out when there is no `dev`.
        init: a run folder of the same task whose fine-tuned weights to start from.
        epochs, batch_size, lr: of each stage, 3, 32 and 5e-5 by default; `lr` is that of the pretrained part.
        later_lr: that of stages after plain fine-tuning, by default 0.3 · `lr` (in some methods all of it), as they
            see the same rows again; with a recipe `lr`: the papers have one rate.
        embedding_lr: learning rate of the embedding tables; by default `lr`, but 2e-3 where a backbone that began from
            scratch is fine-tuned: its embeddings are large after pretraining, and `lr` would hardly turn them.
        max_length: the longest row in tokens.
        limit: use only the first training rows.
        seed: seed of all random numbers.
        precision: of training; "auto" is bf16 where the processor multiplies it natively.
        save_seconds: seconds between checkpoints.
        snapshots: how many times in each stage the weights are kept in the run's folder `snapshots`; 4: each quarter.
        recipe: published settings by name, "adapler/agnews"; arguments that are given win over it.
        columns: columns of the files by the names that the task expects, e.g. {"text": "sentence"}.
        options: options of the method by name, e.g. {"pool": "mean"}.
        from_scratch: create the model with random weights; `model` is then a family such as "bert".
        tokenizer: of a model from scratch: the model whose tokenizer to take; learned from the rows if left out.
        vocabulary: of a model from scratch: size of the vocabulary that is learned, 8000 by default.
        shape: of a model from scratch: entries of the family's config.json, e.g. {"hidden_size": 256}.
        loss_confidence: with which a point that is chosen by `max_loss` loses no more than that on new rows.
        attach: texts, with or without labels, to end in `offramp.attach` with: the plain run is written to `out`-full,
            and `out` holds the same model with exits that learned its answers on the texts.
        force: replace what is in `out`.
        listener: receives the progress as keyword arguments.
    """
    if model is None:
        model = _model_of_run(init)
    if task is None and not recipe:
        task = _guess_task(str(train), columns or {}, init, limit)
    arguments = {"method": method, "task": task, "epochs": epochs, "batch_size": batch_size, "lr": lr}
    arguments["max_length"] = max_length
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    if recipe:
        plan = recipes.load_recipe(recipe).override(given, options or {})
        later_lr = plan.lr if later_lr is None else later_lr
    else:
        plan = recipes.Recipe(**{"method": methods.AUTO, **given}, options=options or {})
    schedule = Schedule(
        plan.epochs,
        plan.batch_size,
        plan.lr,
        plan.warmup,
        plan.weight_decay,
        seed=seed,
        precision=precision,
        later_lr=later_lr or 0.0,
        embedding_lr=0.0 if embedding_lr is None else embedding_lr,
        save_seconds=save_seconds,
        snapshots=snapshots,
    )
    request = TrainRequest(
        model=str(model) if from_scratch else model_source(str(model)),
        train=str(train),
        out=str(out),
        task=plan.task,
        method=plan.method,
        dev=None if dev is None else str(dev),
        dev_split=dev_split,
        init=None if init is None else str(init),
        max_length=plan.max_length,
        limit=limit,
        columns=columns or {},
        options=plan.options,
        schedule=schedule,
        new_model=_new_model(from_scratch, str(model), init, tokenizer, vocabulary, shape),
        loss_confidence=loss_confidence,
        metric=metric,
    )
    if embedding_lr is None:
        request = replace(request, schedule=replace(schedule, embedding_lr=_embedding_rate(request)))
    if attach is not None:
        return _train_then_attach(request, str(attach), force, listener)
    return run_training(request, force, listener)


def _embedding_rate(request: TrainRequest) -> float:
    """Return the learning rate of the embedding tables where none is given; 0: that of the other parameters."""
    task = tasks.get(request.task)
    if task.over_vocabulary and task.kind == "token":  # pretraining: the tables are the output layer too
        return 0.0
    source = Path(request.init or request.model)
    earlier = folders.read_recipe(source) if is_run(source) else {}
    inherited = float((earlier.get("schedule") or {}).get("embedding_lr", 0.0))
    from_scratch = request.new_model is not None or "new_model" in earlier
    return max(inherited, FROM_SCRATCH_EMBEDDING_LR if from_scratch else 0.0)


def _train_then_attach(request: TrainRequest, text: str, force: bool, listener: TrainingListener) -> TrainedRun:
    """Fine-tune plainly into a folder beside `out`, or take the one that is there, then attach exits with the texts."""
    if request.method not in ("full", methods.AUTO):
        given = f"--method {request.method} and --attach {text}"
        raise OfframpError("plain fine-tuning that ends in attach", given, "leave out one of the two")
    check_output_free(Path(request.out), force)
    check_not_input(request.out, text, request.train, request.dev, request.init, request.model)
    first = replace(request, out=f"{request.out.rstrip('/')}-full", method="full")
    log = _log_of_same(first)
    if log is None:
        log = run_training(first, force, listener).log
    wait_for_everyone()
    listener(attaching=text)
    wanted = AttachRequest(
        first.out, text, request.out, labels=request.dev, columns=request.columns, seed=request.schedule.seed
    )
    if not is_main_process():  # exits are attached by the main process alone
        wait_for_everyone()
        folder = Path(request.out)
        return TrainedRun(folder, folders.load_run(folder), operating.load_points(folder), log)
    run = run_attach(replace(wanted, max_length=request.max_length), force)
    wait_for_everyone()
    return TrainedRun(run.folder, run.model, run.points, log)


def _log_of_same(request: TrainRequest) -> list[dict[str, Any]] | None:
    """Return the log of a finished run that this request would train again; None where there is none."""
    if not is_run(Path(request.out)):
        return None
    stored, wanted = folders.read_recipe(request.out), _recipe(request, read_training_rows(request))
    same = all(stored.get(name) == value for name, value in yaml.safe_load(yaml.safe_dump(wanted)).items())
    return list(stored["log"]) if same else None


def _model_of_run(init: str | Path | None) -> str:
    """Return the model that an earlier run started from."""
    if init is None:
        raise OfframpError("a model to train", "neither --model nor --init", "give --model minilm, for example")
    return str(folders.read_description(init)["base_model"])


def _guess_task(train: str, columns: Mapping[str, str], init: str | Path | None, limit: int | None) -> str:
    """Return the task of the run to start from, or the one that the first rows look like."""
    if init is not None and is_run(Path(init)):
        return str(folders.read_description(init)["task"]["name"])
    if not Path(train).is_file():  # standard input can be read once only
        return tasks.FALLBACK
    return tasks.name_for_rows(reading.stream_rows(train, columns=columns, limit=limit))


def _new_model(
    from_scratch: bool,
    model: str,
    init: str | Path | None,
    tokenizer: str | Path | None,
    vocabulary: int | None,
    shape: Mapping[str, Any] | None,
) -> NewModel | None:
    """Return how to create a model from scratch; refuse arguments that contradict each other."""
    chosen = {"--tokenizer": tokenizer, "--vocabulary": vocabulary, "--shape": shape or None}
    named = [flag for flag, value in chosen.items() if value is not None]
    if named and (not from_scratch or is_model_configuration(model)):
        given = f"{' and '.join(named)} for {model}, which is not created from a family's name"
        raise OfframpError("a model from scratch", given, "add --from-scratch and name a family: --model bert")
    if not from_scratch or is_model_configuration(model):  # a .json file is a model from scratch anyway
        return None
    if init is not None:
        raise OfframpError("a model from scratch", f"--init {init}", "give --from-scratch or --init")
    if tokenizer is not None and vocabulary is not None:
        given = "both --tokenizer and --vocabulary"
        raise OfframpError("a tokenizer for the new model", given, "give --vocabulary only where one is learned")
    entries = {name: str(value) for name, value in (shape or {}).items()}
    return NewModel(None if tokenizer is None else model_source(str(tokenizer)), vocabulary or 8000, entries)


@dataclass(frozen=True)
class TrainingRows:
    """The rows to train on and to choose on, and the task that they define."""

    task: Task
    train: list[dict[str, Any]]
    dev: list[dict[str, Any]]
    dev_name: str
    file_mark: str  # fingerprint of all rows of the training file, before any were held out
    labelled: bool = True  # the training rows; dev rows always are


def read_training_rows(request: TrainRequest) -> TrainingRows:
    """Read and check all rows of the files; then hold some out, if there is no dev file."""
    kind, rows = tasks.get(request.task), reading.read_rows(request.train, columns=request.columns, limit=request.limit)
    if request.init and kind.target and all(row.get(kind.target) is None for row in rows):
        return _unlabelled(request, kind, rows)
    task, mark = _with_metric(request, kind.from_rows(rows, request.train)), reading.fingerprint(request.train, rows)
    if request.dev is not None:
        dev = reading.read_rows(request.dev, columns=request.columns)
        task.check_rows(dev, request.dev)
        return TrainingRows(task, rows, dev, request.dev, mark)
    if not 0.0 < request.dev_split < 1.0:
        raise OfframpError("a share of the rows to hold out", f"--dev-split {request.dev_split}", "give e.g. 0.1")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(request.schedule.seed)).tolist()
    held = max(1, round(len(rows) * request.dev_split))
    if held >= len(rows):
        raise OfframpError("rows to train on", f"{len(rows)} rows in {request.train}", "give more rows, or --dev FILE")
    name = f"{request.train} ({request.dev_split:g} held out, seed {request.schedule.seed})"
    return TrainingRows(task, [rows[i] for i in order[held:]], [rows[i] for i in order[:held]], name, mark)


def _with_metric(request: TrainRequest, task: Task) -> Task:
    return task if request.metric is None else task.with_metric(request.metric)


def _unlabelled(request: TrainRequest, kind: type[Task], rows: list[dict[str, Any]]) -> TrainingRows:
    """Check rows without labels, on which the predictions of an earlier run are learned; the task is that run's."""
    task = _with_metric(request, folders.task_from_description(folders.read_description(request.init or "")))
    if not isinstance(task, kind) or request.dev is None:
        given = f"rows without {kind.target!r} in {request.train}" + (" and no --dev" if request.dev is None else "")
        raise OfframpError("to train without labels", given, "give labelled rows with --dev, and the task of --init")
    task.check_inputs(rows, request.train)
    dev = reading.read_rows(request.dev, columns=request.columns)
    task.check_rows(dev, request.dev)
    return TrainingRows(task, rows, dev, request.dev, reading.fingerprint(request.train, rows), labelled=False)


def run_training(
    request: TrainRequest, force: bool = False, listener: TrainingListener = lambda **_: None
) -> TrainedRun:
    """Train a method and write its run folder; a request that was interrupted is continued."""
    check_confidence(request.loss_confidence)
    if request.method != methods.AUTO:
        _configured(request)  # refused before any rows are read
    check_output_free(Path(request.out), force)
    check_not_input(request.out, request.train, request.dev, request.init, request.model)
    _check_init(request)
    rows, auto = read_training_rows(request), request.method == methods.AUTO
    if auto:
        request, reason = _with_chosen_method(request, rows)
        listener(chosen_method=request.method, reason=reason)
    method, options = _configured(request)
    recipe = {**_recipe(request, rows), **({"auto": reason} if auto else {})}
    if request.init is None and request.new_model is None and (head := trained_head(request.model)) is not None:
        listener(trained_head=head, model=request.model)
    learned = request.new_model is not None and request.new_model.tokenizer is None
    if learned and not is_main_process():
        wait_for_everyone()  # until the main process has written the tokenizer that all take
    model = build_model(request, method, options, rows)
    stages = _stages(request, model)
    if not rows.labelled and any(stage.needs_labels for stage in stages):
        rows.task.check_rows(rows.train, request.train)  # its message names the missing column
    train_data = replace(_encode(model, rows.train, request.train), labelled=rows.labelled)
    dev_data = _encode(model, rows.dev, rows.dev_name)
    paths = [request.model, request.train, request.dev, request.init]  # two models may share their short names
    with locked_working_folder(Path(request.out), {**recipe, "paths": paths}, force) as partial:
        if (partial / checkpoint.CHECKPOINT_FILE).is_file():
            listener(resuming=request.out)
        elif learned and is_main_process():
            with atomic_replace(_learned_tokenizer_folder(request, rows)) as fresh:
                model.tokenizer.save_pretrained(fresh)
        if learned and is_main_process():
            wait_for_everyone()
        listener(
            rows=len(rows.train),
            dev=len(rows.dev),
            cut=train_data.truncated_rows + dev_data.truncated_rows,
            max_length=model.max_length,
            epochs=request.schedule.epochs,
        )
        trainer = Trainer(model.network, request.schedule, partial, score_for_training, listener)
        progress = trainer.fit(stages, train_data, dev_data)
        chosen_on = calibration_subset(method, dev_data)
        listener(choosing=len(chosen_on.rows))
        dev_name = short_path(rows.dev_name)
        points = find_operating_points(
            model.network,
            method,
            chosen_on,
            dev_name,
            recipe["dev_fingerprint"],
            loss_confidence=request.loss_confidence,
        )
        marks = training_marks(row_marks(rows.train, rows.task.input_columns))
        overlap = marks.share_of(row_marks(rows.dev, rows.task.input_columns))
        if overlap > MOST_ROWS:
            points = distrust(points, training_rows_reason(overlap))
        if trainer.accelerator.is_main_process:
            for warning in points.warnings:
                warnings.warn(warning, stacklevel=2)
            write_json(partial / LOSS_CURVE, {"stages": progress.loss_curve()})
            results = {"processes": trainer.world, "seconds": progress.seconds, "log": progress.log}
            _publish(Path(request.out), partial, model, points, {**recipe, **results}, marks)
        trainer.accelerator.wait_for_everyone()
    return TrainedRun(Path(request.out), model, points, progress.log)


def _configured(request: TrainRequest) -> tuple[Method, Any]:
    """Return the method of a request and its options."""
    method = methods.get(request.method)
    return method, methods.configure(method.options, dict(request.options), method.name)


def _with_chosen_method(request: TrainRequest, rows: TrainingRows) -> tuple[TrainRequest, str]:
    """Return the request with the method that suits the rows, and why; options that were given win."""
    chosen = methods.choose_method(rows.task, rows.train, request.max_length, rows.labelled)
    options = {**chosen.options, **request.options}
    return replace(request, method=chosen.method, options=options), chosen.reason


def _check_init(request: TrainRequest) -> None:
    """Refuse a plain fine-tuned model as --init with what to do instead."""
    if request.init is None or is_run(Path(request.init)) or not (Path(request.init) / "config.json").is_file():
        return
    if trained_head(request.init) is not None:
        given = f"{request.init}, a fine-tuned model that is no Offramp run"
        fix = f"run `offramp attach {request.init} --text FILE` to give it exits, or start from it with --model"
        raise OfframpError("to start from an earlier run", given, fix)


def build_model(request: TrainRequest, method: Method, options: Any, rows: TrainingRows) -> LoadedRun:
    """Build the network to train: from a pretrained model, from an earlier run's weights, or from scratch."""
    if request.new_model is not None:
        with tempfile.TemporaryDirectory() as folder:
            created = _create(request.new_model, request, rows, Path(folder) / "model")
            built = build_model(replace(request, model=str(created), new_model=None), method, options, rows)
        return replace(built, base_model=request.model)
    source, base = request.init or request.model, request.model
    earlier = folders.read_description(request.init) if request.init else None
    if is_model_configuration(source):
        torch.manual_seed(request.schedule.seed)
        hf, tokenizer = build_translation_model(source, rows.task, rows.train)
        task, fresh = rows.task.with_tokenizer(tokenizer), frozenset[str]()
    else:
        folders.check_backbone(source)
        tokenizer = folders.load_tokenizer(source)
        task, unfit = folders.task_with_model_labels(source, rows.task)
        task = task.with_tokenizer(tokenizer)
        if earlier is not None:
            _check_same_task(earlier, task, source)
            base = earlier["base_model"]  # --model only names what the first run started from
        torch.manual_seed(request.schedule.seed)
        hf, fresh = folders.load_backbone_and_missing(source, task, complete=request.init is not None)
        folders.check_tokenizer_size(tokenizer, hf, source)
        if unfit is not None:
            fresh |= folders.renew_head(hf)
            _warn_of_new_head(source, unfit)
    net = folders.build_network(hf, task, method, options, fresh)
    if earlier is not None and (request.model != earlier["base_model"] or _can_be_read(request.model)):
        net = replace(net, base_source=request.model)
    if request.init is None or net.decoder is not None:  # a decoder's exits may have vocabularies of their own
        folders.reuse_added_modules(net, method, source)
    longest = max_tokens(tokenizer, net.encoder.positions, request.max_length)
    return LoadedRun(net, tokenizer, method, options, longest, model_name_of(base))


def _can_be_read(model: str) -> bool:
    """Return whether the name that a run folder holds leads to a model: a folder, or `user/name` on the hub."""
    return Path(model).is_dir() or "/" in model


def _warn_of_new_head(source: str, reason: str) -> None:
    keep = f"to keep it, with its own labels, run `offramp attach {source} --text FILE --out RUN`"
    warnings.warn(f"the head of {source} does not fit these rows and starts anew: {reason}; {keep}", stacklevel=3)


def _create(new: NewModel, request: TrainRequest, rows: TrainingRows, folder: Path) -> Path:
    """Write a model with random weights and its tokenizer to a folder."""
    if new.tokenizer is not None:
        tokenizer = folders.load_tokenizer(new.tokenizer)
    else:
        tokenizer = _learned_tokenizer(rows, new.vocabulary, request)
    create_model(request.model, folder, tokenizer, new.shape, request.schedule.seed)
    return folder


def _learned_tokenizer(rows: TrainingRows, vocabulary: int, request: TrainRequest) -> PreTrainedTokenizerBase:
    """Learn a tokenizer from the texts of the training rows, or return that of the training which is continued.

    Another version of `tokenizers` may learn other pieces, and then the weights of a checkpoint would not fit them.
    """
    kept = _learned_tokenizer_folder(request, rows)
    if kept.is_dir():
        return folders.load_tokenizer(str(kept))
    texts = list(_texts(rows))
    if not texts:
        raise OfframpError("texts to learn a tokenizer from", f"none in {request.train}", "give --tokenizer minilm")
    return train_wordpiece_tokenizer(texts, vocabulary)


def _learned_tokenizer_folder(request: TrainRequest, rows: TrainingRows) -> Path:
    """Return where a training from scratch keeps its tokenizer; other rows or sizes have another folder."""
    vocabulary = request.new_model.vocabulary if request.new_model is not None else 0
    name = f"tokenizer-{rows.file_mark}-{len(rows.train)}-{vocabulary}"
    return working_folder(Path(request.out)) / name


def _texts(rows: TrainingRows) -> Iterator[str]:
    for row in rows.train:
        for column in rows.task.input_columns:
            value = row.get(column)
            yield from [value] if isinstance(value, str) else value or []


def _stages(request: TrainRequest, model: LoadedRun) -> list[Stage]:
    """Return the stages to train: without the fine-tuning an earlier run did, and without exits that need none."""
    every = model.method.stages(model.network, model.options)
    mark_later_stages(every)
    stages = [stage for stage in every if stage.trainable()]
    earlier = folders.read_description(request.init) if request.init else None
    return [stage for stage in stages if earlier is None or not stage.is_done_in(earlier)] or stages


def _check_same_task(about: Mapping[str, Any], task: Task, run: str) -> None:
    """Refuse to start from a run of another task or other labels, or one whose full model was never trained."""
    trained, wanted = about["task"], {"name": task.name, **task.to_json()}
    if not methods.get(about["method"]).hf_equal:
        given = f"{run}, a run of {about['method']!r}, whose full model was never trained"
        raise OfframpError("to start from an earlier run", given, "give a run of another method, e.g. full")
    differing = [key for key in wanted if key != "metric" and _written(trained.get(key)) != _written(wanted[key])]
    if differing:
        listed = "; ".join(f"{key} {str(trained.get(key))[:200]}, here {str(wanted[key])[:200]}" for key in differing)
        raise OfframpError(
            "to start from an earlier run",
            f"{run}, which was trained for other answers: {listed}",
            "use the same task and labels, or leave --init out",
        )


def _written(value: Any) -> Any:
    """Return a value with labels as their texts: a model of transformers has "1" where rows have 1."""
    return [str(one) for one in value] if isinstance(value, list) else value


def _encode(model: LoadedRun, rows: list[dict[str, Any]], source: str) -> Data:
    encoded = model.network.task.encode(model.tokenizer, rows, model.max_length)
    model.network.task.check_encoded(encoded, model.max_length, source)
    return Data(rows, encoded)


def _recipe(request: TrainRequest, rows: TrainingRows) -> dict[str, Any]:
    named = replace(request, columns=dict(request.columns), options=dict(request.options))
    recipe = asdict(replace(named, **_names_only(request)))
    for name in ("save_seconds", "snapshots"):  # these and the folder do not change the result
        recipe["schedule"].pop(name)
    recipe.pop("out")
    for name in ("new_model", "metric"):
        if recipe[name] is None:
            recipe.pop(name)
    if request.loss_confidence == CONFIDENCE:  # recipes of before have no such line
        recipe.pop("loss_confidence")
    train, dev = reading.fingerprint(request.train, rows.train), reading.fingerprint(rows.dev_name, rows.dev)
    marks = {"train_fingerprint": train, "dev_fingerprint": dev, "file_fingerprint": rows.file_mark}
    return {**recipe, **marks, "offramp": __version__}


def _names_only(request: TrainRequest) -> dict[str, Any]:
    """Return the sources of a request without the folders of this machine, for files that others read."""
    sources = {"train": request.train, "dev": request.dev, "init": request.init}
    named: dict[str, Any] = {name: short_path(source) for name, source in sources.items() if source is not None}
    named["model"] = model_name_of(request.model)
    new = request.new_model
    if new is not None and new.tokenizer is not None:
        named["new_model"] = replace(new, tokenizer=short_path(new.tokenizer))
    return named


def _publish(
    out: Path,
    partial: Path,
    model: LoadedRun,
    points: OperatingPoints,
    recipe: dict[str, Any],
    marks: TrainingMarks,
) -> None:
    """Write the finished folder, which takes its place in one step; then remove the unfinished one."""
    with atomic_replace(out) as fresh:
        folders.save_run(fresh, model)
        operating.save_points(fresh, points)
        write_training_marks(fresh, marks)
        write_text(fresh / "recipe.yaml", yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
        write_text(fresh / "README.md", render_model_card(model, points, recipe))
        shutil.copy(partial / LOSS_CURVE, fresh / LOSS_CURVE)
        if (partial / checkpoint.SNAPSHOTS).is_dir():
            shutil.copytree(partial / checkpoint.SNAPSHOTS, fresh / checkpoint.SNAPSHOTS)
    shutil.rmtree(partial, ignore_errors=True)


def model_source(name: str) -> str:
    """Return the folder of the model that is called `minilm` for short; other names stay as they are."""
    return bundled_model() if name in ("minilm", MINILM) else name
