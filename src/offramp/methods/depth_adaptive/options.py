"""How exits and halting units are built and trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offramp.decoding.exits import DecoderOptions
from offramp.nn.exit_heads import Pool


@dataclass(frozen=True)
class DepthAdaptiveOptions(DecoderOptions):
    """How exits and halting units are built and trained; fixed once trained."""

    level: Literal["auto", "row", "word"] = (
        "auto"  # encoders: what has a depth of its own; auto: words where each has an answer, else rows
    )
    pool: Pool = "meanmax"  # encoders: what exit heads read
