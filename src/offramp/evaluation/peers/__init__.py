"""Static runtimes to be measured against: the same folder, weights and rows, every batch padded to its longest row.

One file per peer; the folder is the list. A peer file exports `VARIANTS` and `load(ground, variant)`, which gives a
function from a batch of token ids to logits. What a peer converts it keeps in `ground.work`, so that a second `load`
(another process, another precision) finds it. Import the runtime inside `load`: it may not be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError

EncodedBatch = Sequence[Encoded]
Logits = list[NDArray[Any]]  # one array for each row of a batch: [outputs] or [tokens, outputs]
PeerRunner = Callable[[EncodedBatch], Logits]
Padded = dict[str, NDArray[np.int64]]  # ids, mask and types, each [rows, longest]


class EngineVariant(NamedTuple):
    """One way to run a peer."""

    engine: str
    precision: str


@dataclass(frozen=True)
class BenchModel:
    """Where everybody competes."""

    run: str  # a model folder, which plain transformers opens too
    auto_class: str
    work: str  # a folder for what peers convert
    threads: int


@dataclass(frozen=True)
class Peer:
    """A peer file under one type."""

    name: str
    variants: tuple[EngineVariant, ...]
    load: Callable[[BenchModel, EngineVariant], PeerRunner]


def names() -> list[str]:
    """The peers there are: the files of this folder, as the command line spells them."""
    found = (p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))
    return sorted(name.replace("_", "-") for name in found)


def get(name: str) -> Peer:
    """A peer by name."""
    if name not in names():
        raise OfframpError("somebody to measure against", repr(name), f"use some of: {', '.join(names())}")
    file = import_module(f"{__name__}.{name.replace('-', '_')}")
    return Peer(name, tuple(file.VARIANTS), file.load)
