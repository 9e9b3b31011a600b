"""Offramp's C++ engine. `offramp.engines.native` is what uses it; nothing here needs Offramp or torch."""

from offramp_native._native import (
    INTERFACE,
    MOST_THREADS,
    PACKED_LAYOUT,
    PANEL,
    Encoder,
    Head,
    Linear,
    Rule,
    __version__,
    instruction_sets,
    measure_logits,
    pack,
    packed_size,
)

__all__ = [
    "INTERFACE",
    "MOST_THREADS",
    "PACKED_LAYOUT",
    "PANEL",
    "Encoder",
    "Head",
    "Linear",
    "Rule",
    "__version__",
    "instruction_sets",
    "measure_logits",
    "pack",
    "packed_size",
]
