"""The package offramp-native: found or not, and the instruction set that runs."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from offramp.errors import OfframpError

INSTRUCTION_SET = "OFFRAMP_NATIVE_ISA"  # environment variable that forces one, for tests and comparisons
INTERFACE = 2  # of the compiled package that this code calls


@cache
def import_native() -> Any:
    """Return the compiled package."""
    try:
        import offramp_native
    except ImportError as error:
        fix = "run `pip install ./native` in a working copy (it needs a C++ compiler), or use another engine"
        raise OfframpError("the native engine", f"an environment without offramp-native ({error})", fix) from error
    if getattr(offramp_native, "INTERFACE", 1) != INTERFACE:
        given = f"an offramp-native of another version of this code ({offramp_native.__version__})"
        raise OfframpError("the native engine", given, "run `pip install ./native` again in this working copy")
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
