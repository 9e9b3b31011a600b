"""Batch jobs on a Ray node: every row once whatever is killed, and never onto answers of another job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from offramp import distributed
from offramp.cli import main
from offramp.distributed import batch
from offramp.distributed.manifest import OutputFolder
from offramp.distributed.worker import BlockWorker
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.utils.progress import progress_listener
from tests import factories
from tests.distributed.rows import LONG_TEXT, read_output


class DyingWorker(BlockWorker):
    """An actor that is killed once, after it has written block 5 and before the driver knows."""

    def process(self, block: Any) -> dict[str, Any]:
        flag = Path(f"{self.folder.root}-killed")
        record = super().process(block)
        if block.number == 5 and not flag.exists():
            flag.touch()
            os._exit(1)
        return record


def expected_labels(run: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Return the labels of an undisturbed prediction."""
    return [one["label"] for one in Predictor.load(run, "torch").predict([row["text"] for row in rows], 0.5)]


@pytest.fixture(scope="module")
def finished(ray_node: Any, trained: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a finished job with budget 0.5, one of whose actors was killed."""
    output = tmp_path_factory.mktemp("finished") / "out"
    ray_node.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    reports: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch, progress_listener(lambda *now: reports.append(now)):
        patch.setattr(batch, "BlockWorker", DyingWorker)
        summary = distributed.predict(texts, trained, output, budget=0.5, engine="torch", block_rows=8, replicas=1)
    assert (summary.rows, summary.errors, summary.replicas, summary.failed) == (100, 3, 1, [])
    assert summary.rows_per_second > 0.0 and 0.0 < summary.mac_share < 1.0
    assert reports[-1] == (100, 100)
    return output


def test_a_killed_actor_loses_and_repeats_no_row(finished: Path, trained: Path) -> None:
    assert {path.name for path in finished.parent.iterdir()} == {"out", "out-killed"}
    rows = read_output(finished)
    readable = [row for row in rows if not row["error"]]
    assert [row.get("id") for row in rows] == [None if i == 31 else i for i in range(100)]
    assert [row["predicted_label"] for row in readable] == expected_labels(trained, readable)


def test_a_finished_job_starts_no_actor(finished: Path, trained: Path, texts: Path) -> None:
    before = factories.read_files(finished)
    again = distributed.predict(texts, trained, finished, budget=0.5, engine="torch", block_rows=8)
    assert (again.rows, again.earlier_rows, again.replicas) == (100, 100, 0)
    after = factories.read_files(finished)
    assert {name: after[name] for name in before if "summary" not in name} == {
        name: content for name, content in before.items() if "summary" not in name
    }


def test_another_job_never_continues_onto_old_answers(
    finished: Path, trained: Path, texts: Path, tmp_path: Path
) -> None:
    same: dict[str, Any] = {"budget": 0.5, "engine": "torch", "block_rows": 8}
    with pytest.raises(OfframpError, match="another budget"):
        distributed.predict(texts, trained, finished, **{**same, "budget": 0.6})
    with pytest.raises(OfframpError, match="another block rows"):
        distributed.predict(texts, trained, finished, **{**same, "block_rows": 9})
    with pytest.raises(OfframpError, match="another way to read long inputs"):
        distributed.predict(texts, trained, finished, **same, long="window")
    other = Path(shutil.copytree(trained, tmp_path / "run"))
    points = json.loads((other / "points.json").read_text())
    (other / "points.json").write_text(json.dumps(points, indent=1))
    with pytest.raises(OfframpError, match="other operating points"):
        distributed.predict(texts, other, finished, **same)
    shutil.copy(trained / "points.json", other / "points.json")
    weights = bytearray((other / "offramp.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "offramp.safetensors").write_bytes(weights)
    with pytest.raises(OfframpError, match="another model"):
        distributed.predict(texts, other, finished, **same)
    copied = shutil.copy(texts, tmp_path / "in.jsonl")
    with pytest.raises(OfframpError, match="other input files"):
        distributed.predict(copied, trained, finished, **same)


def test_a_job_begun_before_a_column_was_added_goes_on_without_it(
    ray_node: Any, trained: Path, texts: Path, tmp_path: Path
) -> None:
    same: dict[str, Any] = {"engine": "torch", "block_rows": 50, "replicas": 1}
    output = tmp_path / "out"
    distributed.predict(texts, trained, output, **same)
    path = output / "_offramp" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert "truncated" in manifest.pop("added")
    path.write_text(json.dumps(manifest))
    (output / "part-000001.jsonl").unlink()
    assert distributed.predict(texts, trained, output, **same).earlier_rows == 50
    first, *_, last = read_output(output)
    assert first.keys() - last.keys() == {"truncated"} and "macs" in last


def test_a_folder_with_other_files_is_refused(trained: Path, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OfframpError, match="other files"):
        distributed.predict(texts, trained, tmp_path, engine="torch")
    with pytest.raises(OfframpError, match="which is a file"):
        distributed.predict(texts, trained, tmp_path / "notes.txt", engine="torch")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_manifest_is_refused_and_a_damaged_record_does_not_count(tmp_path: Path, content: bytes) -> None:
    folder = OutputFolder(tmp_path, "jsonl")
    folder.write_manifest({}, [])
    for number in range(2):
        folder.write_shard(number, b"{}\n", {"rows": 1})
    (tmp_path / "_offramp" / "done" / "part-000001.jsonl.json").write_bytes(content)
    assert list(folder.records()) == [0]
    (tmp_path / "_offramp" / "manifest.json").write_bytes(content)
    with pytest.raises(OfframpError, match="damaged") as raised:
        folder.read_manifest()
    assert "--output" in raised.value.fix


def test_a_killed_driver_is_continued(ray_node: Any, trained: Path, tmp_path: Path) -> None:
    rows = [{"id": i, "text": row["text"]} for i, row in enumerate(factories.labelled_rows("classification", 600, 8))]
    source, output = factories.write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out"
    call = f"distributed.predict({source!r}, {str(trained)!r}, {str(output)!r}, budget=0.5, engine='torch', "
    address = ray_node.get_runtime_context().gcs_address
    script = f"from offramp import distributed\n{call}block_rows=2, replicas=1, address={address!r})"
    driver = subprocess.Popen([sys.executable, "-c", script])
    done = output / "_offramp" / "done"
    while driver.poll() is None and (not done.is_dir() or len(list(done.iterdir())) < 5):
        time.sleep(0.005)
    driver.send_signal(signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL, "the job ended before it could be killed"
    assert 0 < len(OutputFolder(output, "jsonl").records()) < 300
    summary = distributed.predict(source, trained, output, budget=0.5, engine="torch", block_rows=2)
    assert summary.rows == 600 and 0 < summary.earlier_rows < 600
    answered = read_output(output)
    assert [row["id"] for row in answered] == list(range(600))
    assert [row["label"] for row in answered] == expected_labels(trained, rows)
    assert not list((output / "_offramp" / "tmp").iterdir())


def test_a_ray_data_set_gets_the_columns(ray_node: Any, trained: Path) -> None:
    rows = [*factories.labelled_rows("classification", 20, 4), {"text": "", "label": "good"}]
    answered = distributed.predict(ray_node.data.from_items(rows), trained, budget=0.5, engine="torch", replicas=1)
    found = {row["text"]: row for row in answered.take_all()}
    assert len(found) == 21 and found[""]["error"] and found[""]["predicted_label"] is None
    assert [found[row["text"]]["predicted_label"] for row in rows[:20]] == expected_labels(trained, rows[:20])


def test_more_actors_than_the_cluster_holds_are_refused(
    ray_node: Any, trained: Path, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(OfframpError, match="5 × 2 threads"):
        distributed.predict(texts, trained, tmp_path / "out", replicas=5, threads=2, engine="torch")


def test_the_command_answers_and_counts(
    ray_node: Any, finished: Path, trained: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", str(trained), "--input", str(texts), "--output", str(tmp_path / "out"), "--budget", "0.5"]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--engine", "torch", "--cluster", "auto", "--replicas", "1", "--output-format", "csv"])
    printed = capsys.readouterr().err
    assert not stop.value.code, printed
    assert "rows answered: 100" in printed and "3 rows with an error" in printed
    labels = [row["predicted_label"] or "" for row in read_output(finished)]
    assert [row["predicted_label"] for row in read_output(tmp_path / "out")] == labels


def command(run: Path, source: str, output: Path, *words: str) -> Any:
    """Run `offramp predict` at full depth and return its exit code."""
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(run), "--input", source, "--output", str(output), "--budget", "1", "--engine", "torch",
              *words])  # fmt: skip
    return stop.value.code


def test_the_command_reads_windows_as_it_does_without_a_cluster(
    ray_node: Any, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*factories.labelled_rows("classification", 5, 4), {"text": LONG_TEXT, "label": "good"}]
    source = factories.write_jsonl(tmp_path / "in.jsonl", rows)
    on_ray = ["--cluster", "auto", "--replicas", "1"]
    windows = ["--long", "window", "--window-pool", "max"]
    assert not command(trained, source, tmp_path / "local.jsonl", *windows)
    assert not command(trained, source, tmp_path / "out", *on_ray, *windows)
    assert "truncated" not in capsys.readouterr().err
    local = [json.loads(line) for line in (tmp_path / "local.jsonl").read_text().splitlines()]
    for row, alone in zip(read_output(tmp_path / "out"), local, strict=True):
        assert row["predicted_label"] == alone["label"] and row["macs"] == alone["macs"]
        assert json.loads(row["scores"]) == pytest.approx(alone["scores"], abs=1e-6)
    assert command(trained, source, tmp_path / "out", *on_ray, "--long", "window")
    assert "another way to read long inputs" in capsys.readouterr().err
    assert not command(trained, source, tmp_path / "truncated", *on_ray)
    assert "1 truncated to 64 tokens" in capsys.readouterr().err


def test_windows_that_are_not_possible_start_no_job(
    trained: Path, every_task: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    for run, options, given in (
        (every_task["pairs"], {"long": "window"}, "pairs of texts"),
        (every_task["tagging"], {"long": "window"}, "the task 'tagging'"),
        (trained, {"long": "fold"}, "long='fold'"),
        (trained, {"long": "window", "window_pool": "median"}, "window_pool='median'"),
    ):
        with pytest.raises(OfframpError, match=given):
            distributed.predict(texts, run, tmp_path / "out", engine="torch", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["--replicas", "2"], ["--cluster", "auto"]])
def test_the_command_refuses_options_that_do_not_go_together(
    trained: Path, texts: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(trained), "--input", str(texts), *words])
    assert stop.value.code == 2 and words[0] in capsys.readouterr().err
