"""The running process: a server that drains before it ends, and logs in lines of JSON without texts."""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

LOG = logging.getLogger("offramp.serving")
QUIET = 0.3  # seconds without a request before the process ends: a request on its way is still read and refused
LONGEST_QUIET = 2.0  # seconds that this is waited for
SWITCH = 0.0005  # seconds after which a thread yields: a worker must not wait 5 ms for the HTTP thread
REPEATED = 1.0  # seconds within which a second signal is the first one again, sent to the group of processes
KEEP_ALIVE = 30  # seconds that an idle connection is kept


class JSONLines(logging.Formatter):
    """Writes a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return time, level, event and the record's own fields."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr(level: str) -> None:
    """Send the server's own log to standard error, one JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines())
    LOG.handlers, LOG.propagate = [handler], False
    LOG.setLevel(level.upper())


class Drainable(Protocol):
    """What answers requests and can refuse new ones: the server of this machine, or the gateway of a cluster."""

    draining: bool
    open_requests: int
    last_request: float  # when one arrived, by the monotonic clock


class DrainingServer(uvicorn.Server):
    """On SIGTERM or Ctrl-C: not ready at once, open requests are finished, then the process ends with 0.

    A second signal ends it at once, unless it is the same one that reached the process in two ways.
    """

    def __init__(self, config: uvicorn.Config, server: Drainable, drain: float) -> None:
        super().__init__(config)
        self.server, self.drain = server, drain
        self._until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; end at once if that was under way."""
        if self._until is not None:
            if time.monotonic() > self._until - self.drain + REPEATED:
                self.should_exit = self.force_exit = True
            return
        self._until = time.monotonic() + self.drain
        self.server.draining = True
        LOG.info("draining", extra={"fields": {"open_requests": self.server.open_requests, "seconds": self.drain}})

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends now."""
        ends: bool = await super().on_tick(counter)
        if self._until is None:
            return ends
        left, now = self.server.open_requests, time.monotonic()
        quiet = now - self.server.last_request >= QUIET or now >= self._until - self.drain + LONGEST_QUIET
        if (left or not quiet) and now < self._until:
            return ends
        if left:
            LOG.warning("not all requests were finished", extra={"fields": {"open_requests": left}})
        return True


def run_app(app: Starlette, host: str, port: int, drain: float, max_connections: int) -> None:
    """Serve until a signal ends it."""
    server: Drainable = app.state.server
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=2,
        limit_concurrency=max_connections,
        proxy_headers=False,
        ws="none",
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not a line for every connection above the limit
    sys.setswitchinterval(SWITCH)
    gc.collect()
    gc.freeze()  # a pass over all objects of the libraries would take a quarter of a second
    DrainingServer(config, server, drain).run()
    LOG.info("ended")
