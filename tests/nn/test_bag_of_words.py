"""Exit heads that know words: learned tables, and tables solved for."""

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
from offramp.nn.bag_of_words import HASH_FACTORS, PAIR_BUCKETS, BagOfWordsExit, FittedBagOfWordsExit
from offramp.nn.batches import FOLDS, Data, build_batch, fold_of
from offramp.tasks import Task, get
from offramp.training.schedule import Schedule
from tests import factories


class ZeroHead(nn.Module):
    """A head whose logits are 0."""

    def forward(self, packed: Packed) -> Tensor:
        return torch.zeros(packed.count, 3)


def random_exit() -> BagOfWordsExit:
    """Return an exit with random tables over 20 ids and 3 labels."""
    torch.manual_seed(0)
    exit_head = BagOfWordsExit(ZeroHead(), HeadCost(5.0, 1.0), vocabulary=20, outputs=3)
    nn.init.normal_(exit_head.words)
    nn.init.normal_(exit_head.pairs)
    return exit_head


def logits_by_hand(exit_head: BagOfWordsExit, row: list[int]) -> Tensor:
    first, second = HASH_FACTORS
    pairs = [exit_head.pairs[(a * first + b * second) % PAIR_BUCKETS] for a, b in itertools.pairwise(row)]
    return exit_head.TABLE_SCALE * (sum(exit_head.words[i] for i in row) + sum(pairs, torch.zeros(3)))


def test_bag_of_words_exit_sums_words_and_neighbours_of_each_row() -> None:
    exit_head, rows = random_exit(), [[1, 2, 3], [4], [5, 6, 5, 6, 7]]
    with torch.no_grad():
        for row, logits in zip(rows, exit_head(pack(rows)), strict=True):
            assert torch.allclose(logits, logits_by_hand(exit_head, row), atol=1e-5)
            assert torch.equal(exit_head(pack([row]))[0], logits)  # no neighbour from another row


def test_bag_of_words_exit_learns_its_tables_and_counts_their_cost() -> None:
    exit_head = random_exit()
    exit_head(pack([[1, 2], [3]])).sum().backward()
    assert exit_head.words.grad is not None and exit_head.pairs.grad is not None
    assert exit_head.words.grad.abs().sum(1).nonzero().ravel().tolist() == [1, 2, 3]
    assert int((exit_head.pairs.grad.abs().sum(1) > 0).sum()) == 1  # a single pair of neighbours
    assert exit_head.cost == HeadCost(5.0, 1.0 + 2 * 3)


def test_bag_of_words_exit_weighs_tokens_by_their_presence() -> None:
    exit_head, rows = random_exit(), [[1, 2, 3, 4], [5, 6]]
    packed = pack(rows).with_tokens(present=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.5]))
    with torch.no_grad():
        logits = exit_head(packed)
        without_third = logits_by_hand(exit_head, [1, 2]) + exit_head.TABLE_SCALE * exit_head.words[4]
        # half of the second word and half of the pair
        half = 0.5 * logits_by_hand(exit_head, [5, 6]) + 0.5 * exit_head.TABLE_SCALE * exit_head.words[5]
    assert torch.allclose(logits, torch.stack([without_third, half]), atol=1e-5)


def separable_data(count: int) -> Data:
    """Return rows where token 1 means the first label, token 2 the second and 3 before 4 the third."""
    torch.manual_seed(0)
    labels = torch.randint(3, (count,)).tolist()
    markers = ([1], [2], [3, 4])
    ids = [[*torch.randint(5, 20, (6,)).tolist(), *markers[label]] for label in labels]
    return Data([{"text": "words", "label": label} for label in labels], factories.encode(ids))


def task_of(data: Data) -> Task:
    return get("classification").from_rows(data.rows, "rows")


def fitted_exit(data: Data, folder: Path) -> FittedBagOfWordsExit:
    """Return an exit that was fitted to the rows."""
    exit_head = FittedBagOfWordsExit(ZeroHead(), HeadCost(5.0, 1.0), vocabulary=20, outputs=3)
    exit_head.prepare(task_of(data), data, folder)
    return exit_head


def test_fitted_exit_knows_words_and_neighbours(tmp_path: Path) -> None:
    exit_head = fitted_exit(separable_data(300), tmp_path).eval()
    logits = exit_head(pack([[7, 1, 9], [2, 8], [9, 3, 4], [3, 9, 4]]))
    assert logits.argmax(1).tolist() == [0, 1, 2, 2] and not list(exit_head.parameters())
    neighbours, apart = logits[2].softmax(0)[2], logits[3].softmax(0)[2]
    assert neighbours > apart  # the pair counts, besides its words
    alone = [exit_head(pack([row]))[0] for row in ([7, 1, 9], [9, 3, 4])]
    assert torch.allclose(torch.stack(alone), logits[[0, 2]], atol=1e-6)


def test_fitted_tables_have_zero_gradient(tmp_path: Path) -> None:
    data = separable_data(60)
    exit_head = fitted_exit(data, tmp_path).eval()
    labels = torch.tensor([row["label"] for row in data.rows])
    tables = {name: exit_head.get_buffer(name).double().requires_grad_() for name in ("words", "bias")}
    counts = torch.stack([torch.bincount(torch.tensor(e.ids), minlength=20) for e in data.encoded]).double()
    sizes = torch.tensor([len(e.ids) for e in data.encoded])[:, None]
    with torch.no_grad():
        logits = exit_head(pack([e.ids for e in data.encoded])).double()
        of_pairs = logits - counts / sizes**0.5 @ tables["words"] - tables["bias"]
    logits = counts / sizes**0.5 @ tables["words"] + tables["bias"] + of_pairs
    idf = torch.log((1 + len(labels)) / (1 + (counts > 0).sum(0))) + 1.0
    penalty = 0.5 * (tables["words"] / idf[:, None]).square().sum()
    (nn.functional.cross_entropy(logits, labels, reduction="sum") + penalty).backward()
    assert max(float(table.grad.abs().max()) for table in tables.values() if table.grad is not None) < 1e-2


@pytest.mark.parametrize("left_out", range(FOLDS))
def test_fitted_exit_uses_tables_without_a_rows_fold_in_training(tmp_path: Path, left_out: int) -> None:
    data = separable_data(200)
    in_fold = [i for i, e in enumerate(data.encoded) if fold_of(e.ids) == left_out]
    others = Data(data.rows, [e for e in data.encoded if fold_of(e.ids) != left_out])
    (tmp_path / "without").mkdir()
    without_fold = fitted_exit(others, tmp_path / "without").eval()
    exit_head = fitted_exit(data, tmp_path)
    packed = build_batch(task_of(data), data, in_fold[:5], None).packed
    assert torch.allclose(exit_head.train()(packed), without_fold(packed), atol=2e-3)
    assert not torch.allclose(exit_head.eval()(packed), without_fold(packed), atol=2e-3)


def test_fitted_exit_knows_each_of_several_labels_by_itself(tmp_path: Path) -> None:
    data = separable_data(300)
    labels = [[name for name, token in (("one", 1), ("low", 2), ("low", 1)) if token in e.ids] for e in data.encoded]
    many = Data([{"text": "words", "labels": own} for own in labels], data.encoded)
    exit_head = FittedBagOfWordsExit(ZeroHead(), HeadCost(5.0, 1.0), vocabulary=20, outputs=3)
    task = get("multi_label").from_json({"labels": ["low", "one", "never"], "texts": ["text"]})
    exit_head.prepare(task, many, tmp_path)
    given = exit_head.eval()(pack([[7, 1, 9], [2, 8], [9, 3, 4]])) > 0
    assert given.tolist() == [[True, True, False], [True, False, False], [False, False, False]]


def test_fitted_tables_stay_zero_without_labels(tmp_path: Path) -> None:
    data = separable_data(10)
    exit_head = FittedBagOfWordsExit(ZeroHead(), HeadCost(5.0, 1.0), vocabulary=20, outputs=3)
    exit_head.prepare(task_of(data), Data(data.rows, data.encoded, labelled=False), tmp_path)
    assert not exit_head.words.any() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["deebert", "branchynet"])
def test_a_run_with_fitted_tables_resumes_and_is_saved(base: str, tmp_path: Path, method: str) -> None:
    def train(folder: Path, report: Any = lambda **_: None) -> Path:
        folder.mkdir(exist_ok=True)
        schedule = Schedule(epochs=2, batch_size=16, lr=0.005, save_seconds=0.0)
        options = {"bag_of_words_training": "fitted"}
        return factories.run_folder(base, folder, method, report=report, options=options, schedule=schedule)

    steps = itertools.count(1)

    def fail_at_fourth_step(**news: Any) -> None:
        if "steps" in news and next(steps) == 4:
            raise RuntimeError("interrupted by the test")

    uninterrupted = train(tmp_path / "uninterrupted")
    with pytest.raises(RuntimeError, match="interrupted by the test"):
        train(tmp_path / "resumed", fail_at_fourth_step)
    resumed = train(tmp_path / "resumed")
    for name in ("model.safetensors", "offramp.safetensors"):
        assert (resumed / name).read_bytes() == (uninterrupted / name).read_bytes()
    exit_head = offramp.load(uninterrupted).network.exit_heads[0]
    assert isinstance(exit_head, FittedBagOfWordsExit) and bool(exit_head.words.any())
