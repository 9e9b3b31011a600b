"""Goodput under a latency target: `offramp serve` beside full depth behind LitServe, same machine, weights and client.

    pip install litserve
    python benchmarks/serve_comparison.py runs/agnews --choose heldout.jsonl --settings agnews.json --serve …
    python benchmarks/serve_comparison.py runs/agnews --data test.jsonl --settings agnews.json --name agnews \
        --json results/agnews/serving/comparison.json --plot docs/serving-agnews.svg --serve --precision int8

Three servers, one after another, each in a process of its own, loaded by `load.py`'s Poisson client from this process:

- litserve: full depth behind LitServe with dynamic batching, on the quickest static runtime.
- full: `offramp serve` at full depth (`--budget 1 --min-budget 1`). adaptive: `offramp serve` with its default budget
  and gears.

The first command chooses LitServe's runtime (the one with the most rows a second in batches of 16) and a setting of
each server (`SETTINGS`: LitServe's batch size, waiting time, workers and threads; threads of `offramp serve`), the one
with the highest sustained rate on its rows. The second measures on other rows.

A rate is sustained if the 99th percentile of all answers is within the target and at most one request in a hundred was
refused or failed. Rates double until one is not sustained, then the interval is halved twice. The highest sustained
one is then measured anew, for longer, lowered by a tenth until it is sustained again; that measurement counts.
Goodput is what was answered within the target. The median is compared at 30 % of LitServe's sustained rate. Accuracy
stands beside that of LitServe's runtime on the same requests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offramp import __version__
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.inference.budget import parse_latency
from offramp.utils.command_line import command_line
from offramp.utils.files import atomic_replace, write_json
from offramp.utils.hardware import hardware

if __package__:
    from benchmarks.litserve_full_depth import RUNTIMES, StaticRuntime
    from benchmarks.load import FULL_LABEL, run_load, summary
    from benchmarks.server_drills import Address, free_address, running_server, wait_until_ready
else:  # as a script: its own folder is where modules are found
    from litserve_full_depth import RUNTIMES, StaticRuntime
    from load import FULL_LABEL, run_load, summary
    from server_drills import Address, free_address, running_server, wait_until_ready

PROGRAM = "python benchmarks/serve_comparison.py"
LITSERVE, FULL, ADAPTIVE = "litserve", "full", "adaptive"
Rows = Sequence[Mapping[str, Any]]
Run = dict[str, Any]
SETTINGS: dict[str, list[Run]] = {
    LITSERVE: [
        {"batch": batch, "wait": wait, "workers": workers, "threads": threads}
        for batch, wait, workers, threads in [
            (1, 0.0, 1, 2),
            (8, 0.002, 1, 2),
            (16, 0.002, 1, 2),
            (16, 0.005, 1, 2),
            (32, 0.005, 1, 2),
            (16, 0.002, 1, 1),
            (16, 0.002, 2, 1),
        ]
    ],
    FULL: [{"threads": 1}, {"threads": 2}],
    ADAPTIVE: [{"threads": 1}, {"threads": 2}],
}
FULL_DEPTH = ["--budget", "1", "--min-budget", "1"]
COLOURS = {LITSERVE: "#d1495b", FULL: "#444444", ADAPTIVE: "#2f6db3"}
LOWER = 0.9  # of a rate that was not sustained again
PRINTED = ("offered_per_second", "goodput_per_second", "p50_ms", "p99_ms", "refused", "accuracy", "mean_budget")


@dataclass
class Comparison:
    """What is compared: the options of the command, LitServe's runtime, and a folder for converted models."""

    options: argparse.Namespace
    runtime: str
    work: str
    samples: str | None  # rows on which a runtime measures the ranges of activations, if nothing is converted yet

    def server(self, name: str, setting: Run) -> AbstractContextManager[Address]:
        """Start a server with a setting, in a process of its own."""
        return self._litserve(setting) if name == LITSERVE else self._offramp(name, setting)

    @contextmanager
    def _offramp(self, name: str, setting: Run) -> Iterator[Address]:
        own = shlex.split(self.options.adaptive) if name == ADAPTIVE else FULL_DEPTH
        options = ["--slo", self.options.slo, "--threads", str(setting["threads"]), *self.options.serve, *own]
        with running_server(self.options.run, *options) as (_, address):
            yield address

    @contextmanager
    def _litserve(self, setting: Run) -> Iterator[Address]:
        address, script = free_address(), str(Path(__file__).with_name("litserve_full_depth.py"))
        command = [sys.executable, script, self.options.run, "--port", str(address[1]), "--runtime", self.runtime]
        command += [part for name, value in setting.items() for part in (f"--{name}", str(value))]
        command += ["--work", self.work, *(["--samples", self.samples] if self.samples else [])]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, **quiet, start_new_session=True) as process:
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

    def load_once(self, address: Address, rows: Rows, rate: float, seconds: float, seed: int) -> Run:
        """Send one rate and return its numbers."""
        target = parse_latency(self.options.slo)
        numbers = summary(run_load(address, rows, rate, seconds, {}, seed=seed), rate, seconds, target)
        lost = numbers["refused"] + numbers["failed"] + numbers["not_sent"]
        p99 = numbers["p99_ms"] if numbers["p99_ms"] is not None else math.inf
        numbers["sustained"] = p99 <= 1000 * target and lost <= 0.01 * numbers["sent"]
        print(json.dumps({name: numbers[name] for name in (*PRINTED, "sustained")}), flush=True)
        time.sleep(0.5)
        return numbers

    def search(self, address: Address, rows: Rows, seconds: float, first: float) -> list[Run]:
        """Return the numbers of every rate that was tried until the highest sustained one was found."""
        found, seeds = [], itertools.count(1)

        def sustained(rate: float) -> bool:
            found.append(self.load_once(address, rows, rate, seconds, next(seeds)))
            return bool(found[-1]["sustained"])

        low, high = 0.0, first
        while high <= self.options.most and sustained(high):
            low, high = high, 2 * high
        if low == 0.0:  # the first rate was too much: downwards
            while high > 5.0 and not sustained(high / 2):
                high /= 2
            low = high / 2
        if high <= self.options.most:
            for _ in range(2):
                middle = math.sqrt(low * high)
                low, high = (middle, high) if sustained(middle) else (low, middle)
        return found

    def confirmed(self, address: Address, rows: Rows, rate: float) -> Run:
        """Return a longer measurement of a rate, lowered until it is sustained."""
        for seed in itertools.count(1000):
            numbers = self.load_once(address, rows, rate, self.options.confirm, seed)
            if numbers["sustained"] or rate < 5.0:
                return numbers
            rate *= LOWER
        raise AssertionError("the loop ends at a rate of 5")

    def tuned(self, name: str, rows: Rows) -> tuple[Run, list[Run]]:
        """Return the setting with the highest sustained rate on other rows, and what each reached."""
        tried, first = [], self.options.first
        for setting in SETTINGS[name]:
            print(name, json.dumps(setting), flush=True)
            with self.server(name, setting) as address:
                self.load_once(address, rows, first / 4, 1.0, 0)
                rate = highest_sustained(self.search(address, rows, self.options.tune_seconds, first))
            tried.append({**setting, "sustained_per_second": round(rate, 1)})
            first = max(first, rate)
        chosen = max(range(len(tried)), key=lambda number: float(tried[number]["sustained_per_second"]))
        return SETTINGS[name][chosen], tried

    def measure(self, name: str, setting: Run, rows: Rows, light: float | None) -> Run:
        """Return all numbers of one server with one setting."""
        print(name, json.dumps(setting), flush=True)
        with self.server(name, setting) as address:
            self.load_once(address, rows, self.options.first / 2, 2.0, 0)
            found = self.search(address, rows, self.options.seconds, self.options.first)
            best = self.confirmed(address, rows, highest_sustained(found))
            rate = light if light is not None else 0.3 * best["offered_per_second"]
            quiet = self.load_once(address, rows, rate, self.options.confirm, 99)
        return {"setting": setting, "best": best, "light": quiet, "rates": found}


def highest_sustained(found: Sequence[Run]) -> float:
    """Return the highest rate that was sustained; of none, half the lowest."""
    good = [one["offered_per_second"] for one in found if one["sustained"]]
    return float(max(good) if good else min(one["offered_per_second"] for one in found) / 2)


def quickest_runtime(run: str, rows: Rows, work: str, samples: str | None) -> tuple[str, dict[str, float]]:
    """Return the runtime with the most rows a second in batches of 16 real rows, and the speed of each."""
    speeds = {}
    for name in RUNTIMES:
        runtime = StaticRuntime(run, name, 2, work, samples)
        batches = [rows[start : start + 16] for start in range(0, 16 * 12, 16)]
        for batch in batches:
            runtime.predict(batch)
        started = time.perf_counter()
        for batch in batches:
            runtime.predict(batch)
        speeds[name] = round(sum(map(len, batches)) / (time.perf_counter() - started), 1)
        print(name, speeds[name], "rows a second", flush=True)
    return max(speeds, key=lambda name: speeds[name]), speeds


def with_full_labels(runtime: StaticRuntime, rows: Rows) -> Rows:
    """Return rows with the full model's label, as LitServe's runtime computes it."""
    labels = [label for start in range(0, len(rows), 16) for label in runtime.predict(rows[start : start + 16])]
    return [{**row, FULL_LABEL: label} for row, label in zip(rows, labels, strict=True)]


def choose(options: argparse.Namespace, work: str) -> Run:
    """Return LitServe's runtime and the setting of each server, with what was tried."""
    rows = read_rows(options.choose)[: options.limit]
    runtime, speeds = quickest_runtime(options.run, rows, work, options.choose)
    comparison = Comparison(options, runtime, work, options.choose)
    found = {name: comparison.tuned(name, rows) for name in SETTINGS}
    return {
        "rows": len(rows),
        "runtime": runtime,
        "runtime_rows_per_second": speeds,
        "settings": {name: setting for name, (setting, _) in found.items()},
        "tried": {name: tried for name, (_, tried) in found.items()},
    }


def compare(options: argparse.Namespace, work: str) -> Run:
    """Measure the three servers in the settings that were chosen; without any, in the first of `SETTINGS`."""
    chosen: Run = {"runtime": "openvino-int8", "settings": {name: several[0] for name, several in SETTINGS.items()}}
    if options.settings:
        chosen = json.loads(Path(options.settings).read_text())
    rows = read_rows(options.data)[: options.limit]
    rows = with_full_labels(StaticRuntime(options.run, chosen["runtime"], 2, work), rows)
    comparison, light = Comparison(options, chosen["runtime"], work, None), None
    result: Run = {"rows": len(rows), "chosen": chosen, "servers": {}}
    for name in SETTINGS:
        result["servers"][name] = comparison.measure(name, chosen["settings"][name], rows, light)
        light = result["servers"][name]["light"]["offered_per_second"]
    result["summary"] = _summary(result["servers"])
    return result


def _summary(servers: Mapping[str, Run]) -> Run:
    goodput = {name: server["best"]["goodput_per_second"] for name, server in servers.items()}
    p50 = {name: server["light"]["p50_ms"] for name, server in servers.items()}
    best = servers[ADAPTIVE]["best"]
    return {
        "goodput_per_second": goodput,
        "adaptive_over_litserve": round(goodput[ADAPTIVE] / goodput[LITSERVE], 2),
        "adaptive_over_full": round(goodput[ADAPTIVE] / goodput[FULL], 2),
        "light_rate_per_second": round(servers[LITSERVE]["light"]["offered_per_second"], 1),
        "light_p50_ms": p50,
        "light_p50_adaptive_over_litserve": round(p50[ADAPTIVE] / p50[LITSERVE], 3),
        "light_p50_adaptive_over_full": round(p50[ADAPTIVE] / p50[FULL], 3),
        "accuracy": {name: server["best"]["accuracy"] for name, server in servers.items()},
        "accuracy_adaptive": best["accuracy"],
        "accuracy_of_full_depth_on_the_same_requests": best["accuracy_of_full_depth"],
    }


def draw(result: Run, path: Path) -> None:
    """Draw offered load against the 99th percentile, accuracy and mean budget."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    names = {
        LITSERVE: f"LitServe, {result['chosen']['runtime']}",
        FULL: "offramp serve, full depth",
        ADAPTIVE: "offramp serve",
    }
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = [
        ("p99_ms", "p99 of accepted requests (ms)"),
        ("accuracy", "accuracy"),
        ("mean_budget", "gear: share of the full compute"),
    ]
    for number, (key, label) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 3, number)
        for name, server in result["servers"].items():
            measured = [*server["rates"], server["best"], server["light"]]
            points = sorted((one["offered_per_second"], one[key]) for one in measured if one[key] is not None)
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=COLOURS[name], label=names[name])
        axes.set_xscale("log")
        axes.set_xlabel("requests a second, offered")
        axes.set_ylabel(label)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if key == "p99_ms":
            axes.set_yscale("log")
            axes.axhline(result["slo_ms"], color="#999999", linewidth=0.8, linestyle="--")
        else:
            axes.set_ylim(top=1.02, bottom=0.0 if key == "mean_budget" else 0.6)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"{result['data']}: {result['hardware']}", fontsize=9)
    with atomic_replace(path) as fresh, fresh.open("wb") as stream:
        FigureCanvasSVG(figure).print_svg(stream)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the servers, print a summary, write numbers and plot if wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder with operating points")
    parser.add_argument("--data", help="labelled rows to send")
    parser.add_argument("--choose", help="rows on which runtime and settings are chosen and written to --settings")
    parser.add_argument("--settings", help="runtime and settings, as --choose wrote them")
    parser.add_argument("--work", help="a folder in which converted models are kept")
    parser.add_argument("--name", default="", help="name of the data set in the result")
    parser.add_argument("--limit", type=int, help="use only the first N rows")
    parser.add_argument("--slo", default="50ms")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each rate")
    parser.add_argument("--confirm", type=float, default=10.0, help="duration of the rates that count")
    parser.add_argument("--tune-seconds", type=float, default=2.0, help="duration of a rate while settings are chosen")
    parser.add_argument("--first", type=float, default=100.0, help="first rate")
    parser.add_argument("--most", type=float, default=8000.0, help="rates above this are not tried")
    parser.add_argument("--adaptive", default="", help="options of the adaptive server alone: '--max-loss 0.01'")
    parser.add_argument("--note", default="", help="what a reader should know about the run")
    parser.add_argument("--json", help="write the numbers here")
    parser.add_argument("--plot", help="draw offered load against p99, accuracy and budget here (SVG)")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further options of `offramp serve`")
    options = parser.parse_args(arguments)
    if bool(options.data) == bool(options.choose) or (options.choose and not options.settings):
        raise OfframpError("rows", "both or none of --data and --choose", "give --data, or --choose and --settings")
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or folder
        Path(work).mkdir(parents=True, exist_ok=True)
        if options.choose:
            write_json(Path(options.settings), choose(options, work))
            return
        found = compare(options, work)
    about = {"what": "Goodput of offramp serve and of full depth behind LitServe under a latency target",
             "data": options.name or Path(options.data).name, "slo_ms": 1000 * parse_latency(options.slo),
             "seconds_per_rate": options.seconds, "seconds_of_rates_that_count": options.confirm, "seed": 0,
             "note": options.note}  # fmt: skip
    result = {**about, **found, "command": command_line(PROGRAM), "hardware": hardware(),
              "version": __version__, "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    print(json.dumps(result["summary"]))
    if options.json:
        write_json(Path(options.json), result)
    if options.plot:
        draw(result, Path(options.plot))


if __name__ == "__main__":
    main()
