"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from offramp.errors import OfframpError
from offramp.utils.cache_folder import VARIABLE
from offramp.utils.run_paths import is_hub_name, working_folder

BUDGET = "share of the full model's compute, above 0 and at most 1; without any budget the run's default"
Run = Annotated[str, typer.Argument(help="a folder that `offramp train` or `offramp attach` wrote")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="a setting of the method as key=value; may be repeated")]
Columns = Annotated[
    list[str] | None, typer.Option("--column", help="read a column by another name: text=sentence; may be repeated")
]
Budget = Annotated[float | None, typer.Option(help=BUDGET)]
TRAINING_BATCH = "rows in a batch; of translations: rows of mean length"
BatchSize = Annotated[int, typer.Option(min=1, help="rows of 64 tokens in a batch; a batch of shorter rows holds more")]
MaxLoss = Annotated[float | None, typer.Option(help="instead of a budget: what the metric may lose, e.g. 0.01")]
Risk = Annotated[float | None, typer.Option(help="instead of a budget: a risk that `calibrate --risk` has proven")]
Latency = Annotated[
    str | None, typer.Option(help="instead of a budget: a time that `calibrate --latency` has met, e.g. 5ms")
]
MaxDisagreement = Annotated[
    float | None,
    typer.Option(help="instead of a budget: how often an answer may differ from the full model's, e.g. 0.01"),
]
Limit = Annotated[int | None, typer.Option(min=1, help="use only the first N rows")]
Engine = Annotated[str, typer.Option(help="how layers are executed: auto, native, openvino or torch")]
Precision = Annotated[str, typer.Option(help="precision of the layers: fp32, bf16 or int8 (not torch on a CPU)")]
Threads = Annotated[int | None, typer.Option(min=1, help="processor threads; all cores if left out")]
Cache = Annotated[
    str | None,
    typer.Option(
        help="where compiled graphs are kept: a folder, or none; if left out, the user's cache folder",
        callback=lambda value: use_cache(value),
    ),
]
Json = Annotated[str | None, typer.Option("--json", help="write the result to this file")]


def use_cache(value: str | None) -> str | None:
    """Use a cache folder in this process and those that it starts."""
    if value is not None:
        os.environ[VARIABLE] = value
    return value


def comma_list(text: str) -> tuple[str, ...]:
    """Return the words of `a,b`, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def comma_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Return the whole numbers of `1,8,32`, each once."""
    try:
        return tuple(int(word) for word in comma_list(text))
    except ValueError as error:
        raise OfframpError(f"whole numbers for {flag}", repr(text), f"write {flag} 1,8,32") from error


def check_run(run: str) -> None:
    """Refuse a run folder that does not exist before torch is imported; later: names on the hub, unfinished runs."""
    if _is_missing(run):
        fix = "give the folder that --out of `offramp train` or `offramp attach` named"
        raise OfframpError(f"the run folder {run!r}", "no such folder", fix)


def check_model(model: str) -> None:
    """Refuse a path of a model that does not exist before torch is imported; names without a slash are on the hub."""
    if "/" in model and _is_missing(str(Path(model).expanduser())):
        fix = "give a folder with config.json, or a name on the hub"
        raise OfframpError(f"the model {model!r}", "no such folder", fix)


def check_data_folder(folder: str) -> None:
    """Refuse a folder of data sets that does not exist before torch is imported."""
    if _is_missing(folder):
        raise OfframpError(f"data sets in {folder!r}", "no such folder", "give a folder with NAME/train.jsonl")


def _is_missing(folder: str) -> bool:
    return not is_hub_name(folder) and not Path(folder).exists() and not working_folder(Path(folder)).exists()
