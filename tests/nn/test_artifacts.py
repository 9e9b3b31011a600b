"""Tensors that are computed once from the rows and read again when training resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from offramp.errors import OfframpError
from offramp.methods import head_pruning
from offramp.nn import artifacts
from offramp.nn.artifacts import load_or_compute
from offramp.training import saliency
from tests import factories


def test_load_or_compute_computes_once(tmp_path: Path) -> None:
    values = [torch.ones(2, 3).T, torch.zeros(1)]
    for _ in range(2):
        assert torch.equal(
            load_or_compute(tmp_path / "a.safetensors", lambda: {"x": values.pop(0)})["x"].T, torch.ones(2, 3)
        )
    assert len(values) == 1


def prune(folder: Path) -> None:
    network = factories.network("head_pruning")
    head_pruning.PrunedStage(network, "prune", 1e-3, options=head_pruning.HeadPruningOptions(heads=0.5)).prepare(
        factories.data(), folder
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: load_or_compute(folder / "a.safetensors", lambda: {"x": torch.ones(1)}),
        lambda folder: saliency.write_token_table(folder / "a.safetensors", torch.ones(1)),
        prune,
    ],
)
@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left on device"), OSError(28, "No space left")])
def test_a_full_disk_is_an_error_for_users_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Any], error: Exception
) -> None:
    def fail(_: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    for module in (artifacts, saliency, head_pruning):
        monkeypatch.setattr(module, "save_file", fail, raising=False)
    with pytest.raises(OfframpError, match="No space left"):
        write(tmp_path)
    assert not list(tmp_path.iterdir())
