"""The documents say what is true: links lead somewhere, tables name what exists, recipes name the real parts."""

from __future__ import annotations

import ast
import json
import re
import statistics
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import accuracy_time, aims, results_index
from offramp import backbones, cli, methods, tasks
from tests.test_imports import ROOMS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md"))
)
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
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
    for named in re.findall(r"(?<![\w/])((?:benchmarks|src|tests)/[\w./]*\.py)", text):
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
    accuracy_time.main([])
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8").count("milliseconds a row") >= 4


def test_the_picture_of_the_aims_is_drawn_from_result_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aims, "TARGET", tmp_path / "aims.svg")
    aims.main([])
    assert (tmp_path / "aims.svg").read_text(encoding="utf-8").count("share of MACs") == len(aims.PANELS)


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`([\w/]+\.py:[\w.]+)`", ARCHITECTURE))))
def test_functions_named_in_the_walks_exist(named: str) -> None:
    file, path = named.split(":")
    body = ast.parse((ROOT / "src" / "offramp" / file).read_text(encoding="utf-8")).body
    for part in path.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        assert found, f"docs/architecture.md names {named}, and there is no {part}"
        body = found[0].body


def test_walks_have_at_most_ten_stops() -> None:
    for title in ("A row through `predict`", "A batch through `train`", "A word through translation"):
        assert 5 <= len(re.findall(r"^\d+\. ", section(ARCHITECTURE, title), flags=re.M)) <= 10


def test_the_table_of_rooms_is_in_the_order_of_imports() -> None:
    first = re.findall(r"^\| `(\w+)(?:\.py|/)`(?:, `(\w+)/`)?", section(ARCHITECTURE, "The rooms"), flags=re.M)
    assert [room for rooms in first for room in rooms if room] == ROOMS


def points(file: Path) -> list[tuple[float, float, str]]:
    """Score in points, share of MACs and choice (or "curve") of every operating point in a file of result cells."""
    cells = json.loads(file.read_text(encoding="utf-8"))
    metric = results_index.metric_of(cells[0])
    chosen = [(c["metrics"], c["macs"]["share_of_full"], str(c["chosen"]["value"])) for c in cells]
    curve = [(spot["metrics"], spot["share_of_full"], "curve") for c in cells for spot in c.get("curve", ())]
    return [(100 * metrics[metric], share, by) for metrics, share, by in (*chosen, *curve)]


def test_numbers_of_choosing_are_those_of_the_linked_files() -> None:
    """ "88.4 → 88.2 at 0.23" beside result cells: such a point is in the file, or is the mean over the linked seeds."""
    checked = 0
    for line in (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").splitlines():
        claim = re.search(r"\d+\.\d → (\d+\.\d) at (0\.\d+)", line)
        files = [
            ROOT / "docs" / name for name in re.findall(r"\]\(([^)]+-s\d+\.json)\)", line) if "/bench/" not in name
        ]
        if not claim or not files or "multi30k" in line:
            continue
        found = [points(file) for file in files]
        same = [[p for p in own if p[2] == "0.01"] for own in found]
        mean = [tuple(statistics.fmean(p[0][i] for p in same) for i in (0, 1))] if all(same) else []
        places = len(claim[2]) - 2
        shown = {
            (f"{s + 1e-9:.1f}", f"{m:.{places}f}") for s, m in (*mean, *((p[0], p[1]) for own in found for p in own))
        }
        assert (claim[1], claim[2]) in shown, line
        checked += 1
    assert checked >= 12


def test_every_method_is_in_the_table_of_methods() -> None:
    rows = re.findall(r"^\| \[?`(\w+)`(?:\]\([\w/.]+\))?( †)? \|", section(README, "Methods"), flags=re.M)
    assert {name for name, _ in rows} == set(methods.names())
    not_the_full_model = {name for name in methods.names() if not methods.get(name).hf_equal}
    assert {name for name, dagger in rows if dagger} == not_the_full_model


def test_every_backbone_and_task_is_named() -> None:
    named = set(re.findall(r"`([\w-]+)`", section(README, "Methods")))
    types = {kind for name in backbones.names() for kind in import_module(f"offramp.backbones.{name}").MODEL_TYPES}
    assert types | set(tasks.names()) <= named


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "CONTRIBUTING.md"])
def test_methods_and_options_named_in_commands_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    options = {field.name for method in methods.names() for field in fields(methods.get(method).options)}
    assert set(re.findall(r"--set\s+(\w+)=", text)) <= options
    known = {*methods.names(), methods.AUTO}
    assert {part for pair in re.findall(r"--method ([\w+]+)", text) for part in pair.split("+")} <= known


def test_the_readme_lists_the_commands() -> None:
    assert set(re.findall(r"^offramp (\w+)", section(README, "Commands"), flags=re.M)) == set(cli.names())


def test_the_recipes_name_the_real_parts() -> None:
    block = section(CONTRIBUTING, "Add a task").split("```")[1].splitlines()[1:]
    parts = [part.strip() for line in block for part in line.split("#")[0].split(",")]
    assert all(hasattr(tasks.get("regression"), part) for part in parts if part)
