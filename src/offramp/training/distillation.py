"""A teacher's answers to all training rows, computed once and kept beside the run so that resuming finds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.core.packed import Packed
from offramp.nn.artifacts import load_or_compute
from offramp.nn.batches import Batch, Data, pack_rows
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers

TEACHER_FILE = "teacher.safetensors"


@dataclass(frozen=True)
class TeacherLogits:
    """Logits by encoded row."""

    logits: tuple[Tensor, ...]  # each [1, outputs] or [tokens, outputs]

    def for_batch(self, batch: Batch) -> Tensor:
        """What the teacher says to a batch, packed as its tokens are."""
        return torch.cat([self.logits[i] for i in batch.indices]).to(batch.targets.device)


def teacher_logits(network: Network, data: Data, folder: Path, size: int = 32) -> TeacherLogits:
    """The full model's answers as it stands now, or those kept from before."""
    sizes = [len(e.ids) for e in data.encoded] if network.per_token else [1] * len(data.encoded)

    def answers() -> dict[str, Tensor]:
        network.eval()
        parts = [_answers(network, data, start, size) for start in range(0, len(data.encoded), size)]
        return {"logits": torch.cat(parts)}

    return TeacherLogits(load_or_compute(folder / TEACHER_FILE, answers)["logits"].split(sizes))


def _answers(network: Network, data: Data, start: int, size: int) -> Tensor:
    packed = pack_rows(network.task, data.encoded[start : start + size]).to(network.device)
    with torch.no_grad():
        return network(network.depth, forward_all_layers(network.encoder, packed).after(network.depth)).float().cpu()


def distillation_loss(network: Network, said: Tensor, taught: Tensor, packed: Packed) -> Tensor:
    """How far answers are from the teacher's: KL of distributions, squared error of numbers."""
    if "distribution" not in network.task.provides:
        return F.mse_loss(said.float(), taught.float())
    lengths, scored = packed.lengths.to(said.device), packed.tokens.get("scored")
    student, model = (network.task.distributions(x.float(), lengths, scored)[0].log_softmax(-1) for x in (said, taught))
    gap = (model - student).masked_fill(torch.isneginf(model), 0.0)  # of two impossible answers; no gradient there
    return (model.exp() * gap).sum() / len(model)


def distillation_loss_by_row(network: Network, said: Tensor, taught: Tensor, packed: Packed) -> Tensor:
    """How far each row's answers are from the teacher's: cross-entropy with its distribution, or squared error."""
    if "distribution" not in network.task.provides:
        return (said.float() - taught.float()).square().mean(-1)  # [rows]
    lengths, scored = packed.lengths.to(said.device), packed.tokens.get("scored")
    (student, owner), (model, _) = (network.task.distributions(x.float(), lengths, scored) for x in (said, taught))
    possible = ~torch.isneginf(model)
    log = student.log_softmax(-1).masked_fill(~possible, 0.0)
    each = -(model.softmax(-1) * log).sum(-1)
    if owner is None:
        return each
    count = torch.bincount(owner, minlength=packed.count).clamp(min=1)
    return each.new_zeros(packed.count).index_add(0, owner, each) / count
