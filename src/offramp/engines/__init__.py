"""How half-layers are executed. One file per engine; the folder is the list."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from offramp.backbones import Encoder
from offramp.core.loop import Engine
from offramp.errors import OfframpError


def names() -> list[str]:
    """The engines there are: the files of this folder."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def make(name: str, encoder: Encoder) -> Engine:
    """An engine by name over an encoder's parameters."""
    if name not in names():
        raise OfframpError("an engine", repr(name), f"use one of: {', '.join(names())}")
    engine: Engine = import_module(f"{__name__}.{name}").make(encoder)
    return engine
