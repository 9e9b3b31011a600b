"""Engines execute the half-layers of an encoder. One file or package per engine; the folder is the list."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Literal, get_args

from torch import device as Device  # a module `torch` lives in this folder

from offramp.backbones import Encoder
from offramp.core.loop import Engine
from offramp.errors import OfframpError
from offramp.utils.cache_folder import cache_folder

AUTO = "auto"
PACKAGES = {"native": "offramp_native", "openvino": "openvino"}  # what an engine needs besides torch; the fastest first
Precision = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True)
class EngineOptions:
    """Precision, threads and cache folders of an engine."""

    precision: Precision = "fp32"
    threads: int | None = None  # None: as many as the process may use cores
    cache: Path | None = None  # where compiled graphs of this model are kept for the next start; None: nowhere
    packed_weights: Path | None = field(default_factory=cache_folder)  # where packed weights are kept; None: nowhere

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise OfframpError("a precision", repr(self.precision), f"use one of: {known}")
        if self.threads is not None and (not isinstance(self.threads, int) or self.threads < 1):
            raise OfframpError("a number of threads", f"threads={self.threads!r}", "use 1 or more, or leave it out")


def names() -> list[str]:
    """Return the names of the engines: the files and packages of this folder."""
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def installed() -> list[str]:
    """Return the names of the engines whose packages are installed."""
    return [name for name in names() if name not in PACKAGES or find_spec(PACKAGES[name]) is not None]


def choose(name: str, device: Device, encoder: Encoder | None = None, options: EngineOptions | None = None) -> str:
    """Return the engine that a name means; "auto" is the first that is installed and serves the model on the device."""
    return explain_choice(name, device, encoder, options)[0]


def explain_choice(
    name: str, device: Device, encoder: Encoder | None = None, options: EngineOptions | None = None
) -> tuple[str, str]:
    """Return the engine that a name means, and why: one sentence.

    "auto" is the native engine on a CPU where it is installed and serves the model in the wanted precision, else
    OpenVINO where it is installed, else torch. Without an encoder any model is assumed to be served.
    """
    if name != AUTO:
        if name not in names():
            raise OfframpError("an engine", repr(name), f"use one of: {', '.join([AUTO, *names()])}")
        return name, "it was named"
    if device.type != "cpu":
        return "torch", f"the model runs on {device.type}"
    passed_over: list[str] = []
    for candidate, package in PACKAGES.items():
        reason = "" if find_spec(package) is not None else f"{package.replace('_', '-')} is not installed"
        if not reason and candidate == "native":
            reason = _why_not_native(encoder, options or EngineOptions())
        if not reason:
            why = "the fastest one that is installed and serves the model"
            return candidate, "; ".join([why, *passed_over])
        passed_over.append(f"not {candidate}: {reason}")
    return "torch", "; ".join(passed_over)


def _why_not_native(encoder: Encoder | None, options: EngineOptions) -> str:
    native = import_module(f"{__name__}.native")
    try:
        native.import_native()
    except OfframpError as error:  # installed, but for another Python or another system
        return error.given
    reason: str = "" if encoder is None else native.unserved_reason(encoder, options)
    return reason


def versions(name: str) -> dict[str, str]:
    """Return the versions of the packages that an engine computes with."""
    packages: dict[str, str] = import_module(f"{__name__}.{name}").versions()
    return packages


def make(name: str, encoder: Encoder, options: EngineOptions | None = None) -> Engine:
    """Create an engine by name over an encoder's parameters."""
    options = options or EngineOptions()
    engine: Engine = import_module(f"{__name__}.{choose(name, Device('cpu'), encoder, options)}").make(encoder, options)
    return engine
