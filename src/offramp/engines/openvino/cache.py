"""Compiled graphs by name: made when first asked for, kept in memory and, if there is a folder, on disk.

A file's name ends in a digest of everything it depends on: the function and its weights, the settings, the versions of
the libraries, the processor. What does not fit any more is made anew, and its older namesake removed.
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
from offramp.engines.openvino.graphs import Sketch
from offramp.engines.openvino.recording import record
from offramp.engines.openvino.runtime import GROUP, TOLERANCE, Graph, Settings, convert, library, quantise
from offramp.errors import OfframpError


class Shelf:
    """Graphs of one model under one precision and number of threads."""

    def __init__(self, settings: Settings, folder: Path | None) -> None:
        threads = "" if settings.threads is None else f"-{settings.threads}"
        self.settings = settings
        self.folder = None if folder is None else folder / "openvino" / f"{settings.precision}{threads}"
        self.core, self.lock = library().Core(), threading.RLock()
        self.graphs: dict[str, Graph | None] = {}

    def get(self, name: str, draw: Callable[[], Sketch]) -> Graph:
        """The graph of that name; `draw` says what it is if it is not there yet."""
        graph = self.graphs.get(name)
        if graph is None:
            with self.lock:
                graph = self.graphs.get(name) or self._make(draw(), self.settings)
                self.graphs[name] = graph
        return graph

    def attempt(self, name: str, draw: Callable[[], Sketch]) -> Graph | None:
        """The same in fp32 for a function that may be beyond tracing; None if it is."""
        if name not in self.graphs:
            with self.lock:
                if name not in self.graphs:
                    self.graphs[name] = self._attempt(draw)
        return self.graphs[name]

    def _attempt(self, draw: Callable[[], Sketch]) -> Graph | None:
        try:
            return self._make(draw(), Settings("fp32", self.settings.threads))
        except _CANNOT:
            return None

    def _make(self, sketch: Sketch, settings: Settings) -> Graph:
        first = sketch.samples[0].given
        recorded = record(lambda: sketch.function(first), list(first.values()))
        path = None if self.folder is None else self._path(sketch, recorded.digest.hexdigest(), settings)
        found = None if path is None else self._read(path, settings)
        if found is not None:
            return Graph(found, first)
        model = convert(sketch, list(recorded.constants.values()))
        if settings.precision == "int8":
            quantise(model)
        compiled = self.core.compile_model(model, "CPU", settings.properties())
        graph = Graph(compiled, first)
        _check(graph, sketch, settings)
        if path is not None:
            self._write(path, sketch, compiled)
        return graph

    def _path(self, sketch: Sketch, digest: str, settings: Settings) -> Path:
        parts = (digest, sorted(settings.properties().items()), settings.precision, GROUP, *_versions())
        assert self.folder is not None
        return self.folder / f"{sketch.name}.{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.blob"

    def _read(self, path: Path, settings: Settings) -> Any | None:
        try:
            return self.core.import_model(path.read_bytes(), "CPU", settings.properties())
        except (OSError, RuntimeError):  # not there, or damaged
            return None

    def _write(self, path: Path, sketch: Sketch, compiled: Any) -> None:
        """Beside what another process may be writing; a folder that cannot be written costs time, nothing else."""
        fresh = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(compiled.export_model().getvalue())
            for old in path.parent.glob(f"{sketch.name}.*.blob"):
                old.unlink(missing_ok=True)
            fresh.replace(path)


_CANNOT = (AssertionError, AttributeError, LookupError, OfframpError, RuntimeError, TypeError, ValueError)


def _versions() -> tuple[str, ...]:
    """What else a compiled graph depends on."""
    chip = torch.backends.cpu.get_cpu_capability()
    return (__version__, torch.__version__, library().get_version(), platform.machine(), chip)


def _check(graph: Graph, sketch: Sketch, settings: Settings) -> None:
    """A fresh graph must compute what torch computes."""
    for sample in sketch.samples:
        with torch.no_grad():
            theirs, shapes = sample.truth(), [t.shape for t in sketch.function(sample.given)]
        outputs = [torch.empty(shape) for shape in shapes]
        graph(sample.given, outputs)
        for ours, wanted in zip(outputs, theirs, strict=True):
            ours = ours.view(wanted.shape)
            wrong = float((ours - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
            if not wrong <= TOLERANCE[settings.precision]:
                given = f"a compiled {sketch.name} whose results differ by {wrong:.2g}"
                fix = "use --engine torch, and report it"
                raise OfframpError("OpenVINO to compute what torch computes", given, fix)
