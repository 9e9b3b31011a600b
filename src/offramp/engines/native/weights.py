"""Matrices packed for the kernels, kept in the cache folder (`--cache`) so that the next start only maps a file.

A file is named after the digest of what it was packed from: the weights, the precision, the layout of packed weights
and the version of the package. Its header holds that digest and one of the packed bytes; a file is read only where both
are right, so one that is damaged, copied over another, or of another version is packed again. A folder that cannot be
written costs time at the next start, nothing else. Packed weights do not depend on the instruction set.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offramp.engines.native.library import import_native
from offramp.errors import OfframpError

FOLDER = "native"  # of the cache folder
SMALLEST_FILE = 1 << 20  # bytes; smaller models are packed sooner than a file is found
MOST_FILES = 32  # the least recently used ones are removed
PARTIAL = ".partial"  # ends the name of a file that is still written
ABANDONED = 3600.0  # seconds after which such a file is removed: its writer was killed
ALIGNMENT = 64  # of each matrix in the file
MAGIC = b"offramp-native\n\0"

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Matrix(NamedTuple):
    """A linear layer's weight [outputs, inputs] and bias."""

    weight: Floats
    bias: Floats | None


def as_floats(tensor: Tensor) -> Floats:
    """Return a tensor's values as a plain array, sharing memory where possible."""
    floats: Floats = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
    return floats


class SharedTables:
    """Tables that the kernels read where the modules keep them, instead of a copy: they may not change any more."""

    def __init__(self, *tables: Tensor | None) -> None:
        # tensors of inference mode count no changes
        self._tables = [table for table in tables if table is not None and not table.is_inference()]
        self._versions = [table._version for table in self._tables]

    def check(self) -> None:
        """Refuse to run with tables that changed in place; all other parameters would be those of before."""
        if [table._version for table in self._tables] != self._versions:
            given = "parameters that changed since the engine was created"
            raise OfframpError("the native engine", given, "create the engine again, or train with torch's")


def pack_matrices(matrices: Sequence[Matrix], precision: str, cache: Path | None) -> list[Any]:
    """Return the matrices as the compiled package's `Linear`, packed now or found in the cache folder, if any."""
    native = import_native()
    sizes = [native.packed_size(precision, *matrix.weight.shape) for matrix in matrices]
    source = "" if cache is None or sum(sizes) < SMALLEST_FILE else _source_digest(matrices, precision)
    path = cache / FOLDER / f"{source[:40]}.packed" if cache is not None and source else None
    packed = None if path is None else _read(path, source, sizes)
    if packed is None:
        packed = [np.empty(size, np.uint8) for size in sizes]
        for matrix, target in zip(matrices, packed, strict=True):
            native.pack(matrix.weight, precision, target)
        if path is not None:
            _write(path, source, packed)
            packed = _read(path, source, sizes) or packed  # mapped, so that processes share the memory
    return [
        native.Linear(target, *matrix.weight.shape, precision, matrix.bias)
        for matrix, target in zip(matrices, packed, strict=True)
    ]


def _source_digest(matrices: Sequence[Matrix], precision: str) -> str:
    """Return the digest of all that packed bytes depend on."""
    native = import_native()
    digest = hashlib.sha256(f"{native.__version__} {precision} {native.PANEL} {native.PACKED_LAYOUT}".encode())
    for matrix in matrices:
        digest.update(repr(matrix.weight.shape).encode())
        digest.update(matrix.weight.data)
    return digest.hexdigest()


def _places(sizes: Sequence[int]) -> list[int]:
    """Return where each matrix begins, and where the last one ends."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return [*places, end]


def _header(source: str, sizes: Sequence[int], digest: str) -> bytes:
    text = json.dumps({"source": source, "sizes": list(sizes), "sha256": digest}).encode()
    length = -(-(len(MAGIC) + 8 + len(text)) // ALIGNMENT) * ALIGNMENT
    header = MAGIC + length.to_bytes(8, "little") + text
    return header.ljust(length, b" ")


def _read(path: Path, source: str, sizes: Sequence[int]) -> list[Bytes] | None:
    """Return the matrices of a file, mapped; None if it is not there, not whole or packed from other weights."""
    try:
        mapped: Bytes = np.memmap(path, np.uint8, mode="r")
        start = len(MAGIC) + 8
        if bytes(mapped[: len(MAGIC)]) != MAGIC:
            return None
        length = int.from_bytes(bytes(mapped[len(MAGIC) : start]), "little")
        if length % ALIGNMENT:
            return None
        stored = json.loads(bytes(mapped[start:length]))
        payload = mapped[length:]
        places = _places(sizes)
        if stored["source"] != source or stored["sizes"] != list(sizes) or len(payload) != places[-1]:
            return None
        if hashlib.sha256(payload.data).hexdigest() != stored["sha256"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # the last one of deeply nested text
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # recently used files are kept
    return [payload[place : place + size] for place, size in zip(places, sizes, strict=False)]


def _write(path: Path, source: str, packed: Sequence[Bytes]) -> None:
    """Write a file as a whole or not at all."""
    sizes = [len(target) for target in packed]
    digest, filler = hashlib.sha256(), bytes(ALIGNMENT)
    pieces = [piece for target in packed for piece in (target.data, filler[: -len(target) % ALIGNMENT])]
    for piece in pieces:
        digest.update(piece)
    fresh = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=PARTIAL, delete=False) as file:
            fresh = Path(file.name)
            file.write(_header(source, sizes, digest.hexdigest()))
            for piece in pieces:
                file.write(piece)
        fresh.replace(path)
        _remove_old(path.parent)
    except BaseException as error:
        if fresh is not None:
            with contextlib.suppress(OSError):
                fresh.unlink()
        if not isinstance(error, OSError):  # a full disk, or a folder that may not be written, costs time only
            raise


def _remove_old(folder: Path) -> None:
    used: list[tuple[float, Path]] = []
    for path in folder.glob("*.packed"):
        with contextlib.suppress(OSError):  # another process may have removed it
            used.append((path.stat().st_mtime, path))
    for _, path in sorted(used)[:-MOST_FILES]:
        path.unlink(missing_ok=True)
    for path in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()
