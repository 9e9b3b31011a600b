"""`offramp serve`; its options are the fields of `ServeOptions`."""

from __future__ import annotations

from dataclasses import Field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer

from offramp.cli._options import check_run
from offramp.commands.serve import ServeOptions, named_runs, serve

Runs = Annotated[
    list[str],
    typer.Argument(
        help="folders that `offramp train` or `offramp attach` wrote, names on the hub, or NAME=FOLDER",
        envvar="OFFRAMP_RUNS",
    ),
]


def command(runs: Runs, **options: Any) -> None:
    """Serve runs over HTTP: for Hugging Face, TEI, vLLM and Triton clients, and in the browser at /.

    Every option can be given as an environment variable, too: OFFRAMP_PORT=8080.
    """
    for folder in named_runs(runs).values():
        check_run(str(folder))
    serve(runs, ServeOptions(**options))


def _parameter(field: Field[Any], kind: Any) -> Parameter:
    names = [f"--{field.name.replace('_', '-')}"] if kind is bool else []  # no --no-…: false is the default
    more = {"help": field.metadata["help"], "envvar": f"OFFRAMP_{field.name.upper()}", **field.metadata["bounds"]}
    annotation: Any = Annotated[kind, typer.Option(*names, **more)]
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation)


_KINDS = get_type_hints(ServeOptions)
_PARAMETERS = [
    Parameter("runs", Parameter.POSITIONAL_OR_KEYWORD, annotation=Runs),
    *(_parameter(field, _KINDS[field.name]) for field in fields(ServeOptions)),
]
command.__signature__ = Signature(_PARAMETERS)  # type: ignore[attr-defined]  # where typer reads the options
command.__annotations__ = {one.name: one.annotation for one in _PARAMETERS}
