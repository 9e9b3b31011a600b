"""A real server on loopback for clients, in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from offramp.inference.predictor import Predictor
from offramp.serving.app import AppSettings, build_app
from offramp.serving.service import Service, ServiceSettings


class RunningServer(uvicorn.Server):
    """A server that starts in a thread and knows its address."""

    def start(self) -> str:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        for _ in range(600):
            if self.started and self.config.app.state.server.ready:  # type: ignore[union-attr]
                return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"
            time.sleep(0.05)
        raise AssertionError("the server does not start")

    def end(self) -> None:
        self.should_exit = True
        self.thread.join(20)


StartServer = Callable[..., str]


@pytest.fixture(scope="session")
def start_server() -> Iterator[StartServer]:
    """Starts servers for run folders and returns their addresses; they end with the tests."""
    running: list[RunningServer] = []

    def start(folders: dict[str, Path], settings: AppSettings | None = None, **more: Any) -> str:
        options = ServiceSettings(**{"slo": 30.0, **more})
        services = [Service(name, Predictor.load(folder, "torch"), options) for name, folder in folders.items()]
        config = uvicorn.Config(build_app(services, settings), host="127.0.0.1", port=0, log_level="critical")
        server = RunningServer(config)
        running.append(server)
        return server.start()

    yield start
    for server in running:
        server.end()


@pytest.fixture(scope="session")
def address(start_server: StartServer, every_task: dict[str, Path]) -> str:
    """A server with a run for every kind of rows; the classifier is the default."""
    return start_server(every_task)
