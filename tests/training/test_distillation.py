"""A teacher's answers: by row, kept on disk, and what imitating them means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offramp import methods
from offramp.core.packed import pack
from offramp.data.tokenization import Encoded
from offramp.inference.run_folder import build_network
from offramp.nn.batches import Batch, Data
from offramp.nn.network import Network
from offramp.tasks import get
from offramp.training.distillation import TEACHER_FILE, distillation_loss, teacher_logits
from tests import tiny

LENGTHS = [4, 7, 3]


def made(task: str) -> tuple[Network, Data]:
    tags = [(["O", "B-X"] * n)[:n] for n in LENGTHS]
    rows = [{"text": "a", "label": i, "tokens": ["a"] * len(t), "tags": t} for i, t in enumerate(tags)]
    spec, method = get(task).from_rows(rows, "rows"), methods.get("full")
    net = build_network(tiny.model("bert", spec.auto_class, num_labels=spec.outputs), spec, method, method.options())
    numbered = enumerate(tiny.rows(LENGTHS))
    encoded = [Encoded(ids, [0] * len(ids), i, list(range(len(ids))), [], 0) for i, ids in numbered]
    return net, Data(rows, encoded)


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_answers_follow_their_rows_and_survive_on_disk(task: str, tmp_path: Path) -> None:
    net, data = made(task)
    first = teacher_logits(net, data, tmp_path, size=2)
    batch = Batch(pack([data.encoded[i].ids for i in (2, 0)]), torch.zeros(2), [2, 0])
    assert torch.equal(first.for_batch(batch), torch.cat([first.logits[2], first.logits[0]]))
    with torch.no_grad():
        for parameter in net.hf.parameters():
            parameter.zero_()  # the teacher has changed since: what was kept is what counts
    assert torch.equal(teacher_logits(net, data, tmp_path).logits[1], first.logits[1])
    (tmp_path / TEACHER_FILE).unlink()
    assert not torch.equal(teacher_logits(net, data, tmp_path).logits[1], first.logits[1])


@pytest.mark.parametrize("task", ["classification", "regression", "tagging"])
def test_imitation_is_zero_only_for_the_teachers_own_answers(task: str) -> None:
    net, data = made(task)
    packed = pack([e.ids for e in data.encoded])
    n = packed.total if net.per_token else packed.count
    taught = torch.randn(n, net.task.outputs)
    assert distillation_loss(net, taught, taught, packed).item() == pytest.approx(0.0, abs=1e-6)
    assert distillation_loss(net, taught + torch.randn_like(taught), taught, packed).item() > 0.01


def test_imitation_of_spans_gives_finite_gradients_both_ways() -> None:
    """Rows of different lengths: places that a shorter row does not have are impossible for both."""
    rows = [{"question": "a", "context": "a b c", "answers": {"text": ["a"], "answer_start": [0]}}]
    spec, method = get("question_answering").from_rows(rows, "rows"), methods.get("full")
    net = build_network(tiny.model("bert", spec.auto_class, num_labels=spec.outputs), spec, method, method.options())
    packed = pack(tiny.rows(LENGTHS))
    packed = packed.with_tokens(scored=torch.ones(packed.total, dtype=torch.bool))
    for told in (True, False):
        said, taught = (torch.randn(packed.total, 2, requires_grad=True) for _ in range(2))
        found = (
            distillation_loss(net, said, taught.detach(), packed)
            if told
            else distillation_loss(net, taught.detach(), said, packed)
        )
        (grad,) = torch.autograd.grad(found, said)
        assert found > 0 and grad.isfinite().all() and grad.abs().sum() > 0
