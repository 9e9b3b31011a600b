"""Tensors that a stage or a part makes once from the rows and finds again when training resumes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offramp.nn.batches import Data
from offramp.tasks import Task


def load_or_compute(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the file holds; if there is none yet, it is made and appears whole."""
    if not path.is_file():
        fresh = path.with_suffix(f".{os.getpid()}.new")  # several processes may make the same file
        save_file({name: tensor.contiguous() for name, tensor in make().items()}, fresh)
        fresh.replace(path)
    return load_file(path)


class FittedModule(nn.Module):
    """A part that is made from training rows, not learned."""

    def prepare(self, task: Task, data: Data, folder: Path) -> None:
        """Make it, or find it made in the folder; called before the first stage, and again on resume."""
        raise NotImplementedError
