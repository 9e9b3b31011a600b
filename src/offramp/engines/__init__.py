"""Engines execute the half-layers of an encoder. One file or package per engine; the folder is the list."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Literal, get_args

from torch import device as Device  # a module `torch` lives in this folder

from offramp.backbones import Encoder
from offramp.core.loop import Engine
from offramp.errors import OfframpError

AUTO = "auto"
Precision = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True)
class EngineOptions:
    """Precision, threads and cache folder of an engine."""

    precision: Precision = "fp32"
    threads: int | None = None  # None: as many as the machine has cores
    cache: Path | None = None  # where compiled pieces are kept for the next start

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise OfframpError("a precision", repr(self.precision), f"use one of: {known}")
        if self.threads is not None and self.threads < 1:
            raise OfframpError("a number of threads", f"threads={self.threads}", "use 1 or more, or leave it out")


def names() -> list[str]:
    """Return the names of the engines: the files and packages of this folder."""
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def choose(name: str, device: Device) -> str:
    """Return the engine that a name means: "auto" is OpenVINO on a CPU where it is installed, torch otherwise."""
    if name == AUTO:
        return "openvino" if device.type == "cpu" and find_spec("openvino") is not None else "torch"
    if name not in names():
        raise OfframpError("an engine", repr(name), f"use one of: {', '.join([AUTO, *names()])}")
    return name


def versions(name: str) -> dict[str, str]:
    """Return the versions of the packages that an engine computes with."""
    packages: dict[str, str] = import_module(f"{__name__}.{name}").versions()
    return packages


def make(name: str, encoder: Encoder, options: EngineOptions | None = None) -> Engine:
    """Create an engine by name over an encoder's parameters."""
    engine: Engine = import_module(f"{__name__}.{choose(name, Device('cpu'))}").make(
        encoder, options or EngineOptions()
    )
    return engine
