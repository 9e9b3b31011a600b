"""The load generator: open loop, bounded, on this machine only, against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import load, server_drills
from offramp.errors import OfframpError
from tests import factories
from tests.serving.conftest import StartServer, start_server  # noqa: F401  # a fixture


def test_load_reports_goodput_percentiles_and_accuracy(
    start_server: StartServer,  # noqa: F811
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = factories.write_jsonl(tmp_path / "rows.jsonl", factories.labelled_rows(count=20, seed=3))
    address, target = start_server({"films": trained}), tmp_path / "load.json"
    arguments = ["--url", address, "--data", data, "--rates", "40,80", "--seconds", "1", "--slo", "20s", "--pause", "0"]
    load.main([*arguments, "--json", str(target)])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    written = json.loads(target.read_text())
    assert written["rates"] == lines and written["slo_ms"] == 20_000
    for line in lines:
        assert line["sent"] == line["answered"] > 0 and line["failed"] == line["refused"] == 0
        assert line["p50_ms"] <= line["p99_ms"] and 0.0 <= line["accuracy"] <= 1.0 and line["mean_budget"] <= 1.0


@pytest.mark.parametrize("url", ["http://example.org", "http://10.0.0.1:8000", "ftp:", "http://localhost.example.org"])
def test_servers_elsewhere_are_never_loaded(url: str) -> None:
    with pytest.raises(OfframpError, match=r"127\.0\.0\.1"):
        load.local_address(url)
    assert load.local_address("http://localhost:81") == ("localhost", 81)


def test_a_load_is_bounded(tmp_path: Path) -> None:
    data = factories.write_jsonl(tmp_path / "rows.jsonl", factories.labelled_rows(count=2))
    with pytest.raises(OfframpError, match="stay within"):
        load.main(["--data", data, "--rates", "5,5", "--seconds", "400"])


def test_clients_that_hang_up_leave_nothing_behind(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = factories.write_jsonl(tmp_path / "rows.jsonl", factories.labelled_rows(count=10))
    arguments = [str(trained), "--data", data, "--drill", "hangup", "--clients", "30"]
    server_drills.main([*arguments, "--serve", "--engine", "torch", "--slo", "20s"])
    found = json.loads(capsys.readouterr().out)
    assert found["clients"] == 30 and not any(found["left_behind"].values())
