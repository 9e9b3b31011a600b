"""Tensors that a stage or a module computes once from the rows and reads again when training resumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offramp.nn.batches import Data
from offramp.tasks import Task
from offramp.utils.files import atomic_replace


def load_or_compute(path: Path, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors in a file; if there is none, compute them and write it, completely or not at all."""
    if not path.is_file():
        write_tensors(path, compute())
    return load_file(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a file, completely or not at all; several processes may write the same file."""
    with atomic_replace(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)


class FittedModule(nn.Module):
    """A module whose tensors are computed from the training rows, not learned by gradients."""

    def prepare(self, task: Task, data: Data, folder: Path) -> None:
        """Compute the tensors, or read them from the folder; called before the first stage, and again on resume."""
        raise NotImplementedError
