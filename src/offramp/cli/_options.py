"""What commands share: options under one name, and how key=value is read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from offramp.errors import OfframpError

BUDGET = "share of the full model's compute, above 0 and at most 1; else what loses at most half a point"
Run = Annotated[str, typer.Argument(help="a folder that `offramp train` wrote")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="a setting as key=value; may be repeated")]
Columns = Annotated[list[str] | None, typer.Option("--column", help="rename a column: text=sentence; may be repeated")]
Budget = Annotated[float | None, typer.Option(help=BUDGET)]
BatchSize = Annotated[int, typer.Option(min=1, help="rows in a batch, if they have 64 tokens; of short ones more")]
MaxLoss = Annotated[float | None, typer.Option(help="instead of a budget: what the metric may lose, e.g. 0.01")]
Risk = Annotated[float | None, typer.Option(help="instead of a budget: a risk that `calibrate --risk` has proven")]
Latency = Annotated[str | None, typer.Option(help="instead of a budget: a time that `calibrate --latency` met, 5ms")]
Limit = Annotated[int | None, typer.Option(min=1, help="use only the first N rows")]
Engine = Annotated[str, typer.Option(help="how layers are executed: auto, openvino or torch")]
Precision = Annotated[str, typer.Option(help="of layers: fp32, bf16 or int8 (openvino)")]
Threads = Annotated[int | None, typer.Option(min=1, help="processor threads; all cores if left out")]
Json = Annotated[str | None, typer.Option("--json", help="write the result cell here")]


def pairs(given: list[str] | None, flag: str) -> dict[str, str]:
    pairs = {}
    for item in given or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise OfframpError(f"{flag} key=value", repr(item), f"write it as {flag} name=value")
        pairs[key] = value
    return pairs


def seconds(latency: str | None) -> float | None:
    """`--latency 5ms` in seconds."""
    from offramp.inference.operating_points import parse_latency

    return None if latency is None else parse_latency(latency)


def command_line(program: str = "offramp") -> str:
    """The command as typed, without the folders of this machine."""
    return " ".join([program, *map(_short, sys.argv[1:])])


def _short(word: str) -> str:
    option, given, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
    return option + given + ("/".join(Path(value).parts[-2:]) if value.startswith(("/", "~")) else value)
