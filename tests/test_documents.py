"""The documents say what is true: links lead somewhere, tables name what exists, recipes name the real parts."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from benchmarks import accuracy_time, results_index

from offramp import backbones, methods, tasks
from offramp.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md"))
)
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    return re.split(r"^## ", text.split(f"## {title}\n", 1)[1], maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    file = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)", file.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (file.parent / target).exists(), f"{name} links to {target}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_named_in_documents_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for named in re.findall(r"(?<![\w/])((?:benchmarks|src|tests)/(?!papers/)[\w./]*\.py)", text):
        assert (ROOT / named).exists(), f"{name} names {named}"


def test_the_index_lists_every_result_file_once() -> None:
    listed = re.findall(r"\]\(([^)]+\.json)\)", (ROOT / "results" / "INDEX.md").read_text(encoding="utf-8"))
    files = {path.relative_to(ROOT / "results").as_posix() for path in (ROOT / "results").rglob("*.json")}
    assert len(listed) == len(set(listed))
    assert set(listed) == files, "run `python benchmarks/results_index.py`"


def test_the_index_can_be_written_from_the_files(tmp_path: Path) -> None:
    (tmp_path / "trec" / "deebert").mkdir(parents=True)
    source = ROOT / "results" / "trec" / "deebert" / "default-minilm-s42.json"
    (tmp_path / "trec" / "deebert" / source.name).write_bytes(source.read_bytes())
    text = results_index.index(tmp_path)
    assert "96.4 → 96.4 at 0.354" in text and "(trec/deebert/default-minilm-s42.json)" in text


def test_the_picture_is_drawn_from_result_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy_time, "TARGET", tmp_path / "picture.svg")
    accuracy_time.main()
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8").count("milliseconds a row") >= 4


def test_every_method_is_in_the_table_of_methods() -> None:
    rows = re.findall(r"^\| \[?`(\w+)`(?:\]\([\w/.]+\))?( †)? \|", section(README, "Methods"), flags=re.M)
    assert {name for name, _ in rows} == set(methods.names())
    not_the_full_model = {name for name in methods.names() if not methods.get(name).hf_equal}
    assert {name for name, dagger in rows if dagger} == not_the_full_model


def test_every_backbone_and_task_is_named() -> None:
    named = set(re.findall(r"`([\w-]+)`", section(README, "Methods")))
    types = {kind for name in backbones.names() for kind in import_module(f"offramp.backbones.{name}").MODEL_TYPES}
    assert types | set(tasks.names()) <= named


def test_commands_of_the_readme_exist() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall(r"^offramp (\w+)", section(README, "Commands"), flags=re.M)) <= known


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
