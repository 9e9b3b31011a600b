"""`offramp serve --cluster`: answers of the local server from replicas, and none lost when a replica dies."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from benchmarks.ray_serve_drill import replicas_below
from starlette.testclient import TestClient

from offramp.cli import main
from offramp.commands.serve import ServeOptions, build, cluster_parts, served_on_cluster
from offramp.distributed import cluster
from offramp.distributed.replica import predicted_load
from offramp.distributed.scaling import LOAD, TARGET, replicas_for_work
from offramp.distributed.serve import ClusterPlan, check_nodes
from offramp.errors import OfframpError
from offramp.serving.service import Service

OPTIONS = ServeOptions(engine="torch", slo="30s", audit=0.0, host="127.0.0.1", cluster="auto", replicas=2)


@pytest.fixture(scope="module")
def address(ray_node: Any, trained: Path) -> Iterator[str]:
    """Two replicas on the node behind a gateway in this process."""
    with served_on_cluster([trained], OPTIONS) as app:
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def local(trained: Path) -> Iterator[TestClient]:
    """The same run served by the local server."""
    with TestClient(build([trained], replace(OPTIONS, cluster=None, replicas=None)), "http://127.0.0.1") as client:
        while not client.app.state.server.ready:  # type: ignore[attr-defined]
            time.sleep(0.01)
        yield client


REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "/predict", {"inputs": "a good film"}),
    ("POST", "/predict", {"inputs": [["a good film"], ["bad"]]}),
    ("POST", "/", {"inputs": "a good film", "parameters": {"top_k": 1}}),
    ("POST", "/predict", {"inputs": ""}),
    ("POST", "/classify", {"input": 3}),
    ("POST", "/predict", {"inputs": ["a good film"] * 300}),
    ("GET", "/info", None),
    ("GET", "/health", None),
    ("GET", "/nothing", None),
    ("GET", "/v2/models/none", None),
]


def test_answers_and_errors_are_those_of_the_local_server(address: str, local: TestClient) -> None:
    for method, path, content in REQUESTS:
        there, here = httpx.request(method, address + path, json=content), local.request(method, path, json=content)
        assert (there.status_code, there.json()) == (here.status_code, here.json()), path
        assert set(there.headers) >= {name for name in here.headers if name.startswith("x-")}


def test_a_deadline_counts_from_the_gateway(address: str) -> None:
    late = httpx.post(address + "/v1/predict", json={"inputs": ["a"], "deadline_ms": 0.001})
    assert late.status_code == 504
    assert httpx.post(address + "/v1/predict", json={"inputs": ["a"], "deadline_ms": 30_000}).status_code == 200


def test_a_killed_replica_costs_no_accepted_request(address: str) -> None:
    statuses: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                statuses.append(client.post(address + "/predict", json={"inputs": "a good film"}).status_code)

    clients = [threading.Thread(target=ask) for _ in range(6)]
    for client in clients:
        client.start()
    while len(statuses) < 50:
        time.sleep(0.01)
    victim = replicas_below(os.getpid())[0]
    victim.kill()
    killed_at = len(statuses)
    while len(statuses) < killed_at + 100:
        time.sleep(0.01)
    stop.set()
    for client in clients:
        client.join(60)
    assert set(statuses) == {200} and not victim.is_running()


def test_status_and_metrics_have_all_replicas(address: str) -> None:
    for _ in range(100):
        report = httpx.get(address + "/v1/status").json()
        if report["replicas"]:
            break
        time.sleep(0.1)
    (model,) = report["models"]
    assert model["replicas"] == len(report["replicas"]) >= 1 and "retried" in report
    names = set(report["replicas"])
    text = httpx.get(address + "/metrics").text
    assert all(f'replica="{name}"' in text for name in names)


def test_a_node_with_another_version_or_without_the_run_is_refused(
    ray_node: Any, trained: Path, tmp_path: Path
) -> None:
    setup, _ = cluster_parts([trained], OPTIONS)
    check_nodes(ray_node, setup)
    with pytest.raises(OfframpError, match="at the driver"):
        check_nodes(ray_node, replace(setup, version="9.9"))
    with pytest.raises(OfframpError, match="a node without it"):
        check_nodes(ray_node, replace(setup, runs={str(tmp_path / "none"): {}}))
    with pytest.raises(OfframpError, match="a node with another one"):
        check_nodes(ray_node, replace(setup, runs={str(trained): {"model": "other", "points": ""}}))


def test_a_cluster_that_is_not_there_is_one_line(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    monkeypatch.setattr(cluster, "library", lambda: SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(SystemExit) as stop:
        main(["serve", str(trained), "--engine", "torch", "--cluster", "auto"])
    assert stop.value.code == 2 and "a Ray cluster at 'auto'" in capsys.readouterr().err


def test_without_the_extra_the_error_says_what_to_install(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OfframpError) as raised:
        served_on_cluster([trained], OPTIONS)
    assert raised.value.fix.startswith("pip install 'offramp[ray]'")


@pytest.mark.parametrize("wrong", [{"replicas": 2}, {"max_replicas": 3}])
def test_replicas_need_a_cluster(wrong: dict[str, int]) -> None:
    with pytest.raises(OfframpError, match="without --cluster"):
        ServeOptions(**wrong)


def test_the_number_of_replicas_lies_within_its_bounds() -> None:
    assert (ClusterPlan().bounds, ClusterPlan(3).bounds, ClusterPlan(3).scales) == ((1, 1), (3, 3), False)
    assert (ClusterPlan(max_replicas=4).bounds, ClusterPlan(max_replicas=4).start) == ((1, 4), 1)
    assert (ClusterPlan(min_replicas=2, max_replicas=4).start, ClusterPlan(2, 1, 4).scales) == (2, True)
    for wrong in ({"replicas": 5, "max_replicas": 4}, {"replicas": 1, "min_replicas": 2}):
        with pytest.raises(OfframpError, match="replicas within their bounds"):
            ClusterPlan(**wrong)


def context(loads: dict[str, float], current: int, target: int | None = None) -> Any:
    """Return what Ray gives to an autoscaling policy."""
    metrics = {LOAD: loads} if loads else {}
    return SimpleNamespace(
        aggregated_metrics=metrics, current_num_replicas=current, target_num_replicas=target or current
    )


def test_replicas_follow_predicted_work() -> None:
    assert replicas_for_work(context({"a": TARGET, "b": TARGET}, 2))[0] == pytest.approx(2.0)
    assert replicas_for_work(context({"a": 3 * TARGET, "b": TARGET}, 2))[0] == pytest.approx(4.0)
    assert replicas_for_work(context({"a": 0.0}, 1))[0] == 1.0
    assert replicas_for_work(context({"a": 2 * TARGET}, 2))[0] == pytest.approx(4.0), "one has not reported yet"
    assert replicas_for_work(context({}, 0, 3))[0] == 3.0, "nothing is known: as before"


def test_waiting_tokens_are_load_in_the_gear_of_a_quiet_server(local: TestClient) -> None:
    service: Service = local.app.state.server.first  # type: ignore[attr-defined]
    scheduler = service.workers[0].scheduler
    before = predicted_load(service)
    scheduler.waiting_tokens += 10_000
    normal = service.governor.gears[service.governor.normal]
    assert predicted_load(service) - before == pytest.approx(scheduler.predicted_wait(normal) / 30.0, rel=0.2)
    scheduler.waiting_tokens -= 10_000
