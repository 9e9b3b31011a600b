"""Prometheus metrics of a server, in a registry of its own."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from offramp.serving.service import Service, Work

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGES = {  # name → description; read from `Service.status` when metrics are fetched
    "queue_inputs": "inputs that wait",
    "queue_tokens": "tokens that wait",
    "batches": "batches under way",
    "gear": "gear of the governor, 0 is the cheapest",
    "normal_gear": "gear of a quiet server",
    "lowest_gear": "cheapest gear that is still open",
    "predicted_wait_ms": "predicted milliseconds until the queue is empty",
}
DISAGREEMENT = {
    "mean": "share of sampled answers of this gear that differ from the full model's",
    "lower": "lower end of its confidence sequence",
    "upper": "upper end of its confidence sequence",
    "samples": "answers that were checked at full depth",
    "audit_rate": "share of answers that is checked now",
}


class Metrics:
    """Counters and histograms that requests fill, and gauges that are read when metrics are fetched."""

    def __init__(self, services: Sequence[Service]) -> None:
        self.registry = CollectorRegistry()
        more: Any = {"registry": self.registry}
        self.requests = Counter("offramp_requests", "requests by route and status", ["route", "status"], **more)
        self.seconds = Histogram(
            "offramp_request_seconds", "time of a request within the server", ["route"], buckets=SECONDS, **more
        )
        self.outcomes = Counter("offramp_inputs", "inputs by outcome", ["model", "outcome"], **more)
        self.queue = Histogram("offramp_queue_seconds", "time an input waits", ["model"], buckets=SECONDS, **more)
        self.run = Histogram("offramp_run_seconds", "time an input runs", ["model"], buckets=SECONDS, **more)
        self.tokens = Counter("offramp_tokens", "tokens of answered inputs", ["model"], **more)
        self.macs = Counter("offramp_macs", "multiply-accumulates of answered inputs", ["model"], **more)
        self.kept = Histogram(
            "offramp_tokens_kept_share",
            "share of its tokens that a layer computed, mean over all layers",
            ["model"],
            buckets=[number / 10 for number in range(1, 11)],
            **more,
        )
        self.exits = Histogram(
            "offramp_exit_layer",
            "layer after which inputs were answered",
            ["model"],
            buckets=list(range(max(service.depth for service in services) + 1)),
            **more,
        )
        self.registry.register(_Gauges(services))
        for service in services:
            service.listeners.append(self.note)

    def note(self, service: Service, works: list[Work]) -> None:
        """Count finished inputs; called in a worker's thread."""
        name = service.name
        for kind, count in Counts(work.kind for work in works).items():
            self.outcomes.labels(name, kind).inc(count)
        answered = [(work, work.prediction) for work in works if work.kind == "answered" and work.prediction]
        if not answered:
            return
        self.tokens.labels(name).inc(sum(work.tokens for work, _ in answered))
        self.macs.labels(name).inc(sum(prediction["macs"] for _, prediction in answered))
        queue, run, exits = self.queue.labels(name), self.run.labels(name), self.exits.labels(name)
        kept = self.kept.labels(name)
        for work, prediction in answered:
            queue.observe(work.queue_seconds)
            run.observe(work.run_seconds)
            exits.observe(float(prediction["exit_layer"]))
            kept.observe(prediction["tokens_kept"] / max(1, work.tokens))

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    """Values of the moment, for every run."""

    def __init__(self, services: Sequence[Service]) -> None:
        self.services = services

    def collect(self) -> Iterable[Metric]:
        states = [(service, service.status()) for service in self.services]
        for name, about in GAUGES.items():
            gauge = GaugeMetricFamily(f"offramp_{name}", about, labels=["model"])
            for service, state in states:
                gauge.add_metric([service.name], state[name])
            yield gauge
        alarms = GaugeMetricFamily("offramp_disagreement_alarms", "alarms so far", labels=["model"])
        share = GaugeMetricFamily("offramp_gear_mac_share", "share of the full compute of the gear", labels=["model"])
        for service, state in states:
            alarms.add_metric([service.name], service.alarm_count)
            share.add_metric([service.name], state["gears"][state["gear"]]["mac_share"])
        yield alarms
        yield share
        for name, about in DISAGREEMENT.items():
            gauge = GaugeMetricFamily(f"offramp_disagreement_{name}", about, labels=["model"])
            for service, state in states:
                if state["disagreement"]:
                    gauge.add_metric([service.name], state["disagreement"][name])
            yield gauge
