"""Drills of `offramp serve`: what must not go wrong, tried many times against a server in a process of its own.

    python benchmarks/server_drills.py RUN --data test.jsonl --drill sigterm --trials 100
    python benchmarks/server_drills.py RUN --data test.jsonl --drill hangup --clients 1000
    python benchmarks/server_drills.py RUN --data test.jsonl --drill overload --rate 2000 --seconds 300
    python benchmarks/server_drills.py RUN --data test.jsonl --drill soak --rate 50 --seconds 1800
    python benchmarks/server_drills.py RUN --data test.jsonl --drill drift --other imdb.jsonl --limit 0.02
    python benchmarks/server_drills.py RUN --data test.jsonl --drill schema --examples 100
    python benchmarks/server_drills.py RUN --data test.jsonl --drill startup --trials 5
    python benchmarks/server_drills.py RUN --data test.jsonl --drill detection --trials 200

sigterm: SIGTERM under load; every request that was sent is answered, or refused with 503. hangup: clients that leave
without reading; no work stays behind. overload: more than the server can do; latency of accepted requests, refusals,
memory, time back to the normal gear. soak: ordinary load beside clients that send garbage, hang up and reconnect.
drift: first the rows of the run, then those of another data set mixed in; how many requests until the alarm. schema:
Schemathesis over the whole OpenAPI document. startup: from the end of imports until ready. detection: the watch alone,
on simulated streams without idle time whose rows leave where they did before: how often a fivefold disagreement is
noticed within 5,000 answers, and how often an unchanged one at the limit raises an alarm within 50,000.

With `--json`, sigterm goes on where an interrupted run of the same command ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from offramp import __version__
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from offramp.inference.budget import parse_latency
from offramp.serving.watch import Watch
from offramp.utils.command_line import command_line
from offramp.utils.files import write_json
from offramp.utils.hardware import hardware

if __package__:
    from benchmarks.load import Tally, run_load, send_load, summary
else:  # as a script: its own folder is where modules are found
    from load import Tally, run_load, send_load, summary

PROGRAM = "python benchmarks/server_drills.py"
Rows = Sequence[Mapping[str, Any]]
Address = tuple[str, int]
RESIDENT = {"VmRSS": "resident", "RssAnon": "own"}  # lines of /proc/PID/status
PART = 20.0  # seconds of one part of a soak
GARBAGE = (b"GET / HTTP/1.1\r\n", b"\x00\xff\xfe" * 50, b"POST /v1/predict HTTP/1.1\r\nContent-Length: 999\r\n\r\n{",
           b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{]")  # fmt: skip


@contextmanager
def running_server(run: str, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Address]]:
    """Start `offramp serve` on a free port and wait until it is ready."""
    address = free_address()
    command = [sys.executable, "-m", "offramp.cli", "serve", run, "--port", str(address[1]), "--log-level", "warning"]
    with subprocess.Popen([*command, *options]) as process:
        try:
            wait_until_ready(process, address)
            yield process, address
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(40)


def free_address() -> Address:
    """Return a port of this machine that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(one.getsockname()[1])


def wait_until_ready(process: subprocess.Popen[bytes], address: Address) -> None:
    """Wait until a server is healthy; refuses one that has ended."""
    for _ in range(2400):
        if _ready(address):
            return
        if process.poll() is not None:
            raise OfframpError("a server that runs", f"it ended with {process.returncode}", "see its message")
        time.sleep(0.05)
    raise OfframpError("a server that runs", "one that is not ready after two minutes", "see its message")


def _get(address: Address, path: str) -> Any:
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}{path}", timeout=10) as answer:
        return json.loads(answer.read())


def _ready(address: Address) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/health", timeout=10) as answer:
            return bool(answer.read())
    except OSError:
        return False


def _status(address: Address) -> dict[str, Any]:
    found: dict[str, Any] = _get(address, "/v1/status")["models"][0]
    return found


def _memory(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return the resident memory of a process in MB, its own and that of mapped files (Linux)."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    found = {
        name: float(value.split()[0]) / 1000
        for name, _, value in (line.partition(":") for line in lines)
        if name in RESIDENT
    }
    return {RESIDENT[name]: value for name, value in found.items()}


def _growth(process: subprocess.Popen[bytes], before: Mapping[str, float]) -> dict[str, float]:
    """Return by how much the resident memory has grown, in MB: all of it, and without mapped files."""
    now = _memory(process)
    return {
        "memory_growth_mb": round(now["resident"] - before["resident"], 1),
        "memory_growth_without_files_mb": round(now["own"] - before["own"], 1),
    }


def drill_sigterm(options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Stop servers under load; count requests that got neither an answer nor a refusal, and exit codes."""
    lost, refused, answered, codes = 0, 0, 0, []
    if options.json and Path(options.json).is_file():
        done = json.loads(Path(options.json).read_text())
        lost, refused, answered, codes = done["lost"], done["refused"], done["answered"], done["exit_codes"]
    for trial in range(len(codes), options.trials):
        with running_server(options.run, *options.serve) as (process, address):
            delay = random.Random(trial).uniform(0.3, 1.0)

            tally = asyncio.run(_load_and_stop(process, address, rows, options.rate, delay, trial))
            codes.append(process.wait(60))
            lost += tally.failures
            refused += len(tally.refusals)
            answered += len(tally.latencies)
        print(f"trial {trial + 1}: exit code {codes[-1]}, lost so far {lost}", flush=True)
        found = {"trials": len(codes), "lost": lost, "answered": answered, "refused": refused, "exit_codes": codes}
        if options.json:
            write_json(Path(options.json), {"drill": "sigterm", **found})
    return {**found, "exit_codes_not_zero": sum(code != 0 for code in codes)}


async def _load_and_stop(
    process: subprocess.Popen[bytes], address: Address, rows: Rows, rate: float, delay: float, seed: int
) -> Tally:
    asyncio.get_running_loop().call_later(delay, process.send_signal, signal.SIGTERM)
    return await send_load(address, rows, rate, delay + 0.1, {}, seed=seed)


def drill_hangup(options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Let clients send a request and leave at once; return how long work stays in the server."""
    with running_server(options.run, *options.serve) as (process, address):
        before = _memory(process)
        for number in range(options.clients):
            _leave(address, rows[number % len(rows)])
        started = time.perf_counter()
        while (state := _status(address))["queue_inputs"] or state["batches"]:
            if time.perf_counter() - started > 30:
                break
            time.sleep(0.02)
        seconds = time.perf_counter() - started
        left = {name: state[name] for name in ("queue_inputs", "queue_tokens", "batches")}
        return {"clients": options.clients, "seconds_until_empty": round(seconds, 2), "left_behind": left,
                **_growth(process, before)}  # fmt: skip


def _leave(address: Address, row: Mapping[str, Any], raw: bytes | None = None) -> None:
    texts = {name: text for name, text in row.items() if name not in ("label", "tags", "answers", "tgt")}
    body = json.dumps({"inputs": [texts]}).encode()
    head = f"POST /v1/predict HTTP/1.1\r\nHost: {address[0]}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with suppress(OSError), socket.create_connection(address, timeout=5) as connection:  # the server may close first
        connection.sendall(head + body if raw is None else raw)


def drill_overload(options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Send more than the server can do, then little; return latencies, refusals, memory and the way back."""
    with running_server(options.run, "--slo", options.slo, *options.serve) as (process, address):
        run_load(address, rows, 20.0, 3.0, {})
        before = _memory(process)
        tally = run_load(address, rows, options.rate, options.seconds, {})
        ended = time.perf_counter()
        while (state := _status(address))["gear"] < state["normal_gear"] and time.perf_counter() - ended < 60:
            time.sleep(0.05)
        back = time.perf_counter() - ended
        numbers = summary(tally, options.rate, options.seconds, parse_latency(options.slo))
        return {**numbers, "gear_after": state["gear"], "normal_gear": state["normal_gear"],
                "seconds_to_normal_gear": round(back, 2), "still_alive": process.poll() is None,
                **_growth(process, before)}  # fmt: skip


def drill_soak(options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Send ordinary load for long, beside clients that crash, send garbage and reconnect."""
    with running_server(options.run, "--slo", options.slo, *options.serve) as (process, address):
        run_load(address, rows, options.rate, 5.0, {})
        before, ends, parts, seed = _memory(process), time.monotonic() + options.seconds, [], 0
        memory = []
        while time.monotonic() < ends:
            seed += 1
            for number in range(20):
                _leave(address, rows[(seed + number) % len(rows)], GARBAGE[number % 4] if number % 2 else None)
            seconds = min(PART, options.seconds)
            tally = run_load(address, rows, options.rate, seconds, {}, seed=seed)
            parts.append(summary(tally, options.rate, seconds, parse_latency(options.slo)))
            memory.append({name: round(value, 2) for name, value in _memory(process).items()})
        state = _status(address)
        return {"seconds": options.seconds, "answered": sum(part["answered"] for part in parts),
                "failed": sum(part["failed"] for part in parts), "worst_p99_ms": max(part["p99_ms"] for part in parts),
                **_growth(process, before), "memory_mb_of_parts": memory, "queue_inputs": state["queue_inputs"],
                "batches": state["batches"], "still_alive": process.poll() is None}  # fmt: skip


def drill_drift(options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Send the run's own rows, then mix in those of another data set; return after how many requests an alarm came."""
    if not options.other:
        raise OfframpError("rows of another data set", "none", "give --other FILE")
    column = next(iter(rows[0]))
    foreign = [{column: row["text"]} for row in read_rows(options.other)[: len(rows)]]
    mixed = random.Random(0).sample(foreign, int(options.share * len(foreign)))
    mixed += [{column: row[column]} for row in rows[: len(foreign) - len(mixed)]]
    with running_server(options.run, "--slo", options.slo, "--audit", "0", *options.serve) as (_, address):
        truth = {"true_disagreement_before": _disagreement(address, [{column: row[column]} for row in rows]),
                 "true_disagreement_after": _disagreement(address, mixed)}  # fmt: skip
    print(json.dumps(truth), flush=True)
    limit = ["--disagreement-limit", str(options.limit)]
    with running_server(options.run, "--slo", options.slo, *limit, *options.serve) as (_, address):
        own = run_load(address, rows, options.rate, options.seconds, {})
        calm, sent, parts = _status(address), 0, 0
        state = calm
        while not state["alarms"] and sent < options.most:
            tally = run_load(address, mixed, options.rate, 2.0, {}, seed=parts)
            sent, state, parts = sent + tally.sent, _status(address), parts + 1
        gears = {
            name: [_gear_share(one, one[name]) for one in (calm, state)] for name in ("normal_gear", "lowest_gear")
        }
        return {**truth, "limit": options.limit, "share_of_other_rows": options.share, "requests_before": own.sent,
                "alarm_before_drift": bool(calm["alarms"]), "disagreement_before": calm["disagreement"],
                "requests_until_alarm": sent if state["alarms"] else None, "alarms": state["alarms"],
                "disagreement_after": state["disagreement"],
                "mac_share_before_and_after": gears}  # fmt: skip


def _disagreement(address: Address, rows: Rows) -> float:
    """Return the share of rows whose answer in the normal gear differs from the full model's."""
    answers: list[list[Any]] = []
    for fields in ({}, {"budget": 1.0}):
        labels = []
        for start in range(0, len(rows), 16):
            body = json.dumps({**fields, "inputs": rows[start : start + 16], "deadline_ms": 60_000}).encode()
            request = urllib.request.Request(f"http://{address[0]}:{address[1]}/v1/predict", body)
            with urllib.request.urlopen(request, timeout=60) as answer:
                labels += [one["label"] for one in json.loads(answer.read())["predictions"]]
        answers.append(labels)
    return round(statistics.mean(early != full for early, full in zip(*answers, strict=True)), 4)


def _gear_share(state: Mapping[str, Any], gear: int) -> float:
    share: float = state["gears"][gear]["mac_share"]
    return share


def drill_schema(options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Send what Schemathesis makes of the OpenAPI document; return how often each status was answered."""
    with running_server(options.run, "--slo", options.slo, *options.serve) as (process, address):
        url = f"http://{address[0]}:{address[1]}"
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json", "--no-color"]
        command += ["--checks", "not_a_server_error", "--max-examples", str(options.examples), "--continue-on-failure"]
        with tempfile.TemporaryDirectory() as folder:  # a deadline that has passed is what a client may ask for
            Path(folder, "schemathesis.toml").write_text(
                '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "4xx", 504]\n'
            )
            ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        statuses: Counter[str] = Counter()
        for status, count in re.findall(r'^offramp_requests_total{.*status="(\d+)".*} (\S+)$', metrics, re.M):
            statuses[status] += int(float(count))
        print("\n".join(ended.stdout.splitlines()[-25:]), flush=True)
        failed = sum(count for status, count in statuses.items() if status >= "500" and status != "504")
        return {"examples_per_operation": options.examples, "statuses_of_model_routes": dict(sorted(statuses.items())),
                "server_errors": failed, "schemathesis_exit_code": ended.returncode,
                "still_alive": process.poll() is None}  # fmt: skip


def drill_startup(options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Start servers; return the seconds of imports alone and until ready, and the median difference."""
    imports, ready = [], []
    modules = "import offramp.serving.running, offramp.inference.predictor, offramp.cli.serve"
    for _ in range(options.trials):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", modules], check=True)
        imports.append(time.perf_counter() - started)
        started = time.perf_counter()
        with running_server(options.run, *options.serve):
            ready.append(time.perf_counter() - started)
    after = [whole - part for whole, part in zip(ready, imports, strict=True)]
    return {"trials": options.trials, "imports_seconds": [round(one, 2) for one in imports],
            "ready_seconds": [round(one, 2) for one in ready],
            "median_seconds_after_imports": round(statistics.median(after), 2)}  # fmt: skip


def drill_detection(options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Simulate streams: how often drift is noticed and how often an unchanged stream raises an alarm."""
    found = []
    for limit in (0.01, 0.02, 0.05):
        noticed = []
        for seed in range(options.trials):
            rng = random.Random(seed)
            watch = Watch(limit, rng=rng)
            if _simulated(watch, rng, 0.5 * limit, 5000) is None:
                noticed.append(_simulated(watch, rng, 5.0 * limit, 5000))
        false = 0
        for seed in range(max(1, options.trials // 4)):
            rng = random.Random(10_000 + seed)
            false += _simulated(Watch(limit, rng=rng), rng, limit, 50_000) is not None
        answers = sorted(one for one in noticed if one is not None)
        found.append({"limit": limit, "streams": options.trials, "noticed": len(answers),
                      "median_answers_until_alarm": answers[len(answers) // 2] if answers else None,
                      "p95_answers_until_alarm": answers[int(0.95 * len(answers))] if answers else None,
                      "alarms_before_drift": options.trials - len(noticed), "unchanged_streams_at_the_limit":
                      max(1, options.trials // 4), "alarms_in_50000_unchanged": false})  # fmt: skip
        print(json.dumps(found[-1]), flush=True)
    return {"by_limit": found}


def _simulated(watch: Watch, rng: random.Random, share: float, answers: int) -> int | None:
    """Send answers of which a share differs through a watch; return how many there were before the alarm."""
    for number in range(answers):
        if watch.wants(rng.gauss(2.0, 1.0), idle=False) and watch.add(float(rng.random() < share)):
            return number
    return None


DRILLS = {
    "sigterm": drill_sigterm,
    "hangup": drill_hangup,
    "overload": drill_overload,
    "soak": drill_soak,
    "drift": drill_drift,
    "schema": drill_schema,
    "startup": drill_startup,
    "detection": drill_detection,
}
WHAT = {
    "sigterm": "Servers stopped by SIGTERM under load: requests that got neither an answer nor a refusal",
    "hangup": "Clients that leave without reading: what work they leave behind",
    "overload": "More requests than the server can answer: latency of accepted ones, refusals, memory, the way back",
    "soak": "Ordinary load for long beside clients that crash, send garbage and reconnect: what leaks",
    "drift": "Rows of another data set mixed into those of the run: how many requests until the alarm",
    "schema": "Schemathesis over the whole OpenAPI document: answers by status",
    "startup": "Seconds from the end of imports until a server is ready",
    "detection": "Simulated streams: how often the watch notices a drift, how often an unchanged one raises an alarm",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a drill, print what it found, and write it if wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--data", required=True, help="rows to send")
    parser.add_argument("--drill", required=True, choices=list(DRILLS))
    parser.add_argument("--trials", type=int, default=100, help="sigterm, startup: servers; detection: streams")
    parser.add_argument("--examples", type=int, default=100, help="schema: examples of an operation")
    parser.add_argument("--note", default="", help="what a reader should know about the machine at that time")
    parser.add_argument("--clients", type=int, default=1000, help="hangup: clients")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the load")
    parser.add_argument("--slo", default="50ms")
    parser.add_argument("--other", help="drift: rows of another data set")
    parser.add_argument("--share", type=float, default=0.5, help="drift: share of the other data set's rows in the mix")
    parser.add_argument("--limit", type=float, default=0.02, help="drift: disagreement that raises the alarm")
    parser.add_argument("--most", type=int, default=5000, help="drift: requests after which it counts as unnoticed")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further options of `offramp serve`")
    parser.add_argument("--json", help="write the numbers here")
    options = parser.parse_args(arguments)
    if not 0.0 < options.seconds <= 3600 or not 0.0 < options.rate <= 20_000 or options.trials > 1000:
        raise OfframpError(
            "a drill", f"{options.rate:g}/s for {options.seconds:g} s", "stay within an hour and 20,000/s"
        )
    found = {"drill": options.drill, **DRILLS[options.drill](options, read_rows(options.data))}
    print(json.dumps(found))
    if options.json:
        about = {"what": WHAT[options.drill], "data": Path(options.data).parent.name or Path(options.data).name,
                 "date": time.strftime("%Y-%m-%d"), "note": options.note}  # fmt: skip
        about |= {"command": command_line(PROGRAM), "hardware": hardware(), "version": __version__}
        write_json(Path(options.json), {**about, **found})


if __name__ == "__main__":
    main()
