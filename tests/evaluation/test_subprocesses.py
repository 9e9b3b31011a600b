"""Work in a fresh process: its result, its memory and its errors."""

from __future__ import annotations

import os
import sys

import pytest

from offramp.errors import OfframpError
from offramp.evaluation.subprocesses import run_fresh


def fill(megabytes: int) -> int:
    return len(bytes([1]) * (megabytes * 1_000_000))


def fail(kind: str) -> None:
    if kind == "offramp":
        raise OfframpError("a", "b", "c")
    raise ValueError("no good")


def die() -> None:
    os._exit(3)


def imported() -> list[str]:
    return [name for name in ("openvino", "openvino_telemetry") if name in sys.modules]


def test_openvino_is_imported_without_telemetry() -> None:
    assert run_fresh(imported, library="openvino").result == ["openvino"]
    assert run_fresh(imported, library="no-such-library").result == run_fresh(imported).result == []


def test_peak_memory_is_that_of_the_work_alone() -> None:
    ballast = b"x" * 200_000_000  # memory of this process does not count
    little, much = run_fresh(fill, 1), run_fresh(fill, 100)
    assert (little.result, much.result) == (1_000_000, 100_000_000) and len(ballast) > 0
    assert little.peak_mb is not None and much.peak_mb is not None
    assert 90 < much.peak_mb - little.peak_mb < 110


def test_errors_are_raised_in_the_calling_process() -> None:
    with pytest.raises(OfframpError, match="asked: a"):
        run_fresh(fail, "offramp")
    with pytest.raises(RuntimeError, match="ValueError: no good"):
        run_fresh(fail, "other")
    with pytest.raises(OfframpError, match="ended with 3"):
        run_fresh(die)
