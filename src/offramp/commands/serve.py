"""`offramp serve` as a function: runs behind HTTP until a signal ends it."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offramp.errors import OfframpError, missing_package
from offramp.inference.budget import Budget, parse_latency

if TYPE_CHECKING:
    from fastapi import FastAPI

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def serve(
    runs: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    budget: float | None = None,
    max_loss: float | None = None,
    max_disagreement: float | None = None,
    risk: float | None = None,
    slo: str | float = "50ms",
    min_budget: float | None = None,
    max_loss_under_load: float | None = None,
    disagreement_limit: float | None = None,
    audit: float = 0.01,
    api_key: str | None = None,
    insecure: bool = False,
    max_queue_tokens: int = 65_536,
    max_queue_requests: int = 2048,
    max_client_batch: int = 256,
    payload_limit: str | int = "2MB",
    threads: int | None = None,
    workers: int = 1,
    engine: str = "auto",
    precision: Literal["fp32", "bf16", "int8"] = "fp32",
    drain: str | float = "30s",
    log_level: str = "info",
    log_texts: bool = False,
) -> None:
    """Serve run folders over HTTP: Offramp's own protocol and those of Hugging Face, TEI, vLLM and Triton.

    `budget`, `max_loss`, `max_disagreement` or `risk` choose the operating point of a quiet server. When the queue
    threatens `slo`, cheaper points are used, no cheaper than `min_budget` or `max_loss_under_load` (a loss of 0.01 if
    neither is given; none if a risk or a disagreement was promised). A share `audit` of early answers is checked at
    full depth; if more than `disagreement_limit` of them differ, cheap points are closed. A run may be given a name:
    `NAME=FOLDER`.
    """
    app = build(
        runs,
        host=host,
        budget=Budget.parse(budget, max_loss=max_loss, max_disagreement=max_disagreement, risk=risk),
        slo=_seconds(slo),
        min_budget=min_budget,
        max_loss_under_load=max_loss_under_load,
        disagreement_limit=disagreement_limit,
        audit=audit,
        api_key=api_key,
        insecure=insecure,
        max_queue_tokens=max_queue_tokens,
        max_queue_requests=max_queue_requests,
        max_client_batch=max_client_batch,
        payload_limit=payload_limit,
        threads=threads,
        workers=workers,
        engine=engine,
        precision=precision,
        log_texts=log_texts,
    )
    from offramp.serving.running import LOG, log_to_stderr, run_app

    log_to_stderr(log_level)
    names = list(app.state.server.services)
    LOG.info("starting", extra={"fields": {"address": f"http://{host}:{port}", "models": names}})
    run_app(app, host, port, _seconds(drain), max_connections=2 * max_queue_requests + 1024)


def build(
    runs: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    budget: Budget | None = None,
    slo: float = 0.05,
    min_budget: float | None = None,
    max_loss_under_load: float | None = None,
    disagreement_limit: float | None = None,
    audit: float = 0.01,
    api_key: str | None = None,
    insecure: bool = False,
    max_queue_tokens: int = 65_536,
    max_queue_requests: int = 2048,
    max_client_batch: int = 256,
    payload_limit: str | int = "2MB",
    threads: int | None = None,
    workers: int = 1,
    engine: str = "auto",
    precision: Literal["fp32", "bf16", "int8"] = "fp32",
    log_texts: bool = False,
) -> FastAPI:
    """Return the application that `serve` runs; for tests and for other ASGI servers."""
    keys = tuple(key.strip() for key in (api_key or "").split(",") if key.strip())
    check_address(host, keys, insecure)
    folders = named_runs(runs)
    for name, value in {
        "max_queue_tokens": max_queue_tokens,
        "max_queue_requests": max_queue_requests,
        "max_client_batch": max_client_batch,
        "workers": workers,
    }.items():
        if value < 1:
            raise OfframpError(f"a number for --{name.replace('_', '-')}", str(value), "give 1 or more")
    try:
        from offramp.serving.app import LOOPBACK, AppSettings, build_app
    except ImportError as error:
        raise missing_package("serve", error.name or "fastapi") from error
    from offramp.inference.predictor import Predictor
    from offramp.serving.http import HTTPLimits
    from offramp.serving.service import Service, ServiceSettings, check_service_settings

    settings = ServiceSettings(
        budget=budget or Budget.default(),
        slo=slo,
        min_budget=min_budget,
        max_loss=max_loss_under_load,
        max_disagreement=disagreement_limit,
        audit=audit,
        idle_audit=0.2 if audit else 0.0,
        workers=workers,
        queue_tokens=max_queue_tokens,
        queue_requests=max_queue_requests,
    )
    check_service_settings(settings)
    limits = HTTPLimits(payload_bytes=parse_size(payload_limit), client_batch=max_client_batch)
    hosts = () if keys or insecure else tuple(dict.fromkeys((host, *LOOPBACK)))
    services = [
        Service(name, Predictor.load(folder, engine, precision, threads), settings) for name, folder in folders.items()
    ]
    return build_app(services, AppSettings(limits, keys, hosts, log_texts))


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


def _seconds(value: str | float) -> float:
    """Return a time such as `50ms`, or seconds, as seconds."""
    return parse_latency(value) if isinstance(value, str) else float(value)
