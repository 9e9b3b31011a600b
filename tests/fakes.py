"""Old names of parts of `tests.factories`, until no test imports them."""

from __future__ import annotations

from tests.factories import ExitAt as Leave
from tests.factories import KeepFirst as Drop
from tests.factories import SetGates as Gate

__all__ = ["Drop", "Gate", "Leave"]
