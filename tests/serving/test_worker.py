"""A worker's thread ends soon when it is stopped, also while it warms up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offramp.inference.predictor import Predictor
from offramp.serving.service import Service, ServiceSettings


@pytest.fixture
def service(trained: Path) -> Iterator[Service]:
    one = Service("tiny", Predictor.load(trained, "torch"), ServiceSettings(slo=5.0))
    yield one
    one.stop()


@pytest.mark.parametrize("stop_at", ["submit", "step"])
def test_a_worker_stops_within_its_warm_up(service: Service, stop_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call begins after the one that runs; a thread left inside the engine can abort the process as it ends."""
    (worker,) = service.workers
    inside, go_on, begun = threading.Event(), threading.Event(), list[str]()

    def watch(name: str) -> None:
        inner = getattr(worker.scheduler, name)

        def watched(*given: Any) -> Any:
            if name == stop_at:
                inside.set()
            if inside.is_set():
                begun.append(name)
                assert go_on.wait(60)
            return inner(*given)

        monkeypatch.setattr(worker.scheduler, name, watched)

    watch("submit")
    watch("step")
    service.start()
    assert inside.wait(60)
    stopping = threading.Thread(target=service.stop)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive() and worker.alive  # it waits for the call that runs
    go_on.set()
    stopping.join(60)
    assert not worker.alive and not worker.ready.is_set() and begun == [stop_at]
