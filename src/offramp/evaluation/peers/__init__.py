"""Static runtimes to compare with: the same folder, weights and rows, every batch padded to its longest row.

One file per peer; the folder is the list. A peer file exports `VARIANTS` and `load_peer(model, variant)`, which returns
a function from a batch of token ids to logits. A converted model is kept in `model.work`, so that a second call
(another process, another precision) finds it. Import the runtime inside `load_peer`: it may not be installed.
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
    """An engine or runtime in one precision."""

    engine: str
    precision: str


@dataclass(frozen=True)
class BenchModel:
    """The run that all contenders load."""

    run: str  # a model folder, which plain transformers opens too
    auto_class: str
    work: str  # a folder for converted models
    threads: int
    samples: tuple[Encoded, ...] = ()  # rows on which a runtime may measure the ranges of activations


@dataclass(frozen=True)
class Peer:
    """A peer: its variants and its loader."""

    name: str
    variants: tuple[EngineVariant, ...]
    load: Callable[[BenchModel, EngineVariant], PeerRunner]


def names() -> list[str]:
    """Return the names of all peers: the files of this folder, as the command line spells them."""
    found = (p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))
    return sorted(name.replace("_", "-") for name in found)


def get(name: str) -> Peer:
    """Return a peer by name."""
    if name not in names():
        raise OfframpError("a runtime to measure against", repr(name), f"use some of: {', '.join(names())}")
    file = import_module(f"{__name__}.{name.replace('-', '_')}")
    return Peer(name, tuple(file.VARIANTS), file.load_peer)
