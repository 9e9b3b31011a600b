"""Run folders: plain transformers opens them as the full model, Offramp as the adaptive one; nothing is unpickled."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offramp import methods, tasks
from offramp.errors import OfframpError
from offramp.inference import run_folder as folders
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import LoadedRun
from tests import factories

MATRIX = [
    (method, kind)
    for method in methods.names()
    for kind, task in factories.KINDS.items()
    if methods.get(method).hf_equal and methods.get(method).needs <= tasks.get(task).provides
]


def write_untrained_run(base: str, method: str, kind: str, folder: Path) -> Path:
    """Write a run with untrained heads: opening it does not depend on training."""
    rows, chosen = factories.labelled_rows(kind, 8), methods.get(method)
    tokenizer = folders.load_tokenizer(base)
    task = tasks.get(factories.KINDS[kind]).from_rows(rows, "rows").with_tokenizer(tokenizer)
    torch.manual_seed(0)
    net = folders.build_network(folders.load_backbone(base, task), task, chosen, chosen.options())
    folders.save_run(folder, LoadedRun(net, tokenizer, chosen, chosen.options(), min(64, net.encoder.positions), base))
    return folder


def plain_logits(folder: Path, task: tasks.Task, encoded: list[Any], typed: bool = True) -> list[torch.Tensor]:
    """Return the logits of plain transformers for each row, padding removed."""
    net = getattr(transformers, task.auto_class).from_pretrained(folder, use_safetensors=True).eval()
    longest = max(len(e.ids) for e in encoded)
    kinds = torch.tensor([e.types + [0] * (longest - len(e.types)) for e in encoded])
    out = factories.hf_padded(net, [e.ids for e in encoded], **({"token_type_ids": kinds} if typed else {}))
    if task.name == "question_answering":
        logits = torch.stack((out.start_logits, out.end_logits), -1)
    else:
        logits = out.logits
    return [row[: len(e.ids)] if task.kind == "token" else row for row, e in zip(logits, encoded, strict=True)]


def assert_equal_to_plain(folder: Path, kind: str, typed: bool = True) -> None:
    predictor = Predictor.load(folder)
    encoded = predictor.prepare(factories.labelled_rows(kind, 9, 5))
    logits = predictor.run(encoded, predictor.settings(1.0), 4).logits
    for a, b in zip(logits, plain_logits(folder, predictor.task, encoded, typed), strict=True):
        assert torch.allclose(torch.from_numpy(a), b, atol=1e-5)


@pytest.fixture
def trained(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the shared run as it was written: other tests may have left compiled graphs in it."""
    fresh = tmp_path_factory.mktemp("written") / "run"
    shutil.copytree(trained, fresh, ignore=shutil.ignore_patterns(".cache"))
    return fresh


@pytest.mark.parametrize(("method", "kind"), MATRIX)
def test_plain_transformers_opens_the_full_model(base: str, tmp_path: Path, method: str, kind: str) -> None:
    assert_equal_to_plain(write_untrained_run(base, method, kind, tmp_path / "run"), kind)


@pytest.mark.parametrize("kind", ["classification", "masked_lm"])
@pytest.mark.parametrize("backbone", factories.BACKBONES)
def test_saved_backbone_equals_the_loaded_one(tmp_path: Path, backbone: str, kind: str) -> None:
    base = str(factories.model_folder(tmp_path / "base", backbone))
    assert_equal_to_plain(write_untrained_run(base, "full", kind, tmp_path / "run"), kind, typed=False)


def test_trained_run_equals_plain_transformers_and_keeps_its_labels(trained: Path) -> None:
    assert_equal_to_plain(trained, "classification")
    config = transformers.AutoConfig.from_pretrained(trained)
    assert config.id2label == {0: "bad", 1: "good"}


def test_run_folder_holds_no_pickle(trained: Path) -> None:
    files = factories.read_files(trained)
    assert {Path(name).suffix for name in files} <= {".json", ".safetensors", ".yaml", ".md", ".txt"}
    assert all(content[:2] != b"\x80\x04" and content[:2] != b"PK" for content in files.values())


def test_load_run_never_unpickles(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickling")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    folders.load_run(trained)


def test_save_and_load_change_no_prediction(trained: Path, tmp_path: Path) -> None:
    before = Predictor.load(trained)
    folders.save_run(tmp_path / "again", before.model)
    after = Predictor(folders.load_run(tmp_path / "again"), before.points)
    texts = [row["text"] for row in factories.labelled_rows("classification", 9, 5)]
    for budget in (None, 0.3, 1.0):
        assert before.predict(texts, budget) == after.predict(texts, budget)
    assert folders.read_description(tmp_path / "again") == folders.read_description(trained)


def test_load_and_save_print_nothing_and_restore_the_logging_of_transformers(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    folders.save_run(tmp_path / "again", folders.load_run(trained))
    sys.stderr.flush()
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert transformers.logging.get_verbosity() == verbosity
    assert transformers.logging.is_progress_bar_enabled() == bars


DAMAGE: dict[str, tuple[str, Any]] = {  # damage → file, new content (None: removed; a number: cut to that share)
    "no offramp.json": ("offramp.json", None),
    "no JSON": ("offramp.json", b"{"),
    "no object": ("offramp.json", b"[1]"),
    "another format": ("offramp.json", b'{"format": 99}'),
    "nothing but a format": ("offramp.json", b'{"format": 1}'),
    "cut weights": ("model.safetensors", 0.5),
    "no weights": ("model.safetensors", None),
    "cut heads": ("offramp.safetensors", 0.9),
    "no heads": ("offramp.safetensors", None),
    "empty heads": ("offramp.safetensors", b""),
    "no config": ("config.json", None),
    "bad config": ("config.json", b"{"),
    "bad tokenizer": ("tokenizer.json", b"{}"),
    "no tokenizer": ("tokenizer.json", None),
    "bad points": ("points.json", b'{"points": 3}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_load_refuses_damaged_folders(trained: Path, tmp_path: Path, damage: str) -> None:
    for name, content in factories.read_files(trained).items():
        (tmp_path / name).write_bytes(content)
    name, change = DAMAGE[damage]
    if change is None:
        (tmp_path / name).unlink()
    else:
        old = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(old[: int(len(old) * change)] if isinstance(change, float) else change)
    with pytest.raises(OfframpError) as caught:
        Predictor.load(tmp_path)
    assert caught.value.fix and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "change",
    [
        {"method": "magic"},
        {"task": {"name": "chess"}},
        {"task": {"name": "classification"}},
        {"options": {"pool": "first"}},
        {"options": {"colour": "red"}},
        {"options": None},
        {"task": "classification"},
        {"task": {}},
        {"max_length": "long"},
        {"max_length": True},
        {"base_model": 7},
        {"method": ["branchynet"]},
    ],
)
def test_load_run_refuses_descriptions_of_wrong_values(trained: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    for name, content in factories.read_files(trained).items():
        (tmp_path / name).write_bytes(content)
    description = json.loads((tmp_path / "offramp.json").read_text())
    (tmp_path / "offramp.json").write_text(json.dumps({**description, **change}))
    with pytest.raises(OfframpError):
        folders.load_run(tmp_path)


@pytest.mark.parametrize("field", [one.name for one in fields(folders.RunDescription)])
def test_read_description_names_a_missing_field(trained: Path, field: str) -> None:
    description = json.loads((trained / "offramp.json").read_text())
    assert description["format"] == 2
    del description[field]
    (trained / "offramp.json").write_text(json.dumps(description))
    with pytest.raises(OfframpError, match=f"{field} is missing"):
        folders.read_description(trained)


def test_load_run_refuses_weights_of_another_model(trained: Path, base: str, tmp_path: Path) -> None:
    """Transformers would fill missing weights with random numbers."""
    for name, content in factories.read_files(trained).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes((Path(base) / "model.safetensors").read_bytes())
    with pytest.raises(OfframpError, match=r"lacks.*classifier"):
        folders.load_run(tmp_path)


def test_load_run_refuses_what_is_no_run(tmp_path: Path, base: str) -> None:
    (tmp_path / "file").write_text("")
    expected = {tmp_path / "none": "no such folder", Path(base): r"without offramp\.json", tmp_path / "file": "a file"}
    for path, message in expected.items():
        with pytest.raises(OfframpError, match=message):
            folders.load_run(path)


def test_check_backbone_refuses_unknown_families(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(OfframpError, match="gpt2") as caught:
        folders.check_backbone(str(tmp_path))
    assert "modernbert" in caught.value.fix
    for content in ("{}", '{"model_type": "invented"}', "{"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(OfframpError):
            folders.check_backbone(str(tmp_path))


def test_everyone_who_may_read_the_description_may_read_the_weights(trained: Path) -> None:
    modes = {path.name: path.stat().st_mode for path in trained.iterdir()}
    assert {modes["model.safetensors"], modes["offramp.safetensors"]} == {modes["offramp.json"]}


@pytest.mark.parametrize(
    ("name", "new", "carried"),
    [
        ("adapler", {"exit_heads", "cuts"}, {"predictors"}),
        ("length_adaptive", {"exit_heads", "lengths"}, set()),
        ("power_bert", {"exit_heads", "retention"}, set()),
        ("berxit", {"exit_heads"}, {"exit_unit"}),
        ("length_adaptive+berxit", {"exit_heads", "lengths"}, {"exit_unit"}),
    ],
)
def test_modules_of_a_task_are_not_taken_from_the_model_of_an_earlier_run(
    base: str, tmp_path: Path, name: str, new: set[str], carried: set[str]
) -> None:
    """What a method learned for one task, such as adapler's thresholds, says nothing about another."""
    method = methods.get(name)
    assert method.of_a_task == new
    net = folders.load_run(write_untrained_run(base, name, "classification", tmp_path / "run")).network
    before = {key: value.clone() for key, value in net.added.state_dict().items()}
    other = folders.load_run(tmp_path / "run")
    for value in other.network.added.state_dict().values():
        value.add_(1)
    folders.save_added(tmp_path / "run", other)
    folders.reuse_added_modules(net, method, str(tmp_path / "run"))
    found = net.added.state_dict()
    changed = {key.split(".")[0] for key in found if not torch.equal(found[key], before[key])}
    assert changed == carried
