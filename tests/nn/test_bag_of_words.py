"""Off-ramps that know words: learned tables, and tables solved for."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offramp
from offramp.core.cost import HeadCost
from offramp.core.packed import Packed, pack
from offramp.data.tokenization import Encoded
from offramp.nn.bag_of_words import PAIR_BUCKETS, BagOfWordsExit, FittedBagOfWordsExit
from offramp.nn.batches import FOLDS, Data, build_batch, fold_of
from offramp.tasks import get
from offramp.training import trainer
from offramp.training.schedule import Schedule
from tests import runs


class Silent(nn.Module):
    """A head that says nothing."""

    def forward(self, packed: Packed) -> Tensor:
        return torch.zeros(packed.count, 3)


def bag_of_words() -> BagOfWordsExit:
    torch.manual_seed(0)
    exit_head = BagOfWordsExit(Silent(), HeadCost(5.0, 1.0), vocabulary=20, outputs=3)
    nn.init.normal_(exit_head.words)
    nn.init.normal_(exit_head.pairs)
    return exit_head


def by_hand(exit_head: BagOfWordsExit, row: list[int]) -> Tensor:
    beside = [exit_head.pairs[(a * 31337 + b * 7919) % PAIR_BUCKETS] for a, b in itertools.pairwise(row)]
    return exit_head.TABLE_SCALE * (sum(exit_head.words[i] for i in row) + sum(beside, torch.zeros(3)))


def test_a_lexical_ramp_adds_up_words_and_neighbours_of_each_row() -> None:
    exit_head, rows = bag_of_words(), [[1, 2, 3], [4], [5, 6, 5, 6, 7]]
    with torch.no_grad():
        said = exit_head(pack(rows))
        for row, logits in zip(rows, said, strict=True):
            assert torch.allclose(logits, by_hand(exit_head, row), atol=1e-5)
            assert torch.equal(exit_head(pack([row]))[0], logits)  # no neighbour from another row


def test_its_tables_learn_and_are_paid_for() -> None:
    exit_head = bag_of_words()
    exit_head(pack([[1, 2], [3]])).sum().backward()
    assert exit_head.words.grad is not None and exit_head.pairs.grad is not None
    assert exit_head.words.grad.abs().sum(1).nonzero().ravel().tolist() == [1, 2, 3]
    assert int((exit_head.pairs.grad.abs().sum(1) > 0).sum()) == 1  # a single pair of neighbours
    assert exit_head.cost == HeadCost(5.0, 1.0 + 2 * 3)


def test_words_that_are_not_there_do_not_speak() -> None:
    exit_head, rows = bag_of_words(), [[1, 2, 3, 4], [5, 6]]
    packed = pack(rows).with_tokens(present=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.5]))
    with torch.no_grad():
        said = exit_head(packed)
        gone = by_hand(exit_head, [1, 2]) + exit_head.TABLE_SCALE * exit_head.words[4]
        half = (
            0.5 * by_hand(exit_head, [5, 6]) + 0.5 * exit_head.TABLE_SCALE * exit_head.words[5]
        )  # of the word and of the pair
    assert torch.allclose(said, torch.stack([gone, half]), atol=1e-5)


def rows(many: int) -> Data:
    """Token 1 says the first label, token 2 the second, 3 before 4 the third; others say nothing."""
    torch.manual_seed(0)
    labels = torch.randint(3, (many,)).tolist()
    telling = ([1], [2], [3, 4])
    ids = [[*torch.randint(5, 20, (6,)).tolist(), *telling[label]] for label in labels]
    encoded = [Encoded(own, [0] * len(own), place, list(range(len(own))), [], 0) for place, own in enumerate(ids)]
    return Data([{"text": "words", "label": label} for label in labels], encoded)


def fitted(data: Data, folder: Path) -> FittedBagOfWordsExit:
    exit_head = FittedBagOfWordsExit(Silent(), HeadCost(5.0, 1.0), vocabulary=20, outputs=3)
    exit_head.prepare(get("classification").from_rows(data.rows, "rows"), data, folder)
    return exit_head


def test_tables_are_solved_for_and_know_words_and_neighbours(tmp_path: Path) -> None:
    data = rows(300)
    exit_head = fitted(data, tmp_path).eval()
    said = exit_head(pack([[7, 1, 9], [2, 8], [9, 3, 4], [3, 9, 4]]))
    assert said.argmax(1).tolist() == [0, 1, 2, 2] and not list(exit_head.parameters())
    together, apart = said[2].softmax(0)[2], said[3].softmax(0)[2]
    assert together > apart  # the pair counts, besides its words
    alone = [exit_head(pack([row]))[0] for row in ([7, 1, 9], [9, 3, 4])]
    assert torch.allclose(torch.stack(alone), said[[0, 2]], atol=1e-6)


def test_the_solution_is_where_the_slope_is_nought(tmp_path: Path) -> None:
    data = rows(60)
    exit_head = fitted(data, tmp_path).eval()
    labels = torch.tensor([row["label"] for row in data.rows])
    held = {
        name: table.double().requires_grad_() for name, table in exit_head.named_buffers() if name in ("words", "bias")
    }
    seen = torch.stack([torch.bincount(torch.tensor(e.ids), minlength=20) for e in data.encoded]).double()
    sizes = torch.tensor([len(e.ids) for e in data.encoded])[:, None]
    with torch.no_grad():
        whole = exit_head(pack([e.ids for e in data.encoded])).double()
        rest = whole - seen / sizes**0.5 @ held["words"] - held["bias"]  # what pairs say
    logits = seen / sizes**0.5 @ held["words"] + held["bias"] + rest
    rare = torch.log((1 + len(labels)) / (1 + (seen > 0).sum(0))) + 1.0
    price = 0.5 * (held["words"] / rare[:, None]).square().sum()
    (nn.functional.cross_entropy(logits, labels, reduction="sum") + price).backward()
    assert max(float(table.grad.abs().max()) for table in held.values() if table.grad is not None) < 1e-2


@pytest.mark.parametrize("left_out", range(FOLDS))
def test_while_training_a_row_hears_tables_made_without_its_part(tmp_path: Path, left_out: int) -> None:
    data = rows(200)
    task = get("classification").from_rows(data.rows, "rows")
    mine = [i for i, e in enumerate(data.encoded) if fold_of(e.ids) == left_out]
    others = Data(data.rows, [e for e in data.encoded if fold_of(e.ids) != left_out])
    (tmp_path / "without").mkdir()
    wanted = fitted(others, tmp_path / "without").eval()
    exit_head = fitted(data, tmp_path)
    some = build_batch(task, data, mine[:5], None)
    assert torch.allclose(exit_head.train()(some.packed), wanted(some.packed), atol=2e-3)
    assert not torch.allclose(exit_head.eval()(some.packed), wanted(some.packed), atol=2e-3)


def test_rows_without_labels_leave_the_tables_empty(tmp_path: Path) -> None:
    data = rows(10)
    exit_head = FittedBagOfWordsExit(Silent(), HeadCost(5.0, 1.0), vocabulary=20, outputs=3)
    exit_head.prepare(
        get("classification").from_rows(data.rows, "rows"), Data(data.rows, data.encoded, False), tmp_path
    )
    assert not exit_head.words.any() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["deebert", "branchynet"])
def test_a_run_with_solved_tables_stops_anywhere_and_answers_after_saving_as_before(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def train(folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        schedule = Schedule(epochs=2, batch_size=16, lr=0.005, save_seconds=0.0)
        return runs.train(base, folder, method, options={"bag_of_words_training": "fitted"}, schedule=schedule)

    whole, steps, real = train(tmp_path / "whole"), 0, trainer.Trainer._step

    def stumble(self: trainer.Trainer, *given: Any) -> float:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise RuntimeError("the power went")
        return real(self, *given)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the power went"):
        patch.setattr(trainer.Trainer, "_step", stumble)
        train(tmp_path / "halved")
    again = train(tmp_path / "halved")
    for name in ("model.safetensors", "offramp.safetensors"):
        assert (again / name).read_bytes() == (whole / name).read_bytes()
    exit_head = offramp.load(whole).network.exit_heads[0]
    assert isinstance(exit_head, FittedBagOfWordsExit) and bool(exit_head.words.any())
