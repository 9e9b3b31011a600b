"""A checkpoint is whole or not there: round trips, tied weights, full disks and damage."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from offramp import methods, tasks
from offramp.errors import OfframpError
from offramp.inference import run_folder as folders
from offramp.nn.network import Network
from offramp.training import checkpoint
from offramp.training.checkpoint import TrainingProgress
from tests import runs

PROGRESS = TrainingProgress(1, 2, 3, 0.1 + 0.2, [{"accuracy": 1 / 3}], [{"stage": "joint", "loss": 0.7}], 1.5)


def build(base: str, seed: int, kind: str = "masked_lm") -> tuple[Network, list[torch.optim.Optimizer]]:
    """A network with tied embeddings and two optimisers that have taken a step."""
    tokenizer = folders.load_tokenizer(base)
    task = tasks.get(kind).from_rows(runs.rows(kind, 2), "rows").with_tokenizer(tokenizer)
    method = methods.get("branchynet")
    net = folders.build_network(folders.load_backbone(base, task), task, method, method.options())
    torch.manual_seed(seed)
    halves = [list(net.hf.parameters())[::2], list(net.hf.parameters())[1::2]]
    optimisers: list[torch.optim.Optimizer] = [torch.optim.AdamW(half, lr=0.1, fused=True) for half in halves]
    for parameter in net.hf.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimiser in optimisers:
        optimiser.step()
    return net, optimisers


def state(net: Network, optimisers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Copies of all weights and of all moments."""
    found = {name: tensor.clone() for name, tensor in net.hf.state_dict().items()}
    for number, optimiser in enumerate(optimisers):
        for index, moments in optimiser.state_dict()["state"].items():
            found |= {f"{number} {index} {name}": tensor.clone() for name, tensor in moments.items()}
    return found


def test_everything_comes_back(base: str, tmp_path: Path) -> None:
    one, two = build(base, 1), build(base, 2)
    before = state(*one)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in state(*two).items())
    checkpoint.write_checkpoint(tmp_path, *one, PROGRESS)
    checkpoint.read_checkpoint(tmp_path, *two)
    after = state(*two)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert checkpoint.read_progress(tmp_path) == PROGRESS
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.CHECKPOINT_FILE]


def test_tied_weights_are_written_once_and_stay_tied(base: str, tmp_path: Path) -> None:
    net, _ = build(base, 1)
    checkpoint.write_weights(tmp_path / "best.safetensors", net)
    with safe_open(tmp_path / "best.safetensors", framework="pt") as file:
        assert len([name for name in file.keys() if "word_embeddings" in name or "decoder.weight" in name]) == 1  # noqa: SIM118
    other, _ = build(base, 2)
    checkpoint.read_weights(tmp_path / "best.safetensors", other)
    assert other.hf.get_input_embeddings().weight is other.hf.get_output_embeddings().weight
    assert torch.equal(other.hf.get_input_embeddings().weight, net.hf.get_input_embeddings().weight)


@pytest.mark.parametrize("broken", ["save_file", "os.replace"])
def test_a_full_disk_leaves_the_old_checkpoint(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    one, two = build(base, 1), build(base, 2)
    checkpoint.write_checkpoint(tmp_path, *one, PROGRESS)
    before = runs.files(tmp_path)

    def full(_: Any, path: Any, **__: Any) -> None:
        if broken == "save_file":
            Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"offramp.training.checkpoint.{broken}" if broken == "save_file" else broken, full)
    with pytest.raises(OfframpError, match="No space left") as caught:
        checkpoint.write_checkpoint(tmp_path, *two, PROGRESS)
    assert str(tmp_path / checkpoint.CHECKPOINT_FILE) in str(caught.value)
    assert runs.files(tmp_path) == before


def test_nothing_there_is_no_progress(tmp_path: Path) -> None:
    assert checkpoint.read_progress(tmp_path) is None


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_damage_is_named(base: str, tmp_path: Path, damage: bytes | None) -> None:
    checkpoint.write_checkpoint(tmp_path, *build(base, 1), PROGRESS)
    file = tmp_path / checkpoint.CHECKPOINT_FILE
    file.write_bytes(file.read_bytes()[:-100] if damage is None else damage)
    with pytest.raises(OfframpError, match="damaged") as caught:
        checkpoint.read_progress(tmp_path)
    assert checkpoint.CHECKPOINT_FILE in caught.value.given and "--force" in caught.value.fix
