"""What a function of tensors consists of: its operations, and the tensors it brings along.

The operations and the bytes of those tensors name the function: whatever changes what it computes (weights, settings of
a model, code) changes the name, so compiled pieces kept under it are never stale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Notes every operation and every tensor that was neither given nor computed."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.known: dict[int, Tensor] = {id(t): t for t in given}  # held, so that no id is used again
        self.constants: dict[int, Tensor] = {}
        self.digest = hashlib.sha256()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.digest.update(str(func).encode())
        for value in tree_leaves((args, kwargs or {})):
            self._note(value)
        out = func(*args, **(kwargs or {}))
        self.known.update({id(t): t for t in tree_leaves(out) if isinstance(t, Tensor)})
        return out

    def _note(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            self.digest.update(repr(value).encode())
        elif id(value) in self.known:
            self.digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        elif id(value) not in self.constants:
            self.constants[id(value)] = value
            self.digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            self.digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def record(function: Callable[[], Any], given: Sequence[Tensor]) -> Recorder:
    """What a function consists of when called again: the first time layers prepare things (fused Q, K and V)."""
    with torch.inference_mode(False), torch.no_grad():
        function()
        with Recorder(given) as made:
            function()
    return made


@contextmanager
def frozen(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Without gradients for a moment: a tracer refuses constants that ask for them."""
    trains_on_cpu = [t for t in tensors if isinstance(t, nn.Parameter) and t.requires_grad]
    for parameter in trains_on_cpu:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trains_on_cpu:
            parameter.requires_grad_(True)
