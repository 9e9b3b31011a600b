"""One method, one file; the folder is the list.

A method file exports `Settings`, `Options`, `SPACE`, `HF_EQUAL`, `NEEDS`, `modules`, `Policy` and `stages`; this module
loads it under one typed name, so that nothing else has to know any method. A file that also serves encoder–decoders
says `DECODES = True`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import nn

from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.parts.network import Network
from offramp.parts.space import Integer, Space, Threshold
from offramp.parts.stage import Stage
from offramp.tasks import Task


@dataclass(frozen=True)
class Method:
    """A method file under one type."""

    name: str
    settings: type[Any]  # run-time knob, frozen dataclass; its defaults are the loosest setting
    options: type[Any]  # how it is built and trained, frozen dataclass
    space: Space
    hf_equal: bool  # the loosest setting is the plain Hugging Face model
    needs: frozenset[str]  # what it needs of a task, e.g. "distribution"
    modules: Callable[[Network, Any], nn.ModuleDict]
    policy: Callable[[Network, Any], Policy]
    stages: Callable[[Network, Any], list[Stage]]
    summary: str
    decodes: bool = False  # serves tasks whose answers are said word by word: `DECODES` in the file

    @property
    def replays(self) -> bool:
        """Whether settings never change later states, so that one recording tells what each would do."""
        return isinstance(self.space, Threshold | Integer) and self.space.replay

    def check(self, network: Network) -> None:
        """Refuse a task this method cannot serve."""
        task = network.task
        if not self.serves(task):
            missing = ", ".join(sorted(self.needs - task.provides))
            given = "answers said word by word" if task.kind == "sequence" else f"a task that has no {missing}"
            fit = [name for name in names() if get(name).serves(task)]
            raise OfframpError(
                f"method {self.name!r} on the task {task.name!r}", given, f"use one of: {', '.join(fit)}"
            )

    def serves(self, task: Task | type[Task]) -> bool:
        """Whether a task has what this method needs."""
        return self.decodes if task.kind == "sequence" else self.needs <= task.provides


def names() -> list[str]:
    """The methods there are: the files of this folder."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def get(name: str) -> Method:
    """A method by name."""
    if name not in names():
        raise OfframpError("a method", repr(name), f"use one of: {', '.join(names())}")
    file = import_module(f"{__name__}.{name}")
    summary = (file.__doc__ or "").strip().splitlines()[0]
    return Method(
        name,
        file.Settings,
        file.Options,
        file.SPACE,
        file.HF_EQUAL,
        frozenset(file.NEEDS),
        file.modules,
        file.Policy,
        file.stages,
        summary,
        bool(vars(file).get("DECODES", False)),
    )


def configure(kind: type[Any], values: dict[str, Any], what: str) -> Any:
    """A settings or options dataclass from `key=value` pairs given as text or as JSON values."""
    known, hints = {f.name: f for f in fields(kind)}, get_type_hints(kind)
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            listed = ", ".join(known) or "none"
            raise OfframpError(f"a setting of {what}", f"{key}={value}", f"known settings: {listed}")
        made[key] = _convert(value, getattr(kind(), key), f"{what} setting {key}")
        choices = get_args(hints[key]) if get_origin(hints[key]) is Literal else ()
        if choices and made[key] not in choices:
            raise OfframpError(f"{what} setting {key}", repr(value), f"use one of: {', '.join(map(str, choices))}")
    return kind(**made)


def _kind(default: Any) -> str:
    numbers = isinstance(default, tuple)
    return "list of numbers, like 0.1,0.2" if numbers else f"{type(default).__name__}, like {default}"


def _convert(value: Any, default: Any, what: str) -> Any:
    if isinstance(default, tuple) and not isinstance(value, str):
        return tuple(value)  # JSON has lists only
    if not isinstance(value, str) or isinstance(default, str):
        return value
    try:
        if isinstance(default, tuple):
            return tuple(float(part) for part in value.split(",") if part.strip())
        if isinstance(default, bool):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]
        return type(default)(value)
    except (ValueError, KeyError) as error:
        raise OfframpError(what, repr(value), f"give a {_kind(default)}") from error
