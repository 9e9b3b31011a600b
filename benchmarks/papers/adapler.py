"""AdapLeR: do the tokens that a model keeps agree with the words that people marked?

    python benchmarks/papers/adapler.py DATA --model minilm --out runs/rationales

DATA is a folder with `train.jsonl` and `dev.jsonl` (or `.jsonl.gz`); each row has `tokens`, `rationale` (0 or 1 for
each token) and `label`. Two parts, either of which can be run alone with --part:

    agreement   the paper's Figure 5: average precision and false-positive rate of four importance measures, per layer
    selection   the paper's Table 2: fine-tuning on the words that people, saliency or attention choose

Finished parts and finished trainings are not repeated when the same command runs again.

Four measures give every token of a row a share of importance, layer by layer; the shares of a row sum to one: raw
attention and attention rollout (received from all tokens), saliency (gradient × state of the gold logit, at the states
that enter the layer) and the contribution predictors of an AdapLeR run (0 for tokens that were dropped). Word pieces
are summed to words. Average precision compares the scores; the false-positive rate counts words above the uniform
level 1/n, where n is the number of words and special tokens of the row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from offramp import __version__, engines, methods
from offramp.cli.printing.progress import TrainingDisplay
from offramp.commands.train import TrainRequest, run_training
from offramp.core.columns import ORIGIN
from offramp.core.loop import State, run
from offramp.core.policy import Policy
from offramp.data.readers import fingerprint, read_rows, require_columns
from offramp.data.tokenization import Encoded, encode_words
from offramp.errors import OfframpError
from offramp.evaluation.demo_data import bundled_model
from offramp.evaluation.result_cells import hardware, model_name
from offramp.inference import run_folder as folders
from offramp.inference.batching import score_policy
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import LoadedRun
from offramp.nn.batches import Batch, Data, build_batch
from offramp.nn.network import Network
from offramp.nn.token_scorers import token_shares
from offramp.training.forward import forward_all_layers
from offramp.training.saliency import saliencies
from offramp.training.schedule import Schedule
from offramp.utils.command_line import command_line, key_values
from offramp.utils.files import atomic_replace, read_json, write_json, write_text
from offramp.utils.run_paths import is_run

PROGRAM = "python benchmarks/papers/adapler.py"
ENDINGS = (".jsonl.gz", ".jsonl")
FULL_INPUT = "full input"
STRATEGIES = ("human", "saliency", "attention from all", "attention from [CLS]")
PARTS = ("agreement", "selection", "both")
Row = dict[str, Any]
Values = NDArray[np.float64]
Labels = NDArray[np.int64]
Train = Callable[[TrainRequest], Any]


# --- importance of tokens, one row at a time -------------------------------------------------------------------------


def attentions(network: Network, ids: list[int]) -> Tensor:
    """Return Hugging Face's own attention, averaged over heads."""  # [layers, queries, keys]
    model, before = network.hf, network.hf.config._attn_implementation
    model.set_attn_implementation("eager")  # the other implementations do not return attention
    try:
        with torch.no_grad():
            output = model(input_ids=torch.tensor([ids], device=network.device), output_attentions=True)
    finally:
        model.set_attn_implementation(before)
    return torch.stack([layer[0].mean(0) for layer in output.attentions])


def rollout(attention: Tensor) -> Tensor:
    """Return the attention to the input tokens through all lower layers, each mixed half with the identity."""
    mixed = (attention + torch.eye(attention.shape[-1], device=attention.device)) / 2
    flow = [mixed[0]]
    for layer in mixed[1:]:
        flow.append(layer @ flow[-1])
    return torch.stack(flow)  # [layers, tokens, input tokens]


def saliency_shares(network: Network, row: Batch) -> Tensor:
    """Return the saliency of the states that enter each layer."""  # [layers, tokens]
    raw = torch.stack(saliencies(network, row, list(range(network.depth))))
    return raw / raw.sum(1, keepdim=True).clamp(min=1e-30)


@dataclass
class RecordingPolicy(Policy):
    """Records what the contribution predictors return; another policy decides which tokens stay."""

    network: Network
    inner: Policy
    tokens: int
    recorded: list[Tensor] = field(default_factory=list)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        share = token_shares(self.network.predictor(layer, s.packed), s.packed)
        self.recorded.append(share.new_zeros(self.tokens).index_copy(0, s.packed.tokens[ORIGIN], share))
        return self.inner.before_layer(layer, s)


def predicted_shares(model: LoadedRun, row: Batch, scale: float) -> Tensor:
    """Return the predictors' shares before each layer, while tokens are dropped at this threshold scale."""
    network = model.network
    inner = model.method.policy(network, model.method.settings(scale=scale))
    recording = RecordingPolicy(network, inner, row.packed.total)
    with torch.no_grad():
        run(engines.make("torch", network.encoder), network, recording, row.packed)
    return torch.stack(recording.recorded)  # [layers, tokens]


# --- rows with human rationales --------------------------------------------------------------------------------------


def read_marked_rows(folder: str, split: str, limit: int | None) -> list[Row]:
    """Read and check the rows of a split."""
    found = [path for ending in ENDINGS if (path := Path(folder) / f"{split}{ending}").is_file()]
    if not found:
        given = f"no {split}.jsonl or {split}.jsonl.gz in {folder}"
        raise OfframpError("rows with human rationales", given, "give a folder with train and dev splits")
    rows = read_rows(str(found[0]), limit=limit)
    require_columns(rows, ["tokens", "rationale", "label"], str(found[0]))
    for number, row in enumerate(rows, 1):
        if len(row["tokens"]) != len(row["rationale"]) or not set(row["rationale"]) <= {0, 1}:
            given = f"row {number} of {found[0].name} with {len(row['tokens'])} tokens"
            raise OfframpError("a 0 or 1 for every token", given, "correct its rationale")
    return rows


@dataclass(frozen=True)
class MarkedRow:
    """An encoded row and the words that people marked in it."""

    encoded: Encoded
    marks: Labels  # [words that fit into the model]
    label: Any
    tokens: list[str]  # all its words

    @property
    def units(self) -> int:
        """The number of words and special tokens."""
        return len(self.marks) + sum(word < 0 for word in self.encoded.words)

    def word_scores(self, token_scores: Values) -> Values:
        """Sum the scores of word pieces to words."""  # [tokens] → [words]
        totals = np.zeros(len(self.marks))
        for word, value in zip(self.encoded.words, token_scores, strict=True):
            if word >= 0:
                totals[word] += value
        return totals


def encode_marked(model: LoadedRun, rows: Sequence[Row]) -> list[MarkedRow]:
    """Encode rows at the model's length; rows whose marked words are all cut off are left out."""
    encoded = encode_words(model.tokenizer, [row["tokens"] for row in rows], model.max_length)
    marked = []
    for item, row in zip(encoded, rows, strict=True):
        fitting = max(item.words, default=-1) + 1
        marks = np.array(row["rationale"][:fitting], dtype=np.int64)
        if marks.any():
            marked.append(MarkedRow(item, marks, row["label"], row["tokens"]))
    return marked


def one_row_batch(model: LoadedRun, row: MarkedRow) -> Batch:
    """Return a batch of one row with its label."""
    encoded = Encoded(row.encoded.ids, row.encoded.types, 0, row.encoded.words, [], 0)
    data = Data([{"label": row.label}], [encoded])
    return build_batch(model.network.task, data, [0], None).to(model.network.device)


def with_predicted_label(model: LoadedRun, row: MarkedRow) -> MarkedRow:
    """Return the row with the label that the model predicts."""
    network, single = model.network, one_row_batch(model, row)
    with torch.no_grad():
        states = forward_all_layers(network.encoder, single.packed).after(network.depth)
        logits = network(network.depth, states).float().cpu().numpy()
    (prediction,) = network.task.predictions([{"label": row.label}], [row.encoded], list(logits))
    return replace(row, label=prediction["label"])


# --- agreement with people -------------------------------------------------------------------------------------------


def average_precision(scores: Values, marks: Labels) -> float:
    """Return the mean precision over the recall steps of a ranking by score; equal scores are one step."""
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], np.cumsum(marks[order])
    last = np.append(np.nonzero(np.diff(ranked))[0], len(ranked) - 1)  # the end of each group of equal scores
    precision, recall = hits[last] / (last + 1), hits[last] / marks.sum()
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def false_positive_rate(scores: Values, marks: Labels, level: float) -> float:
    """Return the share of unmarked words that score above a level; 0 if every word is marked."""
    unmarked = marks == 0
    return float((scores[unmarked] > level).mean()) if unmarked.any() else 0.0


def importance_shares(full: LoadedRun, adapler: LoadedRun, row: MarkedRow, scale: float) -> dict[str, Values]:
    """Return the shares of tokens by measure."""  # each [layers, tokens]
    attention = attentions(full.network, row.encoded.ids)
    shares = {
        "saliency": saliency_shares(full.network, one_row_batch(full, row)),
        "attention": attention.mean(1),
        "attention rollout": rollout(attention).mean(1),
        "contribution predictors": predicted_shares(adapler, one_row_batch(adapler, row), scale),
    }
    return {name: values.double().cpu().numpy() for name, values in shares.items()}


def agreement(
    full: LoadedRun, adapler: LoadedRun, rows: Sequence[MarkedRow], scale: float
) -> dict[str, dict[str, list[float]]]:
    """Return mean average precision and false-positive rate per measure and layer."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for row in rows:
        for name, layers in importance_shares(full, adapler, row, scale).items():
            words = [row.word_scores(tokens) for tokens in layers]
            own = found.setdefault(name, {"average_precision": [], "false_positive_rate": []})
            own["average_precision"].append([average_precision(w, row.marks) for w in words])
            own["false_positive_rate"].append([false_positive_rate(w, row.marks, 1 / row.units) for w in words])
    return {
        name: {metric: [round(float(v), 6) for v in np.mean(values, axis=0)] for metric, values in own.items()}
        for name, own in found.items()
    }


def choose_words(full: LoadedRun, row: MarkedRow, strategy: str, use_label: bool) -> list[int]:
    """Return the words that a strategy keeps, as many as people marked, in their order.

    With `use_label` false, saliency is that of the model's own prediction, not of the gold label.
    """
    if strategy == "human":
        return [int(word) for word in np.nonzero(row.marks)[0]]
    if strategy == "saliency":
        labelled = row if use_label else with_predicted_label(full, row)
        scores = saliency_shares(full.network, one_row_batch(full, labelled))[0]
    else:
        flow = rollout(attentions(full.network, row.encoded.ids))[-1]
        scores = flow[0] if strategy == "attention from [CLS]" else flow.mean(0)
    words = row.word_scores(scores.double().cpu().numpy())
    return sorted(int(word) for word in np.argsort(-words, kind="stable")[: int(row.marks.sum())])


# --- the study: train what is needed, measure, write -----------------------------------------------------------------


@dataclass(frozen=True)
class RationaleStudy:
    """What is measured, with which model and training."""

    data: str
    out: str
    model: str
    max_length: int = 512
    limit: int | None = None  # rows of each split
    scale: float = 1.0  # of AdapLeR's thresholds while its predictors are recorded
    options: dict[str, Any] = field(default_factory=dict)  # of AdapLeR
    schedule: Schedule = field(default_factory=lambda: Schedule(epochs=5, batch_size=16))
    command: str = ""

    def path(self, *parts: str) -> Path:
        """Return a path inside the study's folder."""
        return Path(self.out).joinpath(*(part.replace(" ", "-").strip("[]").replace("[", "") for part in parts))


def check_options(study: RationaleStudy) -> None:
    """Refuse options and scales that AdapLeR does not take, before anything is written or trained."""
    method = methods.get("adapler")
    methods.configure(method.options, study.options, method.name)
    methods.configure(method.settings, {"scale": study.scale}, method.name)


def claim_folder(study: RationaleStudy) -> dict[str, list[Row]]:
    """Return the rows; refuse a folder that holds another study.

    The scale and the command may differ between calls, because they change no training.
    """
    check_options(study)
    rows = {split: read_marked_rows(study.data, split, study.limit) for split in ("train", "dev")}
    fingerprints = {split: fingerprint(split, own) for split, own in rows.items()}
    content = {**asdict(replace(study, out="", data="")), "rows": fingerprints}
    content["schedule"].pop("save_seconds")
    for name in ("scale", "command"):
        content.pop(name)
    path = study.path("study.json")
    if not path.is_file():
        write_json(path, content)
    elif {name: value for name, value in read_json(path).items() if name != "scale"} != content:  # older files have it
        fix = "choose another --out, or repeat the same command to continue"
        raise OfframpError(f"to write the study {study.out}", "a study of other rows or settings there", fix)
    return rows


def _jsonl(path: Path, rows: Sequence[Row]) -> str:
    if not path.is_file():
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def _trained(study: RationaleStudy, name: str, rows: Sequence[Row], train: Train, **more: Any) -> LoadedRun:
    """Load a finished run, or train or resume it first. Held-out rows choose its epoch."""
    out = study.path("runs", name)
    if not is_run(out):
        file = _jsonl(study.path("rows", f"{name}.jsonl"), rows)
        given = {"max_length": study.max_length, "schedule": study.schedule, **more}
        train(TrainRequest(model=study.model, train=file, out=str(out), **given))
    return folders.load_run(out)


def _texts(rows: Sequence[Row]) -> list[Row]:
    return [{"text": " ".join(row["tokens"]), "label": row["label"]} for row in rows]


def measure_agreement(study: RationaleStudy, train: Train) -> dict[str, Any]:
    """Measure the agreement of every importance measure with people, per layer (the paper's Figure 5)."""
    rows, path = claim_folder(study), study.path("agreement.json")
    result: dict[str, Any] = read_json(path) if path.is_file() else {}
    if result.get("scale") == study.scale:
        return result
    full = _trained(study, "full", _texts(rows["train"]), train)
    start = {"method": "adapler", "init": str(study.path("runs", "full")), "options": study.options}
    adapler = _trained(study, "adapler", _texts(rows["train"]), train, **start)
    dev = encode_marked(full, rows["dev"])
    found = agreement(full, adapler, dev, study.scale)
    result = {**_header(study, rows, len(dev)), "scale": study.scale, "techniques": found}
    draw_agreement(found, study.path("agreement.png"))
    write_json(path, result)
    return result


def measure_selection(study: RationaleStudy, train: Train) -> dict[str, Any]:
    """Fine-tune on the words that people, saliency or attention choose, and score (the paper's Table 2)."""
    rows, path = claim_folder(study), study.path("selection.json")
    if path.is_file():
        finished: dict[str, Any] = read_json(path)
        return finished
    full = _trained(study, "full", _texts(rows["train"]), train)
    marked = {split: encode_marked(full, own) for split, own in rows.items()}
    texts = {split: _kept_texts(full, own, None) for split, own in marked.items()}
    full_cost, table = _macs(full, texts["dev"]), {FULL_INPUT: _score(full, texts["dev"], rows["train"])}
    for strategy in STRATEGIES:
        files = {split: study.path("rows", f"{strategy} {split}.json") for split in marked}
        for split, file in files.items():
            if not file.is_file():
                write_json(file, _kept_texts(full, marked[split], strategy, use_label=split == "train"))
        own = _trained(study, strategy, read_json(files["train"]), train)
        table[strategy] = _score(own, read_json(files["dev"]), marked["train"])
    for cell in table.values():
        cell["mac_share"] = round(cell["mac_share"] / full_cost, 6)
    result = {**_header(study, rows, len(marked["dev"])), "strategies": table}
    write_json(path, result)
    return result


def _kept_texts(full: LoadedRun, rows: Sequence[MarkedRow], strategy: str | None, use_label: bool = True) -> list[Row]:
    """Return texts of the chosen words, or of all words that fit if there is no strategy."""
    texts = []
    for row in rows:
        words = range(len(row.marks)) if strategy is None else choose_words(full, row, strategy, use_label)
        texts.append({"text": " ".join(row.tokens[word] for word in words), "label": row.label})
    return texts


def _macs(model: LoadedRun, rows: Sequence[Row]) -> float:
    predictor = Predictor(model, engine="torch")
    return predictor.full_macs(predictor.prepare(rows, "rows"))


def _score(model: LoadedRun, rows: Sequence[Row], training_rows: Sequence[object]) -> dict[str, Any]:
    """Score a model on report rows. Rows without a marked word are not among the training rows."""
    predictor = Predictor(model, engine="torch")
    data = Data(rows, predictor.prepare(rows, "rows"))
    policy = model.method.policy(model.network, model.method.settings())
    metrics, _ = score_policy(model.network, predictor.engine, policy, data)
    accuracy = round(metrics["accuracy"], 6)
    return {"accuracy": accuracy, "mac_share": _macs(model, rows), "rows_trained_on": len(training_rows)}


def _header(study: RationaleStudy, rows: dict[str, list[Row]], used: int) -> dict[str, Any]:
    return {
        "data": Path(study.data).resolve().name,
        "split": "dev",
        "rows": used,
        "rows_without_marked_words": len(rows["dev"]) - used,
        "rows_trained_on": len(rows["train"]),
        "max_length": study.max_length,
        "model": model_name(study.model),
        "seed": study.schedule.seed,
        "epochs": study.schedule.epochs,
        "lr": study.schedule.lr,
        "batch_size": study.schedule.batch_size,
        "options": study.options,
        "command": study.command,
        "hardware": hardware(),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }


# --- pictures and tables ---------------------------------------------------------------------------------------------


def draw_agreement(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw both metrics over the layers, one line per measure."""
    figure = Figure(figsize=(7.2, 5.6), dpi=150, layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, metric, name in zip(panels, ("false_positive_rate", "average_precision"), ("FPR", "mAP"), strict=True):
        for measure, own in found.items():
            axes.plot(range(1, len(own[metric]) + 1), own[metric], "o-", markersize=4, label=measure)
        axes.set_ylabel(name)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_xlabel("layer")
    panels[0].legend(frameon=False, fontsize=8, ncols=2)
    canvas = FigureCanvasAgg(figure)
    with atomic_replace(path) as fresh, fresh.open("wb") as file:
        canvas.print_png(file)


def agreement_table(result: dict[str, Any]) -> Table:
    """Return a table with a line per measure and a column per layer."""
    first = next(iter(result["techniques"].values()))["average_precision"]
    table = Table(Column("mAP / FPR by layer", no_wrap=True), *map(str, range(1, len(first) + 1)))
    for name, own in result["techniques"].items():
        columns = zip(own["average_precision"], own["false_positive_rate"], strict=True)
        table.add_row(name, *(f"{precision:.3f} / {rate:.3f}" for precision, rate in columns))
    return table


def selection_table(result: dict[str, Any]) -> Table:
    """Return a table with a line per strategy."""
    table = Table("fine-tuned on", "accuracy", "share of compute")
    for name, cell in result["strategies"].items():
        table.add_row(name.replace("[", "\\["), f"{cell['accuracy']:.4f}", f"{cell['mac_share']:.3f}")
    return table


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("data", help="a folder with train and dev rows")
    options.add_argument("--out", required=True, help="where runs, tables and the picture are written")
    options.add_argument("--model", required=True, help="a model folder, a hub name, or `minilm` for the bundled one")
    options.add_argument("--part", default="both", choices=PARTS)
    options.add_argument("--epochs", type=int, default=5, help="epochs of each stage of each run")
    options.add_argument("--batch-size", type=int, default=16)
    options.add_argument("--lr", type=float, default=5e-5, help="learning rate of the pretrained part")
    options.add_argument("--max-length", type=int, default=512, help="longest row in tokens")
    options.add_argument("--limit", type=int, help="use only the first N rows of each split")
    options.add_argument("--scale", type=float, default=1.0, help="of AdapLeR's thresholds, for the agreement")
    options.add_argument("--seed", type=int, default=42)
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of AdapLeR")
    return options


def train_with_progress(request: TrainRequest) -> Any:
    """Train a run and show its progress on standard error."""
    print(f"training {request.out}", file=sys.stderr, flush=True)
    with TrainingDisplay(request.schedule.epochs) as display:
        return run_training(request, False, display.report)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts of the study and print their tables."""
    options, console = parser().parse_args(arguments), Console()
    try:
        study = RationaleStudy(
            data=options.data,
            out=options.out,
            model=bundled_model() if options.model == "minilm" else options.model,
            max_length=options.max_length,
            limit=options.limit,
            scale=options.scale,
            options=dict(key_values(options.set, "--set")),
            schedule=Schedule(options.epochs, options.batch_size, options.lr, seed=options.seed),
            command=command_line(PROGRAM),
        )
        if options.part != "selection":
            console.print(agreement_table(measure_agreement(study, train_with_progress)))
        if options.part != "agreement":
            console.print(selection_table(measure_selection(study, train_with_progress)))
    except OfframpError as error:
        sys.exit(str(error))
    console.print(f"written to {options.out}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
