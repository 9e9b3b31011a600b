"""`offramp serve --cluster`: replicas of the server on Ray Serve behind a gateway."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from offramp.distributed.cluster import LOCAL, connected, library, replicas_that_fit
from offramp.distributed.gateway import Gateway, gateway_app
from offramp.distributed.manifest import check_node
from offramp.distributed.replica import Board, Replica, ReplicaSetup
from offramp.distributed.scaling import replicas_for_work
from offramp.errors import OfframpError
from offramp.serving.http import HTTPLimits

SERVER, BOARD, GATEWAY = "server", "board", "gateway"  # names of the deployments
UP, DOWN = 2.0, 60.0  # seconds that predicted work must call for more, or fewer, replicas before they change


@dataclass(frozen=True)
class ClusterPlan:
    """Where and how many: the part of the options that only a cluster has."""

    replicas: int | None = None  # at the start; None: the minimum, or one
    min_replicas: int | None = None
    max_replicas: int | None = None
    threads: int = 1  # processor threads of a replica
    requests: int = 5120  # that may be on their way to one replica
    drain: float = 30.0  # seconds in which a replica finishes what it has accepted

    def __post_init__(self) -> None:
        least, most = self.bounds
        if not 1 <= least <= self.start <= most:
            given = f"{least} to {most} replicas, {self.start} at the start"
            raise OfframpError(
                "replicas within their bounds", given, "give --min-replicas ≤ --replicas ≤ --max-replicas"
            )

    @property
    def start(self) -> int:
        """Replicas at the start."""
        return self.replicas or self.min_replicas or 1

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of replicas."""
        least = self.min_replicas or (1 if self.max_replicas else self.start)
        return least, self.max_replicas or max(self.start, least)

    @property
    def scales(self) -> bool:
        """Whether the number of replicas changes."""
        return self.bounds[0] < self.bounds[1]


@contextmanager
def served(setup: ReplicaSetup, plan: ClusterPlan, limits: HTTPLimits, address: str, name: str) -> Iterator[Starlette]:
    """Yield the gateway's application while replicas run on a cluster; they end with the block.

    `name` is that of the application on the cluster: one that is there already under this name is replaced.
    """
    with connected(address) as ray:
        from ray import serve

        for logger in ("ray", "ray.serve"):
            logging.getLogger(logger).setLevel(logging.ERROR)
        replicas_that_fit(ray, plan.start, plan.threads, plan.start)
        check_nodes(ray, setup)
        try:
            serve.start(proxy_location="Disabled")
            handle = _deployed(serve, replica_application(setup, plan), name)
            board = serve.get_deployment_handle(BOARD, name)
            yield gateway_app(Gateway(handle, board, limits))
        finally:
            if address != LOCAL:
                with suppress(Exception):  # the cluster may have gone
                    serve.delete(name)
            else:
                serve.shutdown()


def _deployed(serve: Any, application: Any, name: str) -> Any:
    """Return the handle of an application that runs, or name the last thing that Ray reports about it."""
    try:
        return serve.run(application, name=name, route_prefix=None)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        telling = [line for line in lines if "Error:" in line] or lines or ["no reason given"]
        fix = "look at Ray's logs; `offramp serve RUN` without a cluster shows more"
        raise OfframpError("replicas that start", telling[-1], fix) from error


def application_name(runs: Mapping[str, Any], port: int) -> str:
    """Return a name that is the same for the same runs at the same address, so that a command replaces itself."""
    text = "\n".join([socket.gethostname(), str(port), *sorted(runs)])
    return f"offramp-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def replica_application(setup: ReplicaSetup, plan: ClusterPlan) -> Any:
    """Return the Ray Serve application of the replicas alone, for a gateway outside Ray Serve."""
    return _replicas(setup, plan, _board())


def gateway_application(setup: ReplicaSetup, plan: ClusterPlan, limits: HTTPLimits, gateways: int = 2) -> Any:
    """Return the Ray Serve application with gateways behind Ray's own HTTP proxy, as KubeRay's RayService wants it."""
    from ray import serve

    board = _board()
    deployment = serve.deployment(
        name=GATEWAY,
        num_replicas=gateways,
        max_ongoing_requests=plan.requests,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=plan.drain,
    )(ServeGateway)
    return deployment.bind(_replicas(setup, plan, board), board, limits)


class ServeGateway(Gateway):
    """The gateway as a deployment: Ray's HTTP proxy calls it."""

    async def __call__(self, request: Request) -> Response:
        """Answer one request, whatever happens to the replicas."""
        return await super().__call__(request)


def _board() -> Any:
    from ray import serve

    library()
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 1000}
    return serve.deployment(name=BOARD, **options)(Board).bind()


def _replicas(setup: ReplicaSetup, plan: ClusterPlan, board: Any) -> Any:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    number: dict[str, Any] = {"num_replicas": plan.start}
    if plan.scales:
        least, most = plan.bounds
        policy = AutoscalingPolicy(policy_function=f"{replicas_for_work.__module__}:{replicas_for_work.__name__}")
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least,
                initial_replicas=plan.start,
                max_replicas=most,
                metrics_interval_s=1.0,
                look_back_period_s=5.0,
                upscale_delay_s=UP,
                downscale_delay_s=DOWN,
                policy=policy,
            )
        }
    deployment = serve.deployment(
        name=SERVER,
        max_ongoing_requests=plan.requests,
        max_queued_requests=plan.requests,
        ray_actor_options={"num_cpus": plan.threads},
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=plan.drain,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        **number,
    )(Replica)
    return deployment.bind(setup, board)


def check_nodes(ray: Any, setup: ReplicaSetup) -> None:
    """Refuse a cluster with a node on which a replica could not run, before anything is started there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    check = ray.remote(num_cpus=0, max_retries=0)(check_node)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    tasks = [
        check.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            setup.version, run, dict(fingerprints)
        )
        for node in nodes
        for run, fingerprints in setup.runs.items()
    ]
    try:
        ray.get(tasks)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, OfframpError):
            raise error.cause from error
        reason = str(error.cause or error).strip().splitlines()[-1]
        fix = "install the same version with its extras on every node"
        raise OfframpError("Offramp on every node", reason, fix) from error
