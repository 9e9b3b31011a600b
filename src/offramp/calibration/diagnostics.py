"""What a user should know when exits do not pay, and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from offramp.calibration.replay import ExitRecording
from offramp.core.columns import SCORED
from offramp.inference.operating_points import OperatingPoint, OperatingPoints
from offramp.nn.network import Network

ONE, MIXED = 0.99, 0.95  # an exit gives one answer from this share of all on, where the last exit stays below that
TOO_MUCH = 0.02  # of the metric
OTHERWISE = "let the off-ramps read otherwise (--set head=… where the method has it, else pool=…)"


def calibration_warnings(
    network: Network, recording: ExitRecording | None, tried: Sequence[OperatingPoint], points: OperatingPoints
) -> tuple[str, ...]:
    """In the order of their causes: bad heads, nobody leaves, leaving is dear, leaving is wrong, nobody knows."""
    found, rows = [], points.data["rows"]
    used = _used(network, tried, points)
    if recording is not None and (bad := collapsed_exits(network, recording, used)):
        which = f"off-ramp{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
        cure = f"train longer, with a smaller head_lr, or {OTHERWISE}"
        found.append(f"{which}: (nearly) one and the same answer to every row, the head has collapsed: {cure}")
    if not tried:
        return tuple(found)
    if all(p.mac_share >= points.full_point.mac_share for p in tried):
        if points.full_point.mac_share < 1.0:  # it saves by itself (planned depths): nothing was left to try
            return tuple(found)
        early = any(p.mean_exit_layer < network.depth for p in tried)
        if network.exit_heads or network.decoder is not None:
            why = "the heads cost more than leaving early saves" if early else "no row ever leaves early"
        else:
            why = "what decides costs more than it saves, or nothing is left out"
        found.append(f"no setting is cheaper than the full model: {why}")
    elif all(points.lost(p) > TOO_MUCH for p in points.points[:-1]):
        cure = f"train longer, or {OTHERWISE}" if network.exit_heads else "train longer"
        found.append(f"every cheaper setting loses two points or more: {cure}")
    elif (usual := points.choose(None)).error > TOO_MUCH:
        known = f"what the usual setting loses is known to ± {100 * usual.error:.1f} points only, from {rows} rows"
        found.append(f"{known}: calibrate on more of them, or ask for --budget 1.0")
    return tuple(found)


def _used(network: Network, tried: Sequence[OperatingPoint], points: OperatingPoints) -> list[int]:
    """Off-ramps that rows leave by: none below where the tightest setting ends them on average, since what plans depths
    has exits that nobody may take. Nothing is known of exits whose rows never went through the whole stack, as they did
    when it was recorded."""
    if not tried or points.full_point.mean_exit_layer < network.depth - 1e-6:
        return []
    first = math.floor(min(p.mean_exit_layer for p in tried))
    return [layer for layer in sorted(network.exit_heads) if layer >= first]


def collapsed_exits(network: Network, recording: ExitRecording, layers: Sequence[int]) -> list[int]:
    """Which of these off-ramps say one thing only, though the last exit does not."""
    return [layer for layer in layers if _same(network, recording, layer)]


def _same(network: Network, recording: ExitRecording, layer: int) -> bool:
    ours, last = recording.logits[layer], recording.logits[network.depth]
    if "distribution" not in network.task.provides:
        return bool(ours.std() < (1.0 - ONE) * last.std())
    return _most(network, recording, ours) >= ONE and _most(network, recording, last) < MIXED


def _most(network: Network, recording: ExitRecording, logits: Tensor) -> float:
    """How much of all answers the most frequent one is."""
    packed = recording.packed
    spread, _ = network.task.distributions(logits, packed.lengths, packed.tokens.get(SCORED))
    return float(torch.bincount(spread.argmax(-1)).max() / max(1, len(spread)))
