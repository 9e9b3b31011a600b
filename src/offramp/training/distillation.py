"""Logits of a teacher for all training rows, computed once and stored beside the run, and losses against them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.core.columns import SCORED
from offramp.core.packed import Packed
from offramp.nn.artifacts import load_or_compute
from offramp.nn.batches import Batch, Data, pack_rows
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers

TEACHER_FILE = "teacher.safetensors"


@dataclass(frozen=True)
class TeacherLogits:
    """Logits of the teacher by encoded row."""

    logits: tuple[Tensor, ...]  # each [1, outputs] or [tokens, outputs]

    def for_batch(self, batch: Batch) -> Tensor:
        """Return the teacher's logits for a batch, packed as its rows or tokens are."""
        return torch.cat([self.logits[i] for i in batch.indices]).to(batch.targets.device)


def teacher_logits(network: Network, data: Data, folder: Path, size: int = 32) -> TeacherLogits:
    """Return the full model's logits with its present weights, or those that an earlier attempt stored in `folder`."""
    sizes = [len(e.ids) for e in data.encoded] if network.per_token else [1] * len(data.encoded)

    def compute() -> dict[str, Tensor]:
        network.eval()
        parts = [_full_model_logits(network, data, start, size) for start in range(0, len(data.encoded), size)]
        return {"logits": torch.cat(parts)}

    return TeacherLogits(load_or_compute(folder / TEACHER_FILE, compute)["logits"].split(sizes))


def stored_teacher_folder(folder: Path) -> Path:
    """Return the folder of the first stage that stored a teacher's logits; without one, the stage's own `folder`."""
    return next((path.parent for path in sorted(folder.parent.glob(f"stage-*/{TEACHER_FILE}"))), folder)


def _full_model_logits(network: Network, data: Data, start: int, size: int) -> Tensor:
    packed = pack_rows(network.task, data.encoded[start : start + size]).to(network.device)
    with torch.no_grad():
        return network(network.depth, forward_all_layers(network.encoder, packed).after(network.depth)).float().cpu()


def distillation_loss(network: Network, student: Tensor, teacher: Tensor, packed: Packed) -> Tensor:
    """Return KL(teacher ‖ student) of the logits' distributions, or the squared error where answers are numbers."""
    if "distribution" not in network.task.provides:
        return F.mse_loss(student.float(), teacher.float())
    lengths, scored = packed.lengths.to(student.device), packed.tokens.get(SCORED)
    log_student, log_teacher = (
        network.task.distributions(logits.float(), lengths, scored)[0].log_softmax(-1) for logits in (student, teacher)
    )
    # of two impossible answers the difference is NaN; masked, it also sends no gradient
    difference = (log_teacher - log_student).masked_fill(torch.isneginf(log_teacher), 0.0)
    return (log_teacher.exp() * difference).sum() / len(log_teacher)


def distillation_loss_by_row(network: Network, student: Tensor, teacher: Tensor, packed: Packed) -> Tensor:
    """Return each row's cross-entropy with the teacher's distribution, or its squared error."""  # [rows]
    if "distribution" not in network.task.provides:
        return (student.float() - teacher.float()).square().mean(-1)
    lengths, scored = packed.lengths.to(student.device), packed.tokens.get(SCORED)
    (student_scores, row_of_answer), (teacher_scores, _) = (
        network.task.distributions(logits.float(), lengths, scored) for logits in (student, teacher)
    )
    impossible = torch.isneginf(teacher_scores)
    log_student = student_scores.log_softmax(-1).masked_fill(impossible, 0.0)
    losses = -(teacher_scores.softmax(-1) * log_student).sum(-1)
    if row_of_answer is None:
        return losses
    count = torch.bincount(row_of_answer, minlength=packed.count).clamp(min=1)
    return losses.new_zeros(packed.count).index_add(0, row_of_answer, losses) / count
