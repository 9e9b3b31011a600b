"""A training run on disk: one safetensors file that is always complete, because it is replaced in one step.

Weights, optimiser moments and progress are stored together, so a kill at any moment leaves the last complete state.
No random state is stored: every step is seeded from (seed, stage, epoch, step).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offramp.errors import OfframpError
from offramp.nn.network import Network
from offramp.utils.files import atomic_replace

CHECKPOINT_FILE = "checkpoint.safetensors"
CURVE_POINTS = 200  # of the loss curve of a stage, at most
SNAPSHOTS = "snapshots"  # folder of weights in the middle of training, which are kept on request


@dataclass
class TrainingProgress:
    """How far training has come."""

    stage: int = 0
    epoch: int = 0
    step: int = 0  # steps done in this epoch
    loss_sum: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)  # this stage's finished epochs
    log: list[dict[str, Any]] = field(default_factory=list)  # all stages' finished epochs
    seconds: float = 0.0
    reference: dict[str, float] = field(default_factory=dict)  # dev scores before this stage, if it needs them
    curve: list[list[list[float]]] = field(default_factory=list)  # by stage and part of it: sum of losses, steps

    def add_to_curve(self, loss: float, share: float) -> None:
        """Add the loss of a step to the curve of this stage; `share` of the stage was done before it, 0…1."""
        part = int(share * CURVE_POINTS)
        while len(self.curve) <= self.stage:
            self.curve.append([])
        points = self.curve[self.stage]
        while len(points) <= part:
            points.append([0.0, 0])
        points[part] = [points[part][0] + loss, points[part][1] + 1]

    def loss_curve(self) -> list[list[float | None]]:
        """Return the mean loss in each part of every stage; None where no step fell into a part."""
        return [[round(total / steps, 5) if steps else None for total, steps in points] for points in self.curve]


def network_weights(network: Network) -> dict[str, Tensor]:
    """Return all tensors of the network by name; tensors that share memory (tied embeddings) once."""
    parts = {f"model.{k}": v for k, v in network.hf.state_dict().items()}
    parts |= {f"added.{k}": v for k, v in network.added.state_dict().items()}
    first_name: dict[int, str] = {}  # by address
    return {k: v.detach() for k, v in parts.items() if first_name.setdefault(v.data_ptr(), k) == k or v.numel() == 0}


def restore_weights(network: Network, tensors: dict[str, Tensor]) -> None:
    """Copy weights into the network; tied weights are set through the tensor they share memory with."""
    with torch.no_grad():
        for name, tensor in network_weights(network).items():
            tensor.copy_(tensors[name])


def write_weights(path: Path, network: Network) -> None:
    """Write the weights alone: those of a stage's best epoch."""
    tensors = {k: v.contiguous() for k, v in network_weights(network).items()}
    with atomic_replace(path) as temporary:
        save_file(tensors, temporary)


def snapshot_name(stage: int, epochs: int) -> str:
    """Return the file name of the weights after so many epochs of a stage (from 0); names sort by time."""
    return f"stage-{stage}-epoch-{epochs:04d}.safetensors"


def read_weights(path: Path, network: Network) -> None:
    """Read the weights of a stage's best epoch back into the network."""
    with _opened(path) as file:
        restore_weights(network, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  (not a dict)


def check_readable(path: Path) -> None:
    """Raise an error if a stored file is damaged."""
    with _opened(path):
        pass


def write_checkpoint(
    folder: Path, network: Network, optimisers: list[torch.optim.Optimizer], progress: TrainingProgress
) -> None:
    """Write everything that resuming needs."""
    tensors = {k: v.contiguous() for k, v in network_weights(network).items()}
    for number, optimiser in enumerate(optimisers):
        for index, state in optimiser.state_dict()["state"].items():
            tensors |= {f"optim.{number}.{index}.{k}": torch.as_tensor(v).contiguous() for k, v in state.items()}
    with atomic_replace(folder / CHECKPOINT_FILE) as temporary:
        save_file(tensors, temporary, metadata={"progress": json.dumps(asdict(progress))})


def read_progress(folder: Path) -> TrainingProgress | None:
    """Return how far an interrupted run has come, or None if there is none."""
    if not (folder / CHECKPOINT_FILE).is_file():
        return None
    with _opened(folder / CHECKPOINT_FILE, "numpy") as file:  # opened once: another process may replace the file
        return TrainingProgress(**json.loads(file.metadata()["progress"]))


@contextmanager
def _opened(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Open a stored file, or raise an error if it is damaged."""
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (OSError, SafetensorError, RuntimeError, KeyError, TypeError, ValueError) as error:
        given = f"a damaged {path} ({error})"
        raise OfframpError("to resume training", given, "start again with --force") from error


def read_checkpoint(folder: Path, network: Network, optimisers: list[torch.optim.Optimizer]) -> None:
    """Read weights and optimiser moments of an interrupted run."""
    with _opened(folder / CHECKPOINT_FILE) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    restore_weights(network, tensors)
    for number, optimiser in enumerate(optimisers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(f"optim.{number}."):
                index, key = name.split(".")[2:]
                state.setdefault(int(index), {})[key] = tensor
        optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
