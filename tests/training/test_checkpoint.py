"""A checkpoint is complete or absent: round trips, tied weights, full disks and damage."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from offramp import methods, tasks
from offramp.errors import OfframpError
from offramp.inference.run_folder import build_network, load_backbone, load_tokenizer
from offramp.nn.network import Network
from offramp.training import checkpoint
from offramp.training.checkpoint import TrainingProgress
from tests import factories

PROGRESS = TrainingProgress(1, 2, 3, 0.1 + 0.2, [{"accuracy": 1 / 3}], [{"stage": "joint", "loss": 0.7}], 1.5)


def stepped_network(base: str, seed: int) -> tuple[Network, list[torch.optim.Optimizer]]:
    """Return a network with tied embeddings and two optimisers that have taken a step."""
    rows = factories.labelled_rows("masked_lm", 2)
    task = tasks.get("masked_lm").from_rows(rows, "rows").with_tokenizer(load_tokenizer(base))
    method = methods.get("branchynet")
    net = build_network(load_backbone(base, task), task, method, method.options())
    torch.manual_seed(seed)
    halves = [list(net.hf.parameters())[::2], list(net.hf.parameters())[1::2]]
    optimisers: list[torch.optim.Optimizer] = [torch.optim.AdamW(half, lr=0.1, fused=True) for half in halves]
    for parameter in net.hf.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimiser in optimisers:
        optimiser.step()
    return net, optimisers


def copy_state(net: Network, optimisers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return copies of all weights and of all moments."""
    tensors = {name: tensor.clone() for name, tensor in net.hf.state_dict().items()}
    for number, optimiser in enumerate(optimisers):
        for index, moments in optimiser.state_dict()["state"].items():
            tensors |= {f"{number} {index} {name}": tensor.clone() for name, tensor in moments.items()}
    return tensors


def test_read_checkpoint_restores_weights_moments_and_progress(base: str, tmp_path: Path) -> None:
    one, two = stepped_network(base, 1), stepped_network(base, 2)
    before = copy_state(*one)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in copy_state(*two).items())
    checkpoint.write_checkpoint(tmp_path, *one, PROGRESS)
    checkpoint.read_checkpoint(tmp_path, *two)
    after = copy_state(*two)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert checkpoint.read_progress(tmp_path) == PROGRESS
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.CHECKPOINT_FILE]


def test_write_weights_stores_tied_weights_once_and_they_stay_tied(base: str, tmp_path: Path) -> None:
    net, _ = stepped_network(base, 1)
    checkpoint.write_weights(tmp_path / "best.safetensors", net)
    with safe_open(tmp_path / "best.safetensors", framework="pt") as file:
        assert len([name for name in file.keys() if "word_embeddings" in name or "decoder.weight" in name]) == 1  # noqa: SIM118
    other, _ = stepped_network(base, 2)
    checkpoint.read_weights(tmp_path / "best.safetensors", other)
    assert other.hf.get_input_embeddings().weight is other.hf.get_output_embeddings().weight
    assert torch.equal(other.hf.get_input_embeddings().weight, net.hf.get_input_embeddings().weight)


@pytest.mark.parametrize("broken", ["save_file", "os.replace"])
def test_write_checkpoint_to_a_full_disk_leaves_the_old_checkpoint(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    one, two = stepped_network(base, 1), stepped_network(base, 2)
    checkpoint.write_checkpoint(tmp_path, *one, PROGRESS)
    before = factories.read_files(tmp_path)

    def fail(_: Any, path: Any, **__: Any) -> None:
        if broken == "save_file":
            Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"offramp.training.checkpoint.{broken}" if broken == "save_file" else broken, fail)
    with pytest.raises(OfframpError, match="No space left") as caught:
        checkpoint.write_checkpoint(tmp_path, *two, PROGRESS)
    assert str(tmp_path / checkpoint.CHECKPOINT_FILE) in str(caught.value)
    assert factories.read_files(tmp_path) == before


def test_read_progress_of_an_empty_folder_is_none(tmp_path: Path) -> None:
    assert checkpoint.read_progress(tmp_path) is None


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_read_progress_names_a_damaged_file(base: str, tmp_path: Path, damage: bytes | None) -> None:
    checkpoint.write_checkpoint(tmp_path, *stepped_network(base, 1), PROGRESS)
    file = tmp_path / checkpoint.CHECKPOINT_FILE
    file.write_bytes(file.read_bytes()[:-100] if damage is None else damage)
    with pytest.raises(OfframpError, match="damaged") as caught:
        checkpoint.read_progress(tmp_path)
    assert checkpoint.CHECKPOINT_FILE in caught.value.given and "--force" in caught.value.fix
