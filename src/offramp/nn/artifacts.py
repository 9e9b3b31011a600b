"""Tensors that a stage or a module computes once from the rows and reads again when training resumes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offramp.nn.batches import Data
from offramp.tasks import Task


def load_or_compute(path: Path, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors in a file; if there is none, compute them and write it, completely or not at all."""
    if not path.is_file():
        temporary = path.with_suffix(f".{os.getpid()}.new")  # several processes may write the same file
        save_file({name: tensor.contiguous() for name, tensor in compute().items()}, temporary)
        temporary.replace(path)
    return load_file(path)


class FittedModule(nn.Module):
    """A module whose tensors are computed from the training rows, not learned by gradients."""

    def prepare(self, task: Task, data: Data, folder: Path) -> None:
        """Compute the tensors, or read them from the folder; called before the first stage, and again on resume."""
        raise NotImplementedError
