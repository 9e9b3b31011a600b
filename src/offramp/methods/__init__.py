"""One method, one file; the folder is the list.

A method file exports `Settings`, `Options`, `SPACE`, `HF_EQUAL`, `NEEDS`, `modules`, `Policy` and `stages`, and may
export `prepare(network, options)`, which is called once a trained model is loaded, and `about(network)`, numbers of
each layer that people want to see; this module loads it under one typed name, so that nothing else has to know any
method. A file that also serves encoder–decoders says `DECODES = True`. A method that lets rows leave may export
`objective(options)`, by which its exits learn; a method that drops tokens lets its `stages` take one. Any such two are
a method as well, `length+depth`: tokens leave and rows leave.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import import_module
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from torch import nn

from offramp import tasks
from offramp.core.policy import PairPolicy, Policy
from offramp.errors import OfframpError
from offramp.nn.network import Network
from offramp.nn.setting_space import Integer, Product, Space, Threshold
from offramp.tasks import Task
from offramp.training.objectives import Objective
from offramp.training.stage import Stage
from offramp.utils.merged_dataclass import Merged, merge

LACKS = {  # what a task has where a method needs something else
    "distribution": "numbers for answers, no distribution over a few",
    "one answer a row": "an answer for every token, also those that would have left",
    "words": "no answer for every word",
    "example_error": "answers as wide as a vocabulary",
}


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
    stages: Callable[..., list[Stage]]  # (network, options); of length methods also (network, options, objective)
    summary: str
    prepare: Callable[[Network, Any], None] = lambda network, options: None  # what is cut at load, by what was added
    objective: Callable[[Any], Objective] | None = None  # from options: how the exits of a depth method learn
    drops: bool = False  # a length method, whose stages take such an objective
    pair: Pair | None = None
    about: Callable[[Network], dict[str, list[int]]] = lambda network: {}  # numbers of each layer, for people
    decodes: bool = False  # serves tasks whose answers are said word by word: `DECODES` in the file

    @property
    def replays(self) -> bool:
        """Whether settings never change later states, so that one recording tells what each would do."""
        return isinstance(self.space, Threshold | Integer) and self.space.replay

    def check(self, network: Network) -> None:
        """Refuse a task this method cannot serve."""
        task = network.task
        if not self.serves(task):
            lacks = " and ".join(LACKS.get(need, f"no {need}") for need in sorted(self.needs - task.provides))
            given = "answers said word by word" if task.kind == "sequence" else lacks
            asked, instead = f"method {self.name!r} on the task {task.name!r}", "; or ".join(self._instead(task))
            raise OfframpError(asked, given, f"use one of: {instead}")

    def _instead(self, task: Task) -> list[str]:
        """Methods that serve a task: first those that do the same kind of thing."""
        fit = [get(name) for name in names() if get(name).serves(task)]
        if self.pair is None:
            alike = [one.name for one in fit if one.drops == self.drops]
        else:
            parts = [[one.name for one in fit if use(one)] for use in (lambda m: m.drops, lambda m: m.objective)]
            alike = [f"{a}+{b}" for a, b in product(*parts) if self.name.startswith(a) or self.name.endswith(b)]
        others = [one.name for one in fit if one.drops != self.drops or self.pair]
        return [", ".join(some) for some in (alike, others) if some]

    def serves(self, task: Task | type[Task]) -> bool:
        """Whether a task has what this method needs."""
        return self.decodes if task.kind == "sequence" else self.needs <= task.provides


@dataclass(frozen=True)
class Pair:
    """What a combined method is made of."""

    length: Method
    depth: Method
    settings: Merged


def names() -> list[str]:
    """The methods there are: the files of this folder."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def get(name: str) -> Method:
    """A method by name; `a+b` is a length method and a depth method together."""
    if "+" in name:
        return _pair(name)
    if name not in names():
        fix = f"use one of: {', '.join(names())}; or two of them, like length_adaptive+branchynet"
        raise OfframpError("a method", repr(name), fix)
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
        vars(file).get("prepare", Method.prepare),
        vars(file).get("objective"),
        "objective" in signature(file.stages).parameters,
        about=vars(file).get("about", Method.about),
        decodes=bool(vars(file).get("DECODES", False)),
    )


def pairs() -> list[str]:
    """The combined methods there are: those that some task can serve."""
    lengths, depths = _roles()
    found = [f"{length}+{depth}" for length in lengths for depth in depths]
    known = [tasks.get(name) for name in tasks.names()]
    return [name for name in found if any(get(name).serves(task) for task in known)]


def _roles() -> tuple[list[str], list[str]]:
    """Methods that drop tokens, and methods whose exits can learn beside them."""
    known = [get(name) for name in names()]
    return [m.name for m in known if m.drops], [m.name for m in known if m.objective]


def _pair(name: str) -> Method:
    """Modules of both, one policy after the other, the length method's stages on the depth method's objective."""
    lengths, depths = _roles()
    asked = [part.strip() for part in name.split("+")]
    if len(asked) != 2 or asked[0] not in lengths or asked[1] not in depths:
        fix = f"first one of: {', '.join(lengths)}; then one of: {', '.join(depths)}"
        raise OfframpError("a method that drops tokens + a method with exits", repr(name), fix)
    length, depth = get(asked[0]), get(asked[1])
    settings = merge("Settings", (length.name, length.settings), (depth.name, depth.settings), shared=False)
    options = merge("Options", (length.name, length.options), (depth.name, depth.options), shared=True)

    def modules(network: Network, chosen: Any) -> nn.ModuleDict:
        first, second = options.split(chosen)
        return nn.ModuleDict({**length.modules(network, first), **depth.modules(network, second)})

    def policy(network: Network, chosen: Any) -> Policy:
        first, second = settings.split(chosen)
        return PairPolicy(length.policy(network, first), depth.policy(network, second))

    def stages(network: Network, chosen: Any) -> list[Stage]:
        first, second = options.split(chosen)
        assert depth.objective is not None, "a depth method of a pair has an objective"
        return length.stages(network, first, depth.objective(second))

    def prepare(network: Network, chosen: Any) -> None:
        for method, part in zip((length, depth), options.split(chosen), strict=True):
            method.prepare(network, part)

    return Method(
        f"{length.name}+{depth.name}",
        settings.kind,
        options.kind,
        Product(length.space, depth.space),
        length.hf_equal and depth.hf_equal,
        length.needs | depth.needs,
        modules,
        policy,
        stages,
        f"{length.summary.removesuffix('.')}; with it {depth.summary}",
        prepare,
        pair=Pair(length, depth, settings),
        about=lambda network: {**length.about(network), **depth.about(network)},
    )


def configure(kind: type[Any], values: dict[str, Any], what: str) -> Any:
    """A settings or options dataclass from `key=value` pairs given as text or as JSON values."""
    (usual, hints), made = _known(cast(Hashable, kind)), {}
    for key, value in values.items():
        if key not in hints:
            listed = ", ".join(hints) or "none"
            raise OfframpError(f"a setting of {what}", f"{key}={value}", f"known settings: {listed}")
        made[key] = _convert(value, getattr(usual, key), f"{what} setting {key}")
        choices = get_args(hints[key]) if get_origin(hints[key]) is Literal else ()
        if choices and made[key] not in choices:
            raise OfframpError(f"{what} setting {key}", repr(value), f"use one of: {', '.join(map(str, choices))}")
    try:
        return kind(**made)
    except TypeError as error:  # a value of another kind, from a file that somebody edited
        listed = ", ".join(f"{key}={value!r}" for key, value in made.items())
        fix = f"give values of these kinds: {', '.join(f'{key}: {_kind(getattr(usual, key))}' for key in made)}"
        raise OfframpError(f"settings of {what}", listed, fix) from error


@lru_cache(maxsize=64)  # every single answer asks
def _known(kind: Any) -> tuple[Any, dict[str, Any]]:
    """Defaults of a dataclass, and the types of its fields."""
    hints = get_type_hints(kind)
    return kind(), {f.name: hints[f.name] for f in fields(kind)}


def _kind(default: Any) -> str:
    numbers = isinstance(default, tuple)
    return "list of numbers, like 0.1,0.2" if numbers else f"{type(default).__name__}, like {default}"


def _convert(value: Any, default: Any, what: str) -> Any:
    if isinstance(default, tuple) and isinstance(value, Iterable) and not isinstance(value, str):
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
