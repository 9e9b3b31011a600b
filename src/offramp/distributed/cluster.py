"""Connecting to Ray: a cluster that runs already, or one node that lives as long as the work.

Whatever connects here sends no usage statistics. A node of our own listens on the loopback address only, has no
dashboard, a bounded object store, a private folder that is removed at the end, and a token that is kept in the
environment of its processes and in no file.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from offramp.errors import OfframpError, missing_package

LOCAL = "local"  # the address that means: one node on this machine, for this work only
PATIENCE = 5.0  # seconds that a cluster may take to accept a connection
OBJECT_STORE = 200 << 20  # bytes; rows do not travel through it
Item = TypeVar("Item")


def library() -> Any:
    """Return Ray, or name the extra that brings it; usage statistics are switched off before it is imported."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray warns about a change of it otherwise
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_package("ray", "ray") from error
    return ray


@contextmanager
def connected(address: str = "auto", cpus: int | None = None) -> Iterator[Any]:
    """Yield Ray, connected to a cluster: `auto` is the one of this machine, `local` starts a node for the block.

    A connection that exists already is used and kept. `cpus` is the number of processors of a node of our own.
    """
    ray = library()
    if ray.is_initialized():
        yield ray
        return
    with tempfile.TemporaryDirectory(prefix="offramp-ray-", ignore_cleanup_errors=True) as folder:
        try:
            _connect(ray, address, cpus, folder)
        except (ConnectionError, TimeoutError, ValueError, RuntimeError, OSError) as error:
            raise _refusal(address, error) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _connect(ray: Any, address: str, cpus: int | None, folder: str) -> None:
    """Connect, or start a node of our own in a private folder; Ray prints errors only."""
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address != LOCAL:
        _check_port(address)
        ray.init(address=address, **quiet)
        return
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray.init(
        address=LOCAL,
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
        **quiet,
    )


def _check_port(address: str) -> None:
    """Raise an error at once if nothing listens at HOST:PORT; Ray itself tries for a long time."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in host:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()


def _refusal(address: str, error: Exception) -> OfframpError:
    """Return the error for a cluster that cannot be used."""
    if "ersion mismatch" in str(error):
        fix = "install the versions of Ray and Python that the cluster has"
        return OfframpError("one version of Ray and Python everywhere", " ".join(str(error).split()), fix)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    fix = "start one with `ray start --head`, give the address of a running one, or --cluster local for this machine"
    return OfframpError(f"a Ray cluster at {address!r}", f"none that answers ({reason})", fix)


def replicas_that_fit(ray: Any, replicas: int | None, threads: int, blocks: int) -> int:
    """Return how many actors to start: as many as given, else as many as the processors of the cluster allow."""
    if threads < 1 or (replicas is not None and replicas < 1):
        raise OfframpError("actors and threads", f"replicas={replicas}, threads={threads}", "give 1 or more of each")
    processors = int(ray.cluster_resources().get("CPU", 0))
    most = sum(int(node["Resources"].get("CPU", 0)) // threads for node in ray.nodes() if node["Alive"])
    if most < (replicas or 1):
        given = f"{replicas or 1} × {threads} threads on a cluster of {processors} processors"
        raise OfframpError("actors that fit the cluster", given, "give fewer --replicas or --threads, or add nodes")
    return min(replicas or most, max(1, blocks))


def run_tasks(
    work: Callable[[Item], Any],
    items: Iterable[Item],
    address: str = "auto",
    cpus: int = 1,
    may_start: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[Item, Any, Exception | None]]:
    """Run `work(item)` as Ray tasks and yield items with their results or errors as they end.

    No more tasks are started than the cluster runs at a time, and none after `may_start` is false, so that a time limit
    holds. A task whose node dies runs again.
    """
    with connected(address) as ray:
        remote = ray.remote(num_cpus=cpus, max_retries=3)(work)
        slots = max(1, int(ray.cluster_resources().get("CPU", 1)) // cpus)
        waiting = iter(list(items))
        running: dict[Any, Item] = {}
        try:
            while True:
                while len(running) < slots and may_start():
                    item = next(waiting, None)
                    if item is None:
                        break
                    running[remote.remote(item)] = item
                if not running:
                    return
                (ended,), _ = ray.wait(list(running), num_returns=1)
                item = running.pop(ended)
                try:
                    yield item, ray.get(ended), None
                except ray.exceptions.RayTaskError as error:
                    yield item, None, error.cause if isinstance(error.cause, Exception) else error
                except ray.exceptions.RayError as error:
                    yield item, None, error
        finally:
            for task in running:
                with suppress(Exception):
                    ray.cancel(task, force=True)
