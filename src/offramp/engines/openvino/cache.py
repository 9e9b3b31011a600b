"""Compiled graphs by name: compiled on first use, kept in memory and, if there is a folder, on disk.

A file name ends in a digest of everything the graph depends on: the function and its weights, the settings, the library
versions, the processor. A graph that no longer fits is compiled again, and its old file is removed.
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
        found = None if path is None else self._read(path, settings)
        if found is not None:
            return Graph(found, first)
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
        return self.folder / f"{spec.name}.{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.blob"

    def _read(self, path: Path, settings: CompileSettings) -> Any | None:
        try:
            return self.core.import_model(path.read_bytes(), "CPU", settings.properties())
        except (OSError, RuntimeError):  # missing or damaged
            return None

    def _write(self, path: Path, spec: GraphSpec, compiled: Any) -> None:
        """Write the compiled graph under a temporary name first; a folder that cannot be written only costs time."""
        fresh = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(compiled.export_model().getvalue())
            for old in path.parent.glob(f"{spec.name}.*.blob"):
                old.unlink(missing_ok=True)
            fresh.replace(path)


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
