"""Compiled graphs by name: compiled on first use, kept in memory and, if there is a folder, on disk.

A file name holds a digest of everything the graph depends on (the function and its weights, the settings, the library
versions, the processor) and a digest of the file's own content. A file with other content is not given to OpenVINO, and
a graph from a file must compute what torch computes, like a new one; else the file is removed and the graph is compiled
again. A folder that cannot be written, or a full disk, only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offramp import __version__
from offramp.engines.openvino.graphs import GraphSpec
from offramp.engines.openvino.runtime import (
    GROUP,
    TOLERANCE,
    CompileSettings,
    Graph,
    convert,
    import_openvino,
    quantise,
)
from offramp.engines.openvino.tracing import record_operations
from offramp.errors import OfframpError
from offramp.utils.files import is_running


class GraphCache:
    """Compiled graphs of one model for one precision and number of threads."""

    def __init__(self, settings: CompileSettings, folder: Path | None) -> None:
        threads = "" if settings.threads is None else f"-{settings.threads}"
        self.settings = settings
        self.folder = None if folder is None else folder / "openvino" / f"{settings.precision}{threads}"
        self.core, self.lock = import_openvino().Core(), threading.RLock()
        self.graphs: dict[str, Graph | None] = {}

    def get(self, name: str, build_spec: Callable[[], GraphSpec]) -> Graph:
        """Return the graph of a name, compiled from `build_spec()` on first use."""
        graph = self.graphs.get(name)
        if graph is None:
            with self.lock:
                graph = self.graphs.get(name) or self._make(build_spec(), self.settings)
                self.graphs[name] = graph
        return graph

    def get_or_none(self, name: str, build_spec: Callable[[], GraphSpec]) -> Graph | None:
        """Return the graph in fp32 of a function that may not be traceable; None if it is not."""
        if name not in self.graphs:
            with self.lock:
                if name not in self.graphs:
                    self.graphs[name] = self._compile_or_none(build_spec)
        return self.graphs[name]

    def _compile_or_none(self, build_spec: Callable[[], GraphSpec]) -> Graph | None:
        try:
            return self._make(build_spec(), CompileSettings("fp32", self.settings.threads))
        except CANNOT_TRACE:
            return None

    def _make(self, spec: GraphSpec, settings: CompileSettings) -> Graph:
        first = spec.samples[0].given
        recorded = record_operations(lambda: spec.function(first), list(first.values()))
        path = None if self.folder is None else self._path(spec, recorded.digest.hexdigest(), settings)
        found = None if path is None else self._read(path, spec, settings)
        if found is not None:
            return found
        model = convert(spec, list(recorded.constants.values()))
        if settings.precision == "int8":
            quantise(model)
        compiled = self.core.compile_model(model, "CPU", settings.properties())
        graph = Graph(compiled, first)
        _check(graph, spec, settings)
        if path is not None:
            self._write(path, spec, compiled)
        return graph

    def _path(self, spec: GraphSpec, digest: str, settings: CompileSettings) -> Path:
        parts = (digest, sorted(settings.properties().items()), settings.precision, GROUP, *_versions())
        assert self.folder is not None
        return self.folder / f"{spec.name}.{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"

    def _read(self, path: Path, spec: GraphSpec, settings: CompileSettings) -> Graph | None:
        """Return the graph of a file whose content is what was written and computes what torch computes."""
        for file in _files(path.parent, path.name):
            with contextlib.suppress(OSError):
                content = file.read_bytes()
                try:
                    if file.name == _file_name(path, content):
                        imported = self.core.import_model(content, "CPU", settings.properties())
                        graph = Graph(imported, spec.samples[0].given)
                        _check(graph, spec, settings)
                        return graph
                except (OfframpError, RuntimeError, LookupError, TypeError, ValueError):  # another function's graph
                    pass
                file.unlink(missing_ok=True)
        return None

    def _write(self, path: Path, spec: GraphSpec, compiled: Any) -> None:
        """Write the compiled graph under a temporary name first; after a failure nothing more is written."""
        fresh = path.with_name(f"{path.name}.{threading.get_ident()}.{os.getpid()}{PARTIAL}")
        content = compiled.export_model().getvalue()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(content)
            for old in _files(path.parent, spec.name):
                old.unlink(missing_ok=True)
            fresh.replace(path.with_name(_file_name(path, content)))
            _remove_leftovers(path.parent)
        except OSError:
            self.folder = None
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)


PARTIAL = ".partial"  # ends the name of a file that is being written; the number before it is the process


def _file_name(path: Path, content: bytes) -> str:
    """Return the name of the file with this content."""
    return f"{path.name}.{hashlib.sha256(content).hexdigest()[:32]}.blob"


def _files(folder: Path, name: str) -> list[Path]:
    """Return the files of a graph, whose name is followed by digests."""
    try:
        return [file for file in folder.iterdir() if file.name.startswith(f"{name}.") and file.suffix == ".blob"]
    except OSError:
        return []


def _remove_leftovers(folder: Path) -> None:
    """Remove files of processes that were killed while writing."""
    for file in folder.glob(f"*{PARTIAL}"):
        number = file.name.removesuffix(PARTIAL).rpartition(".")[2]
        if not number.isdecimal() or not is_running(int(number)):
            file.unlink(missing_ok=True)


CANNOT_TRACE = (AssertionError, AttributeError, LookupError, OfframpError, RuntimeError, TypeError, ValueError)


def _versions() -> tuple[str, ...]:
    """Return the versions that a compiled graph depends on."""
    chip = torch.backends.cpu.get_cpu_capability()
    return (__version__, torch.__version__, import_openvino().get_version(), platform.machine(), chip)


def _check(graph: Graph, spec: GraphSpec, settings: CompileSettings) -> None:
    """Check that a new graph computes what torch computes."""
    for sample in spec.samples:
        with torch.no_grad():
            expected, shapes = sample.expected(), [t.shape for t in spec.function(sample.given)]
        outputs = [torch.empty(shape) for shape in shapes]
        graph(sample.given, outputs)
        for ours, wanted in zip(outputs, expected, strict=True):
            ours = ours.view(wanted.shape)
            wrong = float((ours - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
            if not wrong <= TOLERANCE[settings.precision]:
                given = f"a compiled {spec.name} whose results differ by {wrong:.2g}"
                fix = "use --engine torch, and report it"
                raise OfframpError("OpenVINO to compute what torch computes", given, fix)
