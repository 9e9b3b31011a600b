"""The package offramp-native: found or not, and the instruction set that runs."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from offramp.errors import OfframpError

INSTRUCTION_SET = "OFFRAMP_NATIVE_ISA"  # environment variable that forces one, for tests and comparisons


@cache
def import_native() -> Any:
    """Return the compiled package."""
    try:
        import offramp_native
    except ImportError as error:
        fix = "run `pip install ./native` in a working copy (it needs a C++ compiler), or use another engine"
        raise OfframpError("the native engine", f"an environment without offramp-native ({error})", fix) from error
    return offramp_native


def instruction_set() -> str:
    """Return the instruction set that runs: the one that is forced, else the best of this processor."""
    available: list[str] = import_native().instruction_sets()
    forced = os.environ.get(INSTRUCTION_SET, "")
    if forced and forced not in available:
        raise OfframpError(
            f"an instruction set in {INSTRUCTION_SET}", repr(forced), f"use one of: {', '.join(available)}"
        )
    return forced or available[-1]
