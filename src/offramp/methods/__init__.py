"""Methods, one class in one file or package each; the folder is the list.

`names()` lists the files (those that begin with an underscore are shared parts), `get(name)` returns an instance of the
one `Method` that the file defines, and `get("length+depth")` a pair of two. Nothing else in the package names a method,
except `_auto.py`, which chooses one for given rows.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from itertools import product

from offramp import tasks
from offramp.errors import OfframpError
from offramp.methods._auto import AUTO, ChosenMethod, choose_method
from offramp.methods._base import DepthMethod, LengthMethod, Method, PairMethod
from offramp.methods._configure import configure
from offramp.tasks import Task

__all__ = [
    "AUTO",
    "ChosenMethod",
    "DepthMethod",
    "LengthMethod",
    "Method",
    "PairMethod",
    "check_serves",
    "choose_method",
    "configure",
    "get",
    "names",
    "pairs",
]

MISSING = {  # need → what a task has instead of it
    "distribution": "numbers for answers, no distribution over a few",
    "one answer a row": "an answer for every token, also for tokens that would have been dropped",
    "words": "no answer for every word",
    "example_error": "answers as wide as a vocabulary",
}


def names() -> list[str]:
    """Return the names of all methods: the files and packages of this folder."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))


def get(name: str) -> Method:
    """Return a method by name; `a+b` is the length method a with the depth method b."""
    if "+" in name:
        return _pair(name)
    if name not in names():
        fix = f"use one of: {', '.join(names())}; or two of them, like length_adaptive+branchynet"
        raise OfframpError("a method", repr(name), fix)
    file = import_module(f"{__name__}.{name}")
    classes = [kind for _, kind in inspect.getmembers(file, inspect.isclass) if kind.__module__ == file.__name__]
    found = [kind for kind in classes if issubclass(kind, Method)]
    if len(found) != 1 or found[0].name != name:
        given = ", ".join(f"{kind.__name__} (name={kind.name!r})" for kind in found) or "none"
        raise OfframpError(f"one Method with name={name!r} in methods/{name}", given, "define exactly one in that file")
    return found[0]()


def pairs() -> list[str]:
    """Return the names of all pairs that some task can serve."""
    found = [PairMethod(length, depth) for length, depth in product(*_parts_of_pairs())]
    known = [tasks.get(name) for name in tasks.names()]
    return [pair.name for pair in found if any(pair.serves(task) for task in known)]


def _parts_of_pairs() -> tuple[list[LengthMethod], list[DepthMethod]]:
    """Return what can stand before and after the plus sign."""
    known = [get(name) for name in names()]
    lengths = [method for method in known if isinstance(method, LengthMethod)]
    return lengths, [method for method in known if isinstance(method, DepthMethod)]


def _pair(name: str) -> PairMethod:
    lengths, depths = _parts_of_pairs()
    parts = [part.strip() for part in name.split("+")]
    length = next((method for method in lengths if method.name == parts[0]), None)
    depth = next((method for method in depths if method.name == parts[1]), None)
    if len(parts) != 2 or length is None or depth is None:
        first, second = (", ".join(method.name for method in known) for known in (lengths, depths))
        fix = f"first one of: {first}; then one of: {second}"
        raise OfframpError("a method that drops tokens + a method with exits", repr(name), fix)
    return PairMethod(length, depth)


def check_serves(method: Method, task: Task) -> None:
    """Refuse a task that a method cannot serve."""
    if method.serves(task):
        return
    missing = " and ".join(MISSING.get(need, f"no {need}") for need in sorted(method.needs - task.provides))
    given = "answers that are generated word by word" if task.kind == "sequence" else missing
    fix = f"use one of: {'; or '.join(_alternatives(method, task))}"
    raise OfframpError(f"method {method.name!r} on the task {task.name!r}", given, fix)


def _alternatives(method: Method, task: Task) -> list[str]:
    """Return lists of methods that serve a task, first those of the same kind as `method`."""
    fitting = [known for known in map(get, names()) if known.serves(task)]
    drop_tokens = [known.name for known in fitting if isinstance(known, LengthMethod)]
    others = [known.name for known in fitting if not isinstance(known, LengthMethod)]
    if isinstance(method, PairMethod):
        depths = [known.name for known in fitting if isinstance(known, DepthMethod)]
        similar = [
            f"{a}+{b}" for a, b in product(drop_tokens, depths) if a == method.length.name or b == method.depth.name
        ]
        groups = [similar, [known.name for known in fitting]]
    else:
        groups = [drop_tokens, others] if isinstance(method, LengthMethod) else [others, drop_tokens]
    return [", ".join(group) for group in groups if group]
