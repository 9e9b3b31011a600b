"""The one rule of imports, checked with `ast`: a room imports only the rooms before it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / "src" / "offramp"
ROOMS = [  # a room may import the rooms before it, and its own files
    *("errors", "utils", "data", "tasks", "core", "backbones", "engines", "nn", "training", "decoding"),
    *("methods", "inference", "calibration", "evaluation", "serving", "distributed", "commands", "cli"),
]
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
        own = file.split("/")[1].removesuffix(".py")
        if len(name) > 2 and name[2] != own and not name[2].startswith("_"):
            return "a method never imports another method; move what they share to methods/_shared/"
    if ROOMS.index(target) > ROOMS.index(room):
        return f"{room} comes before {target} in: {' '.join(ROOMS)}. Move the code, or pass the thing in"
    return ""


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_a_room_imports_only_the_rooms_before_it(file: str) -> None:
    room = module_of(file)[1]
    assert room in ROOMS, f"{file} lies in no known room; the rooms are: {' '.join(ROOMS)}"
    found = [(line, name, complaint(file, name)) for line, name in imported(file, parse(file))]
    wrong = [f"{file}:{line} imports {'.'.join(name)}: {why}" for line, name, why in found if why]
    assert not wrong, "\n".join(wrong)


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
        ("core/loop.py", "from ..inference.run_folder import save", False),
        ("core/loop.py", "def f():\n    import offramp.inference.run_folder", False),
        ("core/loop.py", "import_module(f'offramp.methods.{name}')", False),
        ("core/loop.py", "import offramp", False),
        ("methods/pabee.py", "from offramp.nn.exit_heads import ExitHead", True),
        ("methods/pabee.py", "from offramp.methods.deebert import Policy", False),
        ("methods/pabee.py", "from . import deebert", False),
        ("methods/__init__.py", "from . import deebert", True),
        ("evaluation/bench.py", "from offramp import __version__", True),
        ("evaluation/bench.py", "from offramp import load", False),
    ],
)
def test_the_rule_itself(file: str, line: str, fine: bool) -> None:
    assert (example(file, line) == []) is fine
