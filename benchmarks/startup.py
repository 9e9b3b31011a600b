"""Seconds from pressing Enter to an answer that needs no model: imports, versions and help pages.

    python benchmarks/startup.py --rounds 10 --json startup.json

Every measurement is a fresh process; the median and the best of the rounds are reported, beside what Python itself
takes to start. `python -X importtime -m offramp.cli --help` shows where the time of one of them goes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offramp import __version__
from offramp.utils.command_line import command_line
from offramp.utils.files import write_json
from offramp.utils.hardware import hardware

PROGRAM = "python benchmarks/startup.py"
TARGET = 0.3  # seconds that `offramp --help` may take
CASES = {
    "python -c pass": ["-c", "pass"],
    "import offramp": ["-c", "import offramp"],
    "offramp --help": ["-m", "offramp.cli", "--help"],
    "offramp --version": ["-m", "offramp.cli", "--version"],
    "offramp train --help": ["-m", "offramp.cli", "train", "--help"],
    "offramp eval --help": ["-m", "offramp.cli", "eval", "--help"],
    "from offramp import train": ["-c", "from offramp import train"],
}


def measure_startup(rounds: int) -> dict[str, dict[str, float]]:
    """Return the median and the best of `rounds` fresh processes for every case, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, arguments in CASES.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - started)
    return {
        name: {"median": round(statistics.median(taken), 4), "best": round(min(taken), 4)}
        for name, taken in seconds.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a line for each case, and write the numbers if wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="fresh processes for each case")
    parser.add_argument("--json", help="write the numbers here")
    options = parser.parse_args(arguments)
    found = measure_startup(max(1, options.rounds))
    file: dict[str, Any] = {
        "seconds": found,
        "target": {"offramp --help": TARGET},
        "rounds": max(1, options.rounds),
        "hardware": hardware(),
        "command": command_line(PROGRAM),
        "version": __version__,
    }
    if options.json:
        write_json(Path(options.json), file)
    for name, taken in found.items():
        print(f"{name:28} median {taken['median']:.3f} s, best {taken['best']:.3f} s")


if __name__ == "__main__":
    main()
