"""Packed weights on disk: found again, bound to the weights, verified, and never necessary."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from offramp.core.packed import pack
from offramp.core.policy import Policy
from offramp.engines.native import import_native, weights
from offramp.inference.predictor import Predictor
from offramp.nn.network import Network
from offramp.utils.cache_folder import cache_folder
from tests import factories
from tests.engines.test_native import answer, native


@pytest.fixture(autouse=True)
def every_model_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SMALLEST_FILE", 0)


@pytest.fixture
def net() -> Network:
    return factories.exit_network()


def folder() -> Path:
    cache = cache_folder()
    assert cache is not None
    return cache / weights.FOLDER


def files() -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder().iterdir()}


def logits(net: Network, precision: str = "fp32") -> list[list[float]]:
    packed = pack(factories.token_ids([3, 9]))
    values: list[list[float]] = answer(native(net, precision), net, Policy(), packed).logits.tolist()
    return values


def test_packed_weights_are_found_again(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    first = logits(net)
    stored = files()
    assert len(stored) == 1
    monkeypatch.setattr(import_native(), "pack", None)  # nothing is packed again
    assert logits(net) == first and files() == stored


def test_other_weights_precisions_and_versions_have_other_files(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    logits(net)
    logits(net, "int8")
    assert len(files()) == 2
    with torch.no_grad():
        net.encoder.layers[0].parts.up.weight[0, 0] += 1.0  # type: ignore[attr-defined]
    logits(net)
    assert len(files()) == 3
    monkeypatch.setattr(import_native(), "__version__", "0.0.0")
    logits(net)
    assert len(files()) == 4
    monkeypatch.setattr(import_native(), "PACKED_LAYOUT", 0)
    logits(net)
    assert len(files()) == 5


NESTED = b"[" * 100_000


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text", "nested", "odd header", "long header"])
def test_damaged_files_are_packed_again(net: Network, damage: str) -> None:
    first = logits(net)
    (path,) = folder().iterdir()
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-100] ^= 1
    length, start = int.from_bytes(content[16:24], "little"), len(weights.MAGIC) + 8
    assert start == 24
    nested = -(-(start + len(NESTED)) // 64) * 64
    changed = {
        "flip": content,
        "cut": content[:-64],
        "empty": b"",
        "text": b"not at all what was written",
        "nested": content[:16] + nested.to_bytes(8, "little") + NESTED.ljust(nested - start) + content[length:],
        "odd header": content[:16]
        + (length + 1).to_bytes(8, "little")
        + content[start:length]
        + b" "
        + content[length:],
        "long header": content[:16] + (1 << 62).to_bytes(8, "little") + content[start:],
    }[damage]
    whole = path.read_bytes()
    path.unlink()  # a file that is mapped keeps its own content
    path.write_bytes(bytes(changed))
    assert logits(net) == first
    assert path.read_bytes() == whole


def test_a_file_of_another_model_is_not_read(net: Network) -> None:
    first = logits(net)
    (own,) = folder().iterdir()
    whole = own.read_bytes()
    with torch.no_grad():
        net.encoder.layers[0].parts.up.weight[0, 0] += 1.0  # type: ignore[attr-defined]
    second = logits(net)
    (other,) = set(folder().iterdir()) - {own}
    other.unlink()
    other.write_bytes(whole)
    assert logits(net) == second != first
    assert other.read_bytes() != whole


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_write_leaves_nothing_behind(
    net: Network, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(weights, "_header", interrupt)
    with pytest.raises(error):
        logits(net)
    assert files() == {}


def test_files_of_killed_writers_are_removed_after_an_hour(net: Network) -> None:
    folder().mkdir(parents=True)
    for name, age in (("old", 3700), ("new", 3500)):
        path = folder() / f"{name}.partial"
        path.write_bytes(b"half")
        os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    logits(net)
    assert {Path(name).suffix for name in files()} == {".packed", ".partial"}
    assert "new.partial" in files() and "old.partial" not in files()


def test_a_folder_that_cannot_be_written_costs_nothing_else(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    expected = logits(net)
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert logits(net) == expected


def test_a_full_disk_leaves_nothing_behind(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    logits(net)
    assert files() == {}


def test_small_models_are_not_stored(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SMALLEST_FILE", 1 << 20)
    logits(net)
    assert not folder().exists()


def test_the_least_recently_used_files_are_removed(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MOST_FILES", 2)
    names = []
    for precision, age in (("fp32", 300), ("int8", 200)):
        logits(net, precision)
        (name,) = set(files()) - set(names)
        names.append(name)
        path = folder() / name
        os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    logits(net)  # used again: now the newest
    with torch.no_grad():
        net.encoder.layers[0].parts.up.weight[0, 0] += 1.0  # type: ignore[attr-defined]
    logits(net)
    assert names[0] in files() and names[1] not in files() and len(files()) == 2


def test_packing_rounds_weights_by_output() -> None:
    """int8: the largest weight of each output becomes ±127; scales stand behind the weights."""
    matrix = np.array([[0.5, -1.0, 0.25], [100.0, 0.0, -50.0]], np.float32)
    packed = np.empty(import_native().packed_size("int8", 2, 3), np.uint8)
    import_native().pack(matrix, "int8", packed)
    values = packed[: 32 * 4].view(np.int8).reshape(32, 4)
    assert values[:2, :3].tolist() == [[64, -127, 32], [127, 0, -64]] and not values[2:].any()
    assert packed[32 * 4 :].view(np.float32)[:2] == pytest.approx([1 / 127, 100 / 127])


PACKED = {  # digests of a packed matrix [33, 3]; with other ones kPackedLayout must be raised
    "fp32": "aef9b3b051742b4c2ed51fb35e5b99d6168eb0fe2d92f20c790367b3112bfd61",
    "bf16": "ccf1830a250caba16efa1f4a024fcd5e30bd407bcb32f81ec952339de61c4964",
    "int8": "2690aeb7bb8de64f81e74d164dd1bfc4d7d4390482270955edef25952873d544",
}


@pytest.mark.skipif(sys.byteorder != "little", reason="the digests are those of little-endian numbers")
@pytest.mark.parametrize("precision", PACKED)
def test_the_layout_of_packed_weights_has_a_number(precision: str) -> None:
    """Files of packed weights outlive the code that wrote them: whoever changes a byte of them must say so."""
    matrix = (np.arange(99, dtype=np.float32).reshape(33, 3) - 40.0) / 7.0
    matrix[1], matrix[2, 1], matrix[32, 2] = 0.0, np.nan, np.inf
    packed = np.zeros(import_native().packed_size(precision, 33, 3), np.uint8)
    import_native().pack(matrix, precision, packed)
    digest = hashlib.sha256(packed.data).hexdigest()
    assert (import_native().PACKED_LAYOUT, digest) == (2, PACKED[precision])


def test_the_cache_folder_may_be_another_one_or_none(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFRAMP_CACHE", str(tmp_path / "other"))
    expected = logits(net)
    assert len(list((tmp_path / "other" / "native").iterdir())) == 1
    monkeypatch.setattr(weights, "_write", None)  # calling it would fail
    monkeypatch.setenv("OFFRAMP_CACHE", "none")
    assert logits(net) == expected


def test_a_predictor_without_cache_writes_no_packed_weights(trained: Path, tmp_path: Path) -> None:
    for cache, count in (("none", 0), (tmp_path / "here", 1)):
        predictor = Predictor.load(trained, "native", cache=cache)
        assert not folder().exists()
        assert len(list(tmp_path.glob("here/native/*"))) == count
        assert pickle.loads(pickle.dumps(predictor)).how == predictor.how
