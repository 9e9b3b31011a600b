"""What leaving at each off-ramp means for each row: the numbers a threshold search works on."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from offramp.calibration.replay import ExitRecording, trace_all_exits
from offramp.calibration.thresholds import ExitTable
from offramp.core.cost import Event, macs
from offramp.nn.batches import Data, build_batch
from offramp.nn.network import Network

Array = NDArray[np.float64]


def exit_table(network: Network, recording: ExitRecording, data: Data, uncertainties: Array) -> ExitTable:
    """Scores and costs of every exit for every encoded row, beside its doubt."""
    exits = [*sorted(network.exit_heads), network.depth]
    learned, log = "exit_unit" in network.added, trace_all_exits(network, recording)

    def spent(events: list[Event]) -> Array:
        return np.asarray(macs(events, network, recording.packed.count).numpy())

    def asked(what: str, layer: int) -> Array:
        return spent([event for event in log if event.kind == what and event.layer == layer])

    heads = np.stack([asked("head", layer) for layer in exits])
    ask = np.stack([asked("exit_unit", layer) for layer in exits[:-1]]) if learned else heads[:-1]
    way = [event for event in log if event.kind not in ("head", "exit_unit")]
    reach = np.stack([spent([event for event in way if event.layer <= layer]) for layer in exits])
    reach[-1] += heads[-1]
    answer = heads[:-1] if learned else np.zeros_like(heads[:-1])
    return ExitTable(uncertainties, _scores(network, recording, data, exits), reach, ask, answer)


def _scores(network: Network, recording: ExitRecording, data: Data, exits: list[int]) -> Array:
    """1 minus how wrong each exit is about each row."""
    made = build_batch(network.task, data, range(len(data.encoded)), seed=0)
    lengths = recording.packed.lengths
    wrong = [network.task.example_error(recording.logits[layer], made.targets, lengths) for layer in exits]
    return 1.0 - np.asarray(torch.stack(wrong).double().numpy())


def fit_temperatures(network: Network, recording: ExitRecording, data: Data) -> tuple[float, ...]:
    """For each off-ramp the divisor of its logits that makes the labels most likely, among half to four."""
    if "distribution" not in network.task.provides:
        return ()
    made = build_batch(network.task, data, range(len(data.encoded)), seed=0)
    grid = np.geomspace(0.5, 4.0, 31)

    def best(logits: torch.Tensor) -> float:
        losses = [float(network.task.loss(logits / heat, made.targets, recording.packed.lengths)) for heat in grid]
        return float(f"{grid[int(np.argmin(losses))]:.4g}")

    return tuple(best(recording.logits[layer]) for layer in sorted(network.exit_heads))
