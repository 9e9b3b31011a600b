"""Warnings for users: when exits do not pay, why, and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from offramp.calibration.replay import ExitRecording
from offramp.core.columns import SCORED
from offramp.inference.budget import Budget
from offramp.inference.operating_points import OperatingPoint, OperatingPoints
from offramp.nn.network import Network

COLLAPSED = 0.99  # an exit has collapsed if this share of its answers is one and the same …
MIXED = 0.95  # … while the last exit stays below this share
TOO_MUCH_LOSS = 0.02  # of the metric
OTHER_HEAD = "give the exits another head or pooling (--set head=… where the method has it, else pool=…)"


def calibration_warnings(
    network: Network, recording: ExitRecording | None, tried: Sequence[OperatingPoint], points: OperatingPoints
) -> tuple[str, ...]:
    """Return warnings in the order of their causes.

    Collapsed exit heads; no row leaves, or leaving costs more than it saves; leaving loses too much; the loss is known
    too imprecisely.
    """
    warnings, rows = [], points.data["rows"]
    used = _used_exits(network, tried, points)
    if recording is not None and (collapsed := collapsed_exits(network, recording, used)):
        exits = f"exit{'s' * (len(collapsed) > 1)} {', '.join(map(str, collapsed))}"
        cure = f"train longer, with a smaller head_lr, or {OTHER_HEAD}"
        warnings.append(f"{exits}: (nearly) the same answer for every row, the head has collapsed: {cure}")
    if not tried:
        return tuple(warnings)
    if all(p.mac_share >= points.full_point.mac_share for p in tried):
        if points.full_point.mac_share < 1.0:  # planned depths: the full setting itself saves, nothing was left to try
            return tuple(warnings)
        early = any(p.mean_exit_layer < network.depth for p in tried)
        if network.exit_heads or network.decoder is not None:
            why = "the heads cost more than leaving early saves" if early else "no row ever leaves early"
        else:
            why = "what decides costs more than it saves, or nothing is left out"
        warnings.append(f"no setting is cheaper than the full model: {why}")
    elif all(points.loss_of(p) > TOO_MUCH_LOSS for p in points.points[:-1]):
        cure = f"train longer, or {OTHER_HEAD}" if network.exit_heads else "train longer"
        warnings.append(f"every cheaper setting loses two points or more: {cure}")
    elif (default := points.choose(Budget.default())).error > TOO_MUCH_LOSS:
        known = f"what the default setting loses is known to ± {100 * default.error:.1f} points only, from {rows} rows"
        warnings.append(f"{known}: calibrate on more of them, or use --budget 1.0")
    return tuple(warnings)


def _used_exits(network: Network, tried: Sequence[OperatingPoint], points: OperatingPoints) -> list[int]:
    """Return the exits at which rows leave.

    None below the lowest mean exit layer of any setting: methods that plan depths have exits that no row may take.
    Nothing is known where rows do not run all layers at the full setting, as they did in the recording.
    """
    if not tried or points.full_point.mean_exit_layer < network.depth - 1e-6:
        return []
    first = math.floor(min(p.mean_exit_layer for p in tried))
    return [layer for layer in sorted(network.exit_heads) if layer >= first]


def collapsed_exits(network: Network, recording: ExitRecording, layers: Sequence[int]) -> list[int]:
    """Return which of these exits give one answer only, though the last exit does not."""
    return [layer for layer in layers if _is_collapsed(network, recording, layer)]


def _is_collapsed(network: Network, recording: ExitRecording, layer: int) -> bool:
    logits, last = recording.logits[layer], recording.logits[network.depth]
    if "distribution" not in network.task.provides:
        return bool(logits.std() < (1.0 - COLLAPSED) * last.std())
    return _mode_share(network, recording, logits) >= COLLAPSED and _mode_share(network, recording, last) < MIXED


def _mode_share(network: Network, recording: ExitRecording, logits: Tensor) -> float:
    """Return the share of the most frequent answer."""
    packed = recording.packed
    distribution, _ = network.task.distributions(logits, packed.lengths, packed.tokens.get(SCORED))
    return float(torch.bincount(distribution.argmax(-1)).max() / max(1, len(distribution)))
