"""`offramp serve` as a function: runs behind HTTP until a signal ends it."""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offramp.errors import OfframpError, missing_package
from offramp.inference.budget import Budget, parse_latency

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.applications import Starlette

    from offramp.distributed.replica import ReplicaSetup
    from offramp.distributed.serve import ClusterPlan
    from offramp.serving.app import AppSettings
    from offramp.serving.service import Service, ServiceSettings

LOG_LEVELS = ("debug", "info", "warning", "error")
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def option(default: Any, about: str, **bounds: float) -> Any:
    """Return a field of `ServeOptions`: its default, what help prints, and the bounds (`min`, `max`) of a number."""
    return field(default=default, metadata={"help": about, "bounds": bounds})


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `offramp serve`. A field here is an option of the command line and an environment variable as well."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on", min=0, max=65535)
    budget: float | None = option(
        None, "share of the full model's compute when it is quiet; without any budget the run's default"
    )
    max_loss: float | None = option(None, "instead of a budget: what the metric may lose")
    max_disagreement: float | None = option(None, "instead of a budget: share of answers that may differ")
    risk: float | None = option(None, "instead of a budget: a risk that `calibrate --risk` has proven")
    slo: str = option("50ms", "latency target of accepted requests")
    min_budget: float | None = option(None, "under load, use no point below this share of the compute")
    max_loss_under_load: float | None = option(
        None, "under load, use no point that loses more than this (0.01; no cheaper point where a risk is promised)"
    )
    disagreement_limit: float | None = option(
        None, "close cheap points when more early answers than this (or than promised) differ from the full model's"
    )
    audit: float = option(0.01, "share of early answers that is checked at full depth")
    api_key: str | None = option(None, "keys that clients must send, separated by commas")
    insecure: bool = option(False, "listen on any address without a key")
    max_queue_tokens: int = option(65_536, "tokens that may wait", min=1)
    max_queue_requests: int = option(2048, "inputs that may wait", min=1)
    max_client_batch: int = option(256, "inputs of one request", min=1)
    payload_limit: str = option("2MB", "largest body")
    threads: int | None = option(None, "processor threads; all cores if left out", min=1)
    workers: int = option(1, "threads that compute batches", min=1)
    engine: str = option("auto", "how layers are executed: auto, native, openvino or torch")
    precision: str = option("fp32", "precision of the layers: fp32, bf16 or int8 (not torch on a CPU)")
    cache: str | None = option(
        None, "where compiled graphs are kept: a folder, or none; if left out, the user's cache folder"
    )
    drain: str = option("30s", "time to finish open requests after SIGTERM")
    log_level: str = option("info", "debug, info (a line a request), warning or error")
    log_texts: bool = option(False, "write inputs and answers to the log")
    cluster: str | None = option(None, "serve with replicas on Ray: auto, an address, or local for this machine")
    replicas: int | None = option(None, "replicas on the cluster, at the start; 1 if left out", min=1)
    min_replicas: int | None = option(None, "on the cluster: fewest replicas when little work is predicted", min=1)
    max_replicas: int | None = option(None, "on the cluster: most replicas when much work is predicted", min=1)

    def __post_init__(self) -> None:
        for one in fields(self):
            value, bounds = getattr(self, one.name), one.metadata["bounds"]
            if value is not None and not bounds.get("min", value) <= value <= bounds.get("max", value):
                fix = "give " + " and ".join(f"at {_LEAST_MOST[name]} {bound}" for name, bound in bounds.items())
                raise OfframpError(f"a number for --{one.name.replace('_', '-')}", str(value), fix)
        for name in ("slo", "drain"):
            try:
                parse_latency(getattr(self, name))
            except OfframpError as error:
                raise OfframpError(f"a time for --{name}", repr(getattr(self, name)), error.fix) from error
        if self.log_level.lower() not in LOG_LEVELS:
            raise OfframpError(
                "a level for --log-level", repr(self.log_level), f"choose one of {', '.join(LOG_LEVELS)}"
            )
        for name in ("replicas", "min_replicas", "max_replicas"):
            if getattr(self, name) is not None and self.cluster is None:
                given = f"--{name.replace('_', '-')} without --cluster"
                raise OfframpError("options that go together", given, "add --cluster auto")

    @property
    def most_requests(self) -> int:
        """Requests that may be open at one server, or at one replica."""
        return 2 * self.max_queue_requests + 1024

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that clients may send."""
        return tuple(key.strip() for key in (self.api_key or "").split(",") if key.strip())

    def service_settings(self) -> ServiceSettings:
        """Return how each run is served."""
        from offramp.serving.service import ServiceSettings, check_service_settings

        settings = ServiceSettings(
            budget=Budget.parse(
                self.budget, max_loss=self.max_loss, max_disagreement=self.max_disagreement, risk=self.risk
            ),
            slo=parse_latency(self.slo),
            min_budget=self.min_budget,
            max_loss=self.max_loss_under_load,
            max_disagreement=self.disagreement_limit,
            audit=self.audit,
            idle_audit=0.2 if self.audit else 0.0,
            workers=self.workers,
            queue_tokens=self.max_queue_tokens,
            queue_requests=self.max_queue_requests,
        )
        check_service_settings(settings)
        return settings

    def app_settings(self) -> AppSettings:
        """Return how the application behaves towards clients."""
        from offramp.serving.app import LOOPBACK, AppSettings
        from offramp.serving.http import HTTPLimits

        limits = HTTPLimits(payload_bytes=parse_size(self.payload_limit), client_batch=self.max_client_batch)
        hosts = () if self.keys or self.insecure else tuple(dict.fromkeys((self.host, *LOOPBACK)))
        return AppSettings(limits, self.keys, hosts, self.log_texts)


_LEAST_MOST = {"min": "least", "max": "most"}


def serve(runs: Sequence[str | Path], options: ServeOptions | None = None) -> None:
    """Serve run folders over HTTP: Offramp's own protocol and those of Hugging Face, TEI, vLLM and Triton.

    `budget`, `max_loss`, `max_disagreement` or `risk` choose the operating point of a quiet server. When the queue
    threatens `slo`, cheaper points are used, no cheaper than `min_budget` or `max_loss_under_load` (a loss of 0.01 if
    neither is given; none if a risk or a disagreement is promised, by an option or by the run's own default). A share
    `audit` of early answers is checked at full depth; if more than `disagreement_limit` of them differ, or more than
    was promised, cheap points are closed. A run may be given a name: `NAME=FOLDER`.
    """
    options = options or ServeOptions()
    if options.cluster is not None:
        with served_on_cluster(runs, options) as app:
            _run(app, list(named_runs(runs)), replace(options, port=free_port(options.host, options.port)))
    else:
        check_address(options.host, options.keys, options.insecure)
        options = replace(options, port=free_port(options.host, options.port))
        app = build(runs, options)
        _run(app, list(app.state.server.services), options)


def _run(app: Starlette, names: Sequence[str], options: ServeOptions) -> None:
    """Run an application until a signal ends it."""
    from offramp.serving.running import LOG, log_to_stderr, run_app

    log_to_stderr(options.log_level)
    host = f"[{options.host}]" if ":" in options.host else options.host
    LOG.info("starting", extra={"fields": {"address": f"http://{host}:{options.port}", "models": names}})
    most = options.most_requests * (options.max_replicas or options.replicas or 1)
    run_app(app, options.host, options.port, parse_latency(options.drain), max_connections=most)


def served_on_cluster(runs: Sequence[str | Path], options: ServeOptions) -> AbstractContextManager[Starlette]:
    """Return a context with the gateway's application, while replicas of the server run on a Ray cluster."""
    setup, plan = cluster_parts(runs, options)
    from offramp.distributed.serve import application_name, served

    limits = options.app_settings().limits
    return served(setup, plan, limits, options.cluster or "auto", application_name(setup.runs, options.port))


def cluster_application(args: Mapping[str, Any]) -> Any:
    """Return the application for `serve run` and KubeRay's RayService: import path `offramp.commands.serve:…`.

    `args` has `runs` and the options of `offramp serve`; the key comes from the environment (OFFRAMP_API_KEY) as well.
    """
    from offramp.distributed.cluster import library

    library()
    given = {"host": "0.0.0.0", "api_key": os.environ.get("OFFRAMP_API_KEY"), "cluster": "auto", **args}
    runs, gateways = given.pop("runs", ()), int(given.pop("gateways", 2))
    options = ServeOptions(**given)
    setup, plan = cluster_parts([runs] if isinstance(runs, str) else runs, options)
    from offramp.distributed.serve import gateway_application

    return gateway_application(setup, plan, options.app_settings().limits, gateways)


def cluster_parts(runs: Sequence[str | Path], options: ServeOptions) -> tuple[ReplicaSetup, ClusterPlan]:
    """Return what replicas must know and how many there are; refuses what no replica could serve."""
    from offramp.distributed.cluster import library

    library()
    check_address(options.host, options.keys, options.insecure)
    from offramp.inference.hub import local_folder

    folders = {name: local_folder(folder).absolute() for name, folder in named_runs(runs).items()}
    try:
        from offramp.distributed.replica import ReplicaSetup
        from offramp.distributed.serve import ClusterPlan
    except ImportError as error:
        raise missing_package("serve", error.name or "fastapi") from error
    from offramp.distributed.manifest import run_fingerprints

    threads = options.threads or 1
    plan = ClusterPlan(
        options.replicas,
        options.min_replicas,
        options.max_replicas,
        threads,
        options.most_requests,
        parse_latency(options.drain),
    )
    own = replace(options, threads=threads, cluster=None, replicas=None, min_replicas=None, max_replicas=None)
    load_services(folders, own)  # so that what is wrong with a run or a budget shows at once
    listed = [f"{name}={folder}" for name, folder in folders.items()]
    prints = {str(folder): run_fingerprints(folder) for folder in folders.values()}
    return ReplicaSetup(partial(replica_app, listed, own), prints), plan


def replica_app(runs: Sequence[str], options: ServeOptions) -> FastAPI:
    """Return the application of a replica, in its process."""
    from offramp.serving.running import log_to_stderr

    log_to_stderr(options.log_level)
    return build(runs, options)


def build(runs: Sequence[str | Path], options: ServeOptions | None = None) -> FastAPI:
    """Return the application that `serve` runs; for tests and for other ASGI servers."""
    options = options or ServeOptions()
    check_address(options.host, options.keys, options.insecure)
    folders = named_runs(runs)
    try:
        from offramp.serving.app import build_app
    except ImportError as error:
        raise missing_package("serve", error.name or "fastapi") from error
    return build_app(load_services(folders, options), options.app_settings())


def load_services(folders: Mapping[str, Path], options: ServeOptions) -> list[Service]:
    """Load runs with their workers; nothing is started yet."""
    import torch

    from offramp.inference.predictor import Predictor
    from offramp.serving.service import Service

    settings = options.service_settings()
    precision: Any = options.precision  # checked there
    services = [
        Service(
            name, Predictor.load(str(folder), options.engine, precision, options.threads, cache=options.cache), settings
        )
        for name, folder in folders.items()
    ]
    if all(service.predictor.engine_name != "torch" for service in services):
        torch.set_num_threads(1)  # what torch still does is small, and its threads would wait for cores
    return services


def named_runs(runs: Sequence[str | Path]) -> dict[str, Path]:
    """Return the folders of `FOLDER` or `NAME=FOLDER` by name; a folder's own name is the default."""
    if not runs:
        raise OfframpError("runs to serve", "none", "give the folders that `offramp train --out` wrote")
    named: dict[str, Path] = {}
    for run in map(str, runs):
        name, equals, folder = run.partition("=")
        path = Path(folder if equals and not Path(run).exists() else run)
        name = name if equals and path == Path(folder) else path.resolve().name
        if not name or "/" in name or name in named:
            given = f"{name!r} twice" if name in named else f"{run!r}"
            raise OfframpError("a name for every run", given, "give each its own: NAME=FOLDER")
        named[name] = path
    return named


def check_address(host: str, keys: Sequence[str], insecure: bool) -> None:
    """Refuse to be reached from other machines without a key, unless that was wanted."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not (loopback or keys or insecure):
        fix = "give --api-key (or OFFRAMP_API_KEY), or --insecure if everyone who reaches it may use it"
        raise OfframpError(f"to serve on {host}", "an address that other machines reach, and no key", fix)


def free_port(host: str, port: int) -> int:
    """Return the port to listen on, a free one for port 0; refuse an address on which this process cannot listen."""
    try:
        found = dict.fromkeys(socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
        for family, _, _, _, place in found:
            try:
                with socket.create_server((str(place[0]), port), family=family) as one:
                    port = int(one.getsockname()[1])
            except OSError as error:  # a name may have an IPv6 address on a machine without IPv6
                if len(found) == 1 or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    except OSError as error:
        fix = "end the program that listens there, or give another --port, and an address of this machine as --host"
        raise OfframpError(f"to listen on {host}, port {port}", error.strerror or str(error), fix) from error
    return port


def parse_size(size: str | int) -> int:
    """Return `2MB`, `500kB` or a number of bytes."""
    text = str(size).strip().lower().replace(" ", "")
    number, unit = text.rstrip("kmgb"), text[len(text.rstrip("kmgb")) :]
    try:
        value = float(number) * UNITS[unit]
    except (ValueError, KeyError) as error:
        raise OfframpError("a size", repr(size), "write 2MB, 500kB or a number of bytes") from error
    if not 1 <= value < math.inf:
        raise OfframpError("a size", repr(size), "give at least one byte")
    return int(value)
