"""Run folders on a hub: what is uploaded, and that the download loads as the same model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

import offramp
from offramp.commands import serve
from offramp.commands.bench import bench
from offramp.commands.explain import explain
from offramp.commands.info import info
from offramp.errors import OfframpError
from offramp.inference import hub
from tests import factories


class FakeHub:
    """A hub in a folder: repositories by name and revision."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.created, self.calls = folder, {}, []

    def api(self, token: str | None = None) -> FakeHub:
        return self

    def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> str:
        assert exist_ok
        self.created[name] = private
        return f"https://hub/{name}"

    def create_commit(self, name: str, operations: list[Any], commit_message: str, revision: str | None) -> None:
        repository = self.folder / name / (revision or "main")
        repository.mkdir(parents=True)
        for operation in operations:
            content = operation.path_or_fileobj
            data = content if isinstance(content, bytes) else Path(content).read_bytes()
            (repository / operation.path_in_repo).write_bytes(data)

    def snapshot_download(self, name: str, revision: str | None, allow_patterns: list[str]) -> str:
        self.calls.append((name, revision))
        repository = self.folder / name / (revision or "main")
        if not repository.is_dir():
            raise ValueError(f"404: no repository {name}\nmore lines")
        return str(repository)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", fake.api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


@pytest.fixture
def own(trained: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(trained, tmp_path / "own"))
    (folder / ".cache").mkdir(exist_ok=True)
    (folder / ".cache" / "graph.json").write_text("{}")
    (folder / "latency.json").write_text("[]")
    (folder / "notes.pkl").write_bytes(b"")
    (folder / "logs").mkdir()
    (folder / "logs" / "log.json").write_text("{}")
    return folder


def test_a_pushed_run_loads_by_its_name_as_the_same_model(fake: FakeHub, own: Path) -> None:
    assert offramp.push_to_hub(own, "user/name", private=True) == "https://hub/user/name"
    assert fake.created == {"user/name": True}
    texts = [row["text"] for row in factories.labelled_rows("classification", 8)]
    assert offramp.load("user/name").predict(texts, budget=0.5) == offramp.load(own).predict(texts, budget=0.5)


def test_a_revision_is_pushed_and_loaded(fake: FakeHub, own: Path) -> None:
    offramp.push_to_hub(own, "user/name", revision="v2")
    assert offramp.load("user/name", revision="v2").task.name == "classification"
    assert fake.calls == [("user/name", "v2")]


def test_caches_and_other_files_are_not_uploaded(fake: FakeHub, own: Path) -> None:
    offramp.push_to_hub(own, "user/name")
    names = {path.name for path in (fake.folder / "user/name/main").rglob("*")}
    assert {"config.json", "model.safetensors", "offramp.json", "offramp.safetensors", "points.json"} <= names
    assert not names & {".cache", "graph.json", "notes.pkl", "latency.json", "logs", "log.json"}


def test_uploaded_files_hold_no_paths_of_this_machine_and_the_card_names_the_repository(
    fake: FakeHub, own: Path
) -> None:
    model = str(own.parent / "models" / "base")  # runs of earlier versions hold such paths
    for name in ("offramp.json", "recipe.yaml"):
        content = yaml.safe_load((own / name).read_text())
        content["base_model" if name == "offramp.json" else "model"] = model
        (own / name).write_text(json.dumps(content))
    offramp.push_to_hub(own, "user/name")
    main = fake.folder / "user/name/main"
    written = {
        name: (main / name).read_text(encoding="utf-8") for name in ("offramp.json", "points.json", "recipe.yaml")
    }
    assert not [name for name, text in written.items() if str(own.parent) in text]
    before = json.loads((own / "offramp.json").read_text())
    assert json.loads(written["offramp.json"])["task"] == before["task"]
    assert 'offramp.load("user/name")' in (main / "README.md").read_text(encoding="utf-8")


def test_what_is_not_a_run_and_what_is_not_a_name_is_refused(fake: FakeHub, own: Path, tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match=r"offramp\.json"):
        offramp.push_to_hub(tmp_path, "user/name")
    with pytest.raises(OfframpError, match="'name'"):
        offramp.push_to_hub(own, "name")


def test_an_upload_that_the_hub_refuses_says_what_to_check(
    fake: FakeHub, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(fake, "create_repo", refuse)
    with pytest.raises(OfframpError, match=r"403 Forbidden[\s\S]*HF_TOKEN"):
        offramp.push_to_hub(own, "user/name")


def test_names_that_the_hub_lacks_are_refused_with_its_reason(fake: FakeHub) -> None:
    with pytest.raises(OfframpError, match=r"user/missing[\s\S]*404"):
        offramp.load("user/missing")


def test_paths_are_not_looked_up_on_the_hub(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("later/run.partial").mkdir(parents=True)
    for path in ("runs/mistyped", "later/run", "./a", "/a/b", "a/b/c", "name", Path("user/name")):
        with pytest.raises(OfframpError, match="run folder"):
            offramp.load(path)
    assert fake.calls == [] and hub.is_hub_name("user/name") and not hub.is_hub_name("runs/mistyped")


def test_a_path_may_begin_with_the_home_folder(fake: FakeHub, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(own.parent))
    assert offramp.load(f"~/{own.name}").predict(["a good film"])[0]["label"]
    assert fake.calls == []


def test_a_revision_of_a_folder_is_refused(fake: FakeHub, own: Path) -> None:
    with pytest.raises(OfframpError, match="v2"):
        offramp.load(own, revision="v2")


def test_commands_take_the_name_of_a_run_on_the_hub(fake: FakeHub, own: Path, tmp_path: Path) -> None:
    hub.push_to_hub(own, "user/name")
    rows = factories.write_jsonl(tmp_path / "rows.jsonl", factories.labelled_rows("classification", 20))
    assert info("user/name").spec["method"] == info(own).spec["method"]
    assert offramp.evaluate("user/name", rows)["rows"] == 20
    assert explain("user/name", ["a good film"])
    found = bench("user/name", rows, batch_sizes=[4], budgets=["1.0"], against=[], rounds=1, memory=False)
    assert found["rows"] and str(tmp_path) not in found["model"]
    [service] = serve.load_services(serve.named_runs(["user/name"]), serve.ServeOptions())
    assert service.name == "name"


def test_commands_that_write_to_a_run_say_how_to_download_it(fake: FakeHub, own: Path, tmp_path: Path) -> None:
    hub.push_to_hub(own, "user/name")
    rows = factories.write_jsonl(tmp_path / "rows.jsonl", factories.labelled_rows("classification", 40))
    with pytest.raises(OfframpError, match="hf download user/name"):
        offramp.calibrate("user/name", rows)
    with pytest.raises(OfframpError, match="hf download user/name"):
        offramp.train(model="user/name", init="user/name", train=rows, out=tmp_path / "out", method="full")
