"""Goodput under a latency target: `offramp serve` beside full depth behind LitServe, same machine, weights and client.

    pip install litserve
    python benchmarks/serve_comparison.py runs/agnews --data test.jsonl --name agnews \
        --json results/agnews/serving/comparison.json --plot docs/serving-agnews.svg

Three servers, one after another, each in a process of its own, loaded by `load.py`'s Poisson client from this process:

- litserve: full depth behind LitServe with dynamic batching. The runtime is the static one that is quickest on batches
  of these rows (ONNX Runtime int8, OpenVINO's whole graph in bf16, OpenVINO int8 layer by layer); batch size, waiting
  time and number of workers are those with the highest goodput of a small search on other rows (`--tune`).
- full: `offramp serve` with a budget of 1, full depth. adaptive: `offramp serve` with its default budget and gears.

A rate is sustained if the 99th percentile of all answers is within the target and at most one request in a hundred was
refused or failed. Rates double until one is not sustained, then the interval is halved twice. Goodput is what was
answered within the target at the highest sustained rate. The median is compared at 30 % of LitServe's sustained rate.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from offramp import __version__
from offramp.data.readers import read_rows
from offramp.inference.budget import parse_latency
from offramp.utils.command_line import command_line
from offramp.utils.files import atomic_replace, write_json
from offramp.utils.hardware import hardware

if __package__:
    from benchmarks.litserve_full_depth import RUNTIMES, StaticRuntime
    from benchmarks.load import send_load, summary
    from benchmarks.server_drills import Address, free_address, running_server, wait_until_ready
else:  # as a script: its own folder is where modules are found
    from litserve_full_depth import RUNTIMES, StaticRuntime
    from load import send_load, summary
    from server_drills import Address, free_address, running_server, wait_until_ready

PROGRAM = "python benchmarks/serve_comparison.py"
KNOBS = [  # batch size, seconds that LitServe waits for a batch to fill, workers
    (16, 0.002, 1),
    (32, 0.005, 1),
    (16, 0.002, 2),
]
COLOURS = {"litserve": "#d1495b", "full": "#444444", "adaptive": "#2f6db3"}
Rows = Sequence[Mapping[str, Any]]
Run = dict[str, Any]


def quickest_runtime(run: str, rows: Rows, threads: int, work: str) -> tuple[str, dict[str, float]]:
    """Return the runtime with the most rows a second in batches of 16 real rows, and the speed of each."""
    speeds = {}
    for name in RUNTIMES:
        runtime = StaticRuntime(run, name, threads, work)
        batches = [rows[start : start + 16] for start in range(0, 16 * 12, 16)]
        for batch in batches:
            runtime.predict(batch)
        started = time.perf_counter()
        for batch in batches:
            runtime.predict(batch)
        speeds[name] = round(sum(map(len, batches)) / (time.perf_counter() - started), 1)
    return max(speeds, key=lambda name: speeds[name]), speeds


@contextmanager
def litserve_server(run: str, runtime: str, knobs: tuple[int, float, int], work: str) -> Iterator[Address]:
    """Start LitServe in a process of its own and wait until it is ready."""
    batch, wait, workers = knobs
    address, threads = free_address(), max(1, 2 // workers)
    script = str(Path(__file__).with_name("litserve_full_depth.py"))
    command = [sys.executable, script, run, "--port", str(address[1]), "--runtime", runtime]
    command += ["--batch", str(batch), "--wait", str(wait), "--workers", str(workers), "--threads", str(threads)]
    command += ["--work", work]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            wait_until_ready(process, address)
            yield address
        finally:  # LitServe's own processes outlive the first one: the whole group is ended
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(3)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def load_once(address: Address, rows: Rows, rate: float, options: argparse.Namespace, fields: Run, seed: int) -> Run:
    """Send one rate and return its numbers."""
    tally = asyncio.run(send_load(address, rows, rate, options.seconds, fields, seed=seed))
    numbers = summary(tally, rate, options.seconds, parse_latency(options.slo))
    lost = numbers["refused"] + numbers["failed"] + numbers["not_sent"]
    p99 = numbers["p99_ms"] if numbers["p99_ms"] is not None else math.inf
    numbers["sustained"] = p99 <= 1000 * parse_latency(options.slo) and lost <= 0.01 * numbers["sent"]
    print(
        json.dumps(
            {
                name: numbers[name]
                for name in (
                    "offered_per_second",
                    "goodput_per_second",
                    "p50_ms",
                    "p99_ms",
                    "refused",
                    "accuracy",
                    "mean_budget",
                    "sustained",
                )
            }
        ),
        flush=True,
    )
    return numbers


def search(address: Address, rows: Rows, options: argparse.Namespace, fields: Run, first: float) -> list[Run]:
    """Return the numbers of every rate that was tried until the highest sustained one was found."""
    found, seeds = [], itertools.count(1)

    def sustained(rate: float) -> bool:
        found.append(load_once(address, rows, rate, options, fields, next(seeds)))
        time.sleep(0.5)
        return bool(found[-1]["sustained"])

    low, high = 0.0, first
    while high <= options.most and sustained(high):
        low, high = high, 2 * high
    if low == 0.0:  # the first rate was too much: downwards
        while high > 5.0 and not sustained(high / 2):
            high /= 2
        low = high / 2
    if high <= options.most:
        for _ in range(2):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if sustained(middle) else (low, middle)
    return found


def best_of(found: Sequence[Run]) -> Run:
    """Return the numbers of the highest sustained rate; of none, those with the highest goodput."""
    good = [one for one in found if one["sustained"]]
    return max(good or found, key=lambda one: one["offered_per_second"] if good else one["goodput_per_second"])


def compare(options: argparse.Namespace) -> Run:
    """Measure the three servers."""
    rows, first = read_rows(options.data), options.first
    if options.limit:
        rows = rows[: options.limit]
    result: Run = {"servers": {}}
    with tempfile.TemporaryDirectory() as work:
        runtime, speeds = options.runtime, {}
        if not runtime:
            runtime, speeds = quickest_runtime(options.run, rows, 2, work)
        knobs, tuning = (options.knobs[0], options.knobs[1], int(options.knobs[2])), []
        if options.tune:
            knobs, tuning = tune_litserve(options, runtime, work)
        with litserve_server(options.run, runtime, knobs, work) as address:
            load_once(address, rows, 20.0, options, {}, 0)
            found = search(address, rows, options, {}, first)
            rate = 0.3 * best_of(found)["offered_per_second"]
            light = load_once(address, rows, rate, options, {}, 99)
    about = {"runtime": runtime, "batch": knobs[0], "batch_wait_ms": 1000 * knobs[1], "workers": knobs[2]}
    result["servers"]["litserve"] = {**about, "rates": found, "light": light, "runtime_rows_per_second": speeds}
    result["servers"]["litserve"]["tuning"] = tuning
    for name, fields in (("full", {"budget": 1.0}), ("adaptive", {})):
        with running_server(options.run, "--slo", options.slo, *options.serve) as (_, address):
            load_once(address, rows, 50.0, options, fields, 0)
            found = search(address, rows, options, fields, 2 * first)
            light = load_once(address, rows, rate, options, fields, 99)
        result["servers"][name] = {"options": list(options.serve), "rates": found, "light": light}
    for server in result["servers"].values():
        best = best_of(server["rates"])
        keys = ("offered_per_second", "goodput_per_second", "p99_ms", "accuracy", "mean_budget", "sustained")
        server["best"] = {key: best[key] for key in keys}
    result["summary"] = _summary(result["servers"], rate)
    return result


def tune_litserve(options: argparse.Namespace, runtime: str, work: str) -> tuple[tuple[int, float, int], list[Run]]:
    """Return the knobs with the highest goodput on the rows of `--tune`, and what each reached."""
    rows, tried = read_rows(options.tune), []
    for knobs in KNOBS:
        with litserve_server(options.run, runtime, knobs, work) as address:
            load_once(address, rows, 20.0, options, {}, 0)
            best = best_of(search(address, rows, options, {}, options.first))
        tried.append({"knobs": knobs, "sustained_per_second": best["offered_per_second"] if best["sustained"] else 0.0})
    chosen = max(range(len(KNOBS)), key=lambda number: tried[number]["sustained_per_second"])
    return KNOBS[chosen], tried


def _summary(servers: Mapping[str, Run], rate: float) -> Run:
    goodput = {name: server["best"]["goodput_per_second"] for name, server in servers.items()}
    p50 = {name: server["light"]["p50_ms"] for name, server in servers.items()}
    return {
        "goodput_per_second": goodput,
        "adaptive_over_litserve": round(goodput["adaptive"] / goodput["litserve"], 2),
        "adaptive_over_full": round(goodput["adaptive"] / goodput["full"], 2),
        "light_rate_per_second": round(rate, 1),
        "light_p50_ms": p50,
        "light_p50_adaptive_over_litserve": round(p50["adaptive"] / p50["litserve"], 3),
        "light_p50_adaptive_over_full": round(p50["adaptive"] / p50["full"], 3),
        "accuracy": {name: server["best"]["accuracy"] for name, server in servers.items()},
    }


def draw(result: Run, path: Path) -> None:
    """Draw offered load against the 99th percentile, accuracy and mean budget."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = [
        ("p99_ms", "p99 of accepted requests (ms)"),
        ("accuracy", "accuracy"),
        ("mean_budget", "share of the full compute"),
    ]
    for number, (key, label) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 3, number)
        for name, server in result["servers"].items():
            points = sorted((one["offered_per_second"], one[key]) for one in server["rates"] if one[key] is not None)
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=COLOURS[name], label=name)
        axes.set_xscale("log")
        axes.set_xlabel("requests a second, offered")
        axes.set_ylabel(label)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if key == "p99_ms":
            axes.set_yscale("log")
            axes.axhline(result["slo_ms"], color="#999999", linewidth=0.8, linestyle="--")
            axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{result['data']}: {result['hardware']}", fontsize=9)
    with atomic_replace(path) as fresh, fresh.open("wb") as stream:
        FigureCanvasSVG(figure).print_svg(stream)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the servers, print a summary, write numbers and plot if wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder with operating points")
    parser.add_argument("--data", required=True, help="labelled rows to send")
    parser.add_argument("--name", default="", help="name of the data set in the result")
    parser.add_argument("--limit", type=int, help="use only the first N rows")
    parser.add_argument("--slo", default="50ms")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each rate")
    parser.add_argument("--first", type=float, default=100.0, help="first rate")
    parser.add_argument("--most", type=float, default=8000.0, help="rates above this are not tried")
    parser.add_argument("--runtime", choices=RUNTIMES, help="LitServe's runtime; if left out, the quickest")
    parser.add_argument("--tune", help="rows on which LitServe's options are chosen; if left out, --knobs")
    parser.add_argument("--knobs", type=float, nargs=3, default=[16, 0.002, 1], help="batch size, wait in s, workers")
    parser.add_argument("--json", help="write the numbers here")
    parser.add_argument("--plot", help="draw offered load against p99, accuracy and budget here (SVG)")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further options of `offramp serve`")
    options = parser.parse_args(arguments)
    options.knobs[0] = int(options.knobs[0])
    about = {"what": "Goodput of offramp serve and of full depth behind LitServe under a latency target",
             "data": options.name or Path(options.data).name, "slo_ms": 1000 * parse_latency(options.slo),
             "seconds_per_rate": options.seconds, "seed": 0}  # fmt: skip
    result = {**about, **compare(options), "command": command_line(PROGRAM), "hardware": hardware(),
              "version": __version__, "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    print(json.dumps(result["summary"]))
    if options.json:
        write_json(Path(options.json), result)
    if options.plot:
        draw(result, Path(options.plot))


if __name__ == "__main__":
    main()
