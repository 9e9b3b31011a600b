"""`offramp serve`."""

from __future__ import annotations

from typing import Annotated

import typer

BUDGET = "share of the full model's compute when it is quiet; if left out, what loses at most half a point"


def command(
    runs: Annotated[
        list[str], typer.Argument(help="folders that `offramp train` wrote, or NAME=FOLDER", envvar="OFFRAMP_RUNS")
    ],
    *,
    host: Annotated[str, typer.Option(envvar="OFFRAMP_HOST", help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="OFFRAMP_PORT", min=0, max=65535, help="port to listen on")] = 8000,
    budget: Annotated[float | None, typer.Option(envvar="OFFRAMP_BUDGET", help=BUDGET)] = None,
    max_loss: Annotated[
        float | None, typer.Option(envvar="OFFRAMP_MAX_LOSS", help="instead of a budget: what the metric may lose")
    ] = None,
    max_disagreement: Annotated[
        float | None,
        typer.Option(envvar="OFFRAMP_MAX_DISAGREEMENT", help="instead of a budget: share of answers that may differ"),
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(envvar="OFFRAMP_RISK", help="instead of a budget: a risk that `calibrate --risk` has proven"),
    ] = None,
    slo: Annotated[str, typer.Option(envvar="OFFRAMP_SLO", help="latency target of accepted requests")] = "50ms",
    min_budget: Annotated[
        float | None,
        typer.Option(envvar="OFFRAMP_MIN_BUDGET", help="under load, use no point below this share of the compute"),
    ] = None,
    max_loss_under_load: Annotated[
        float | None,
        typer.Option(
            envvar="OFFRAMP_MAX_LOSS_UNDER_LOAD", help="under load, use no point that loses more than this (0.01)"
        ),
    ] = None,
    disagreement_limit: Annotated[
        float | None,
        typer.Option(
            envvar="OFFRAMP_DISAGREEMENT_LIMIT",
            help="close cheap points when more early answers than this differ from the full model's",
        ),
    ] = None,
    audit: Annotated[
        float, typer.Option(envvar="OFFRAMP_AUDIT", help="share of early answers that is checked at full depth")
    ] = 0.01,
    api_key: Annotated[
        str | None, typer.Option(envvar="OFFRAMP_API_KEY", help="keys that clients must send, separated by commas")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="OFFRAMP_INSECURE", help="listen on any address without a key")
    ] = False,
    max_queue_tokens: Annotated[
        int, typer.Option(envvar="OFFRAMP_MAX_QUEUE_TOKENS", help="tokens that may wait")
    ] = 65_536,
    max_queue_requests: Annotated[
        int, typer.Option(envvar="OFFRAMP_MAX_QUEUE_REQUESTS", help="inputs that may wait")
    ] = 2048,
    max_client_batch: Annotated[
        int, typer.Option(envvar="OFFRAMP_MAX_CLIENT_BATCH", help="inputs of one request")
    ] = 256,
    payload_limit: Annotated[str, typer.Option(envvar="OFFRAMP_PAYLOAD_LIMIT", help="largest body")] = "2MB",
    threads: Annotated[
        int | None, typer.Option(envvar="OFFRAMP_THREADS", min=1, help="processor threads; all cores if left out")
    ] = None,
    workers: Annotated[int, typer.Option(envvar="OFFRAMP_WORKERS", help="threads that compute batches")] = 1,
    engine: Annotated[str, typer.Option(envvar="OFFRAMP_ENGINE", help="auto, openvino or torch")] = "auto",
    precision: Annotated[str, typer.Option(envvar="OFFRAMP_PRECISION", help="fp32, bf16 or int8 (openvino)")] = "fp32",
    drain: Annotated[
        str, typer.Option(envvar="OFFRAMP_DRAIN", help="time to finish open requests after SIGTERM")
    ] = "30s",
    log_level: Annotated[
        str, typer.Option(envvar="OFFRAMP_LOG_LEVEL", help="debug, info (a line a request), warning or error")
    ] = "info",
    log_texts: Annotated[
        bool, typer.Option("--log-texts", envvar="OFFRAMP_LOG_TEXTS", help="write inputs and answers to the log")
    ] = False,
) -> None:
    """Serve runs over HTTP: for Hugging Face, TEI, vLLM and Triton clients, and in the browser at /.

    Every option can be given as an environment variable, too: OFFRAMP_PORT=8080.
    """
    from offramp.commands.serve import serve

    serve(
        runs,
        host=host,
        port=port,
        budget=budget,
        max_loss=max_loss,
        max_disagreement=max_disagreement,
        risk=risk,
        slo=slo,
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
        precision=precision,  # type: ignore[arg-type]  # checked there
        drain=drain,
        log_level=log_level,
        log_texts=log_texts,
    )
