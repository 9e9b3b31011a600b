"""Teacher logits by row, stored on disk, and the loss against them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offramp import methods
from offramp.core.packed import pack
from offramp.inference.run_folder import build_network
from offramp.nn.batches import Batch
from offramp.tasks import get
from offramp.training.distillation import TEACHER_FILE, distillation_loss, teacher_logits
from tests import factories

LENGTHS = [4, 7, 3]


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_teacher_logits_are_looked_up_by_row_and_stored(task: str, tmp_path: Path) -> None:
    net, data = factories.network(task=task, lengths=LENGTHS), factories.data(LENGTHS)
    first = teacher_logits(net, data, tmp_path, size=2)
    batch = Batch(pack([data.encoded[i].ids for i in (2, 0)]), torch.zeros(2), [2, 0])
    assert torch.equal(first.for_batch(batch), torch.cat([first.logits[2], first.logits[0]]))
    with torch.no_grad():
        for parameter in net.hf.parameters():
            parameter.zero_()
    assert torch.equal(teacher_logits(net, data, tmp_path).logits[1], first.logits[1])  # those of the stored weights
    (tmp_path / TEACHER_FILE).unlink()
    assert not torch.equal(teacher_logits(net, data, tmp_path).logits[1], first.logits[1])


@pytest.mark.parametrize("task", ["classification", "regression", "tagging"])
def test_distillation_loss_is_zero_only_for_the_teachers_logits(task: str) -> None:
    net = factories.network(task=task, lengths=LENGTHS)
    packed = pack(factories.token_ids(LENGTHS))
    teacher = torch.randn(packed.total if net.per_token else packed.count, net.task.outputs)
    assert distillation_loss(net, teacher, teacher, packed).item() == pytest.approx(0.0, abs=1e-6)
    assert distillation_loss(net, teacher + torch.randn_like(teacher), teacher, packed).item() > 0.01


@pytest.mark.parametrize("learner", ["student", "teacher"])
def test_distillation_loss_of_spans_has_finite_gradients(learner: str) -> None:
    """Rows have different lengths: positions that a shorter row lacks are impossible for student and teacher."""
    rows = [{"question": "a", "context": "a b c", "answers": {"text": ["a"], "answer_start": [0]}}]
    task, method = get("question_answering").from_rows(rows, "rows"), methods.get("full")
    hf = factories.hf_model("bert", task.auto_class, num_labels=task.outputs)
    net = build_network(hf, task, method, method.options())
    packed = pack(factories.token_ids(LENGTHS))
    packed = packed.with_tokens(scored=torch.ones(packed.total, dtype=torch.bool))
    learned, fixed = torch.randn(packed.total, 2, requires_grad=True), torch.randn(packed.total, 2)
    student, teacher = (learned, fixed) if learner == "student" else (fixed, learned)
    loss = distillation_loss(net, student, teacher, packed)
    (grad,) = torch.autograd.grad(loss, learned)
    assert loss > 0 and grad.isfinite().all() and grad.abs().sum() > 0
