"""`offramp serve` as a function and as a process: addresses, keys, names, signals, logs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

from offramp.cli import CommandGroup
from offramp.commands.serve import (
    ServeOptions,
    build,
    check_address,
    free_port,
    load_services,
    named_runs,
    parse_size,
    serve,
)
from offramp.errors import OfframpError
from offramp.utils.cache_folder import NOWHERE, VARIABLE


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.5"])
def test_loopback_needs_no_key(host: str) -> None:
    check_address(host, (), False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.4", "example.org", ""])
def test_other_addresses_need_a_key_or_consent(host: str) -> None:
    with pytest.raises(OfframpError, match="--api-key"):
        check_address(host, (), False)
    check_address(host, ("key",), False)
    check_address(host, (), True)


def test_runs_are_named_after_their_folders_or_as_given(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    assert named_runs([tmp_path / "trec", f"news={tmp_path}/agnews", tmp_path / "a=b"]) == {
        "trec": tmp_path / "trec",
        "news": tmp_path / "agnews",
        "a=b": tmp_path / "a=b",
    }
    for wrong in ([], [tmp_path / "x", tmp_path / "y" / "x"], ["=folder"]):
        with pytest.raises(OfframpError):
            named_runs(wrong)


@pytest.mark.parametrize(
    ("size", "expected"), [("2MB", 2_000_000), ("500kB", 500_000), (17, 17), ("1.5 MB", 1_500_000)]
)
def test_sizes_are_read(size: str | int, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["two", "0", "-1MB", "inf", "3 miles"])
def test_wrong_sizes_are_refused(size: str) -> None:
    with pytest.raises(OfframpError):
        parse_size(size)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_client_batch": 0},
        {"workers": 0},
        {"port": 70_000},
        {"audit": 0.9},
        {"slo": "-1s"},
        {"drain": "soon"},
        {"log_level": "loud"},
    ],
)
def test_wrong_limits_are_refused(wrong: dict[str, Any], trained: Path) -> None:
    with pytest.raises(OfframpError):
        build([trained], ServeOptions(engine="torch", **wrong))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_is_taken_is_one_error_before_a_run_is_loaded(host: str, tmp_path: Path) -> None:
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OfframpError, match=f"port {port}") as raised:
            serve([tmp_path / "no-run"], ServeOptions(host=host, port=port))
    assert "--port" in raised.value.fix
    assert free_port(host, port) == port and free_port(host, 0) > 0


def test_a_host_that_is_not_this_machine_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="to listen on"):
        serve([tmp_path / "no-run"], ServeOptions(host="192.0.2.1", insecure=True))


@pytest.fixture
def process(trained: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`offramp serve` in a process of its own; options come from the environment."""
    port = free_port("127.0.0.1", 0)
    environment = {**os.environ, "OFFRAMP_PORT": str(port), "OFFRAMP_SLO": "30s", "OFFRAMP_ENGINE": "torch"}
    command = [sys.executable, "-m", "offramp.cli", "serve", str(trained), "--drain", "20s"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log, env=environment) as running:
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                if httpx.get(address + "/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield running, address
        running.kill()


def test_sigterm_finishes_accepted_requests_and_ends_with_zero(
    process: tuple[subprocess.Popen[bytes], str], tmp_path: Path
) -> None:
    running, address = process
    statuses: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client() as client:
            while not stop.is_set():
                statuses.append(client.post(address + "/predict", json={"inputs": "a secret film"}).status_code)
                if statuses[-1] == 503:
                    return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 0
    stop.set()
    for thread in threads:
        thread.join(10)
    assert set(statuses) == {200, 503} and statuses.count(503) == len(threads), "every client was answered or refused"
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    events = [line["event"] for line in lines]
    assert events[0] == "starting" and {"request", "draining", "ended"} <= set(events)
    assert not any("secret" in json.dumps(line) for line in lines)


def test_compiled_graphs_are_kept_where_the_option_says(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "environment"))
    wanted = {str(tmp_path / "own"): tmp_path / "own", NOWHERE: None, None: tmp_path / "environment"}
    for cache, folder in wanted.items():
        (service,) = load_services({"run": trained}, ServeOptions(engine="torch", cache=cache))
        assert service.predictor.how.packed_weights == folder


def test_every_option_is_an_environment_variable_too() -> None:
    command = CommandGroup(name="offramp").get_command(None, "serve")
    options = [one for one in command.params if one.name != "help"]
    assert {one.name: one.envvar for one in options} == {one.name: f"OFFRAMP_{one.name.upper()}" for one in options}
    assert {"runs", *(one.name for one in fields(ServeOptions))} == {one.name for one in options}


def test_the_command_line_fills_the_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    given: list[tuple[list[str], ServeOptions]] = []
    command = CommandGroup(name="offramp").get_command(None, "serve")
    monkeypatch.setattr("offramp.cli.serve.serve", lambda runs, options: given.append((runs, options)))
    monkeypatch.setenv("OFFRAMP_BUDGET", "0.5")
    command.main(["a", "n=b", "--slo", "20ms", "--insecure", "--workers", "2"], standalone_mode=False)
    assert given == [(["a", "n=b"], ServeOptions(slo="20ms", insecure=True, workers=2, budget=0.5))]
