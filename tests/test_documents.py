"""The documents say what is true: links lead somewhere, tables name what exists, recipes name the real parts."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from offramp import backbones, methods, tasks
from offramp.cli import app
from offramp.commands.report import report

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    return re.split(r"^## ", text.split(f"## {title}\n", 1)[1], maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    file = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)", file.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (file.parent / target).exists(), f"{name} links to {target}"


def test_the_table_of_methods() -> None:
    """What is ready exists, and what exists has a row."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\w[\w ]*) \|$", section(README, "Methods"), flags=re.M)
    ready = {name for name, status in rows if status == "ready"}
    assert ready <= set(methods.names()) <= {name for name, _ in rows}


def test_the_methods_whose_folder_is_not_the_full_model_are_named() -> None:
    told = README.split("gets\n  the full model (", 1)[1].split(" are exceptions", 1)[0]
    assert set(re.findall(r"`(\w+)`", told)) == {name for name in methods.names() if not methods.get(name).hf_equal}


def test_the_tables_of_backbones_and_tasks() -> None:
    told = set(re.findall(r"`([\w-]+)`", section(README, "Backbones and tasks")))
    types = {kind for name in backbones.names() for kind in import_module(f"offramp.backbones.{name}").MODEL_TYPES}
    assert types | set(tasks.names()) <= told


def test_the_list_of_commands() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert known == set(re.findall(r"^offramp (\w+)", section(README, "Commands"), flags=re.M))


def test_the_recipes_name_the_real_parts() -> None:
    method = re.findall(r"^(?:class |def )?(\w+)(?=[ (:])", section(CONTRIBUTING, "Add a method").split("```")[1], re.M)
    exported = [name for name in method if name not in ("python", "Name")]
    assert len(exported) == 8
    for name in methods.names():
        file = import_module(f"offramp.methods.{name}")
        assert all(hasattr(file, part) for part in exported)
    block = section(CONTRIBUTING, "Add a task").split("```")[1].splitlines()[1:]
    parts = [part.strip() for line in block for part in line.split("#")[0].split(",")]
    assert all(hasattr(tasks.get("regression"), part) for part in parts if part)


def test_the_results_page_is_made_from_the_results(tmp_path: Path) -> None:
    """docs/results.md is what `offramp report results --markdown docs/results.md` writes today."""
    report(str(ROOT / "results"), results=str(tmp_path / "results.md"))
    assert (tmp_path / "results.md").read_text(encoding="utf-8") == (ROOT / "docs" / "results.md").read_text("utf-8")
