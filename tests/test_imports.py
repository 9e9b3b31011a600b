"""The one rule of imports, and the size of files and functions, checked with `ast`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / "src" / "offramp"
ROOMS = [  # a room may import the rooms before it, and its own files
    *("errors", "text", "tasks", "core", "backbones", "engines", "parts"),
    *("methods", "model", "budget", "training", "study", "cli"),
]
MAX_LINES = 250
MAX_PARAMETERS = 6
FILES = [path.relative_to(HOUSE).as_posix() for path in sorted(HOUSE.rglob("*.py"))]


def parse(file: str) -> ast.Module:
    return ast.parse((HOUSE / file).read_text(encoding="utf-8"), file)


def module_of(file: str) -> list[str]:
    """`core/loop.py` → [offramp, core, loop]; `core/__init__.py` → [offramp, core]."""
    parts = ["offramp", *file.removesuffix(".py").split("/")]
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported(file: str, tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Line and dotted name of whatever is imported from the house, lazily or not, relative or not."""
    package = module_of(file) if file.endswith("__init__.py") else module_of(file)[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names = [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            names = [ast.unparse(node.args[0]).strip("f\"'").split(".")]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name[0] == "offramp")


def complaint(file: str, name: list[str]) -> str:
    """Why `file` may not import `name`; empty when it may."""
    room = module_of(file)[1]
    target = name[1] if len(name) > 1 else "the whole package"
    if target == "__version__":
        return ""
    if target not in ROOMS:
        return f"{target} is no room of the house; import from the room where the thing lives"
    if target == room == "methods" and file != "methods/__init__.py":
        return "a method never imports another method; move what they share to parts/"
    if ROOMS.index(target) > ROOMS.index(room):
        return f"{room} comes before {target} in: {' '.join(ROOMS)}. Move the code, or pass the thing in"
    return ""


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> int:
    """How many a caller must know: without self and cls, and without the options of a typer command."""
    given = function.args
    names = [a.arg for a in given.posonlyargs + given.args]
    is_command = module_of(file)[1:2] == ["cli"] and function.name == "command"
    options = 0 if is_command else len(given.kwonlyargs)
    extra = (given.vararg is not None) + (given.kwarg is not None)
    return len(names) - (names[:1] in (["self"], ["cls"])) + options + extra


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_a_room_imports_only_the_rooms_before_it(file: str) -> None:
    room = module_of(file)[1]
    assert room in ROOMS, f"{file} lies in no known room; the rooms are: {' '.join(ROOMS)}"
    found = [(line, name, complaint(file, name)) for line, name in imported(file, parse(file))]
    wrong = [f"{file}:{line} imports {'.'.join(name)}: {why}" for line, name, why in found if why]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", FILES)
def test_files_and_functions_stay_small(file: str) -> None:
    lines = len((HOUSE / file).read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{file} has {lines} lines, {MAX_LINES} at most: split it by what it does"
    functions = [n for n in ast.walk(parse(file)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    wrong = [f"{file}:{f.lineno} {f.name}" for f in functions if parameters(f, file) > MAX_PARAMETERS]
    assert not wrong, f"more than {MAX_PARAMETERS} parameters; group them in a frozen dataclass: {wrong}"


def test_the_front_door_imports_lazily() -> None:
    """At module level `offramp/__init__.py` may import `errors` only; the rest waits inside functions."""
    tree = parse("__init__.py")
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [name for node in top for _, name in imported("__init__.py", node)]
    assert names == [["offramp", "errors", "OfframpError"]]


@pytest.mark.parametrize("command", ["import offramp", "import offramp.cli"])
def test_torch_is_not_imported_before_it_is_needed(command: str) -> None:
    heavy = "{'torch', 'transformers', 'sklearn', 'matplotlib', 'datasets'}"
    script = f"{command}, sys; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"`{command}` (so `offramp --help`) loads {done.stdout.strip()}"


def example(file: str, line: str) -> list[str]:
    return [complaint(file, name) for _, name in imported(file, ast.parse(line)) if complaint(file, name)]


@pytest.mark.parametrize(
    ("file", "line", "fine"),
    [
        ("core/loop.py", "from offramp.errors import OfframpError", True),
        ("core/loop.py", "from . import packed", True),
        ("core/loop.py", "from .packed import Packed", True),
        ("core/loop.py", "import torch, numpy as np", True),
        ("core/loop.py", "from offramp import methods", False),
        ("core/loop.py", "from ..model.folder import save", False),
        ("core/loop.py", "def f():\n    import offramp.model.folder", False),
        ("core/loop.py", "import_module(f'offramp.methods.{name}')", False),
        ("core/loop.py", "import offramp", False),
        ("methods/pabee.py", "from offramp.parts.heads import Heads", True),
        ("methods/pabee.py", "from offramp.methods.deebert import Policy", False),
        ("methods/pabee.py", "from . import deebert", False),
        ("methods/__init__.py", "from . import deebert", True),
        ("study/evaluate.py", "from offramp import __version__", True),
        ("study/evaluate.py", "from offramp import load", False),
    ],
)
def test_the_rule_itself(file: str, line: str, fine: bool) -> None:
    assert (example(file, line) == []) is fine


def test_counting_parameters() -> None:
    source = "def command(a, *, b, c): ...\ndef step(self, a, b, *c, d, **e): ..."
    command, method = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    assert (parameters(command, "cli/train.py"), parameters(command, "core/loop.py")) == (1, 3)
    assert parameters(method, "core/loop.py") == 5
