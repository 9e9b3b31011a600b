"""Words of packed tokens and the table of their depths."""

from __future__ import annotations

import pytest
import torch

from offramp.core.packed import Packed, pack
from offramp.methods.faster_dat.word_depths import (
    WordDepths,
    depth_table,
    depths_at,
    mean_by_word,
    some_occurrences,
    vocabulary,
)
from offramp.nn.words import token_and_row_depths, words_of

IDS = [[2, 10, 11, 10, 3], [2, 12, 3], [10, 11, 12], [2, 3]]
WORDS = [[-1, 0, 0, 1, -1], [-1, 0, -1], [0, 0, 1], [-1, -1]]  # the third row has no special tokens, the last no words


def batch(ids: list[list[int]] = IDS, words: list[list[int]] = WORDS) -> Packed:
    return pack(ids).with_tokens(word=torch.tensor([word for row in words for word in row]))


def test_words_are_told_apart_by_their_pieces() -> None:
    words = words_of(batch())
    assert words.of_token.tolist() == [-1, 0, 0, 1, -1, -1, 2, -1, 3, 3, 4, -1, -1]
    assert words.row.tolist() == [0, 0, 1, 2, 2] and words.size.tolist() == [2, 1, 1, 2, 1]
    assert words.first.tolist() == [1, 3, 6, 8, 10]
    same = words.key[:, None] == words.key[None, :]
    assert same.sum().item() == 5 + 4  # "10 11" twice, "12" twice, "10" once, each counted in both directions


def test_keys_differ_among_all_short_words() -> None:
    """Pieces in another order, pieces that are prefixes: 30 + 30² words, none alike."""
    tuples = [[a] for a in range(30)] + [[a, b] for a in range(30) for b in range(30)]
    packed = batch(tuples, [[0] * len(word) for word in tuples])
    assert words_of(packed).key.unique().numel() == len(tuples)


def test_keys_tell_long_words_by_every_piece() -> None:
    """All beginnings of a long word, and the word with any one piece changed."""
    long = [7 + place % 5 for place in range(200)]
    tuples = [long[:n] for n in range(1, 201)] + [[*long[:n], 99, *long[n + 1 :]] for n in range(200)]
    packed = batch(tuples, [[0] * len(word) for word in tuples])
    assert words_of(packed).key.unique().numel() == len(tuples)


def test_a_table_gives_words_their_depth_pieces_their_words_and_special_tokens_the_rows() -> None:
    packed = batch()
    found = vocabulary(words_of(packed))
    depth = {(10, 11): 1.0, (10,): 3.0, (12,): 2.0}
    pieces = [tuple(packed.tokens["id"][f : f + n].tolist()) for f, n in zip(found.first, found.size, strict=True)]
    made = depth_table(packed.tokens["id"], found, torch.tensor([[depth[word]] for word in pieces]), torch.zeros(1), 0)
    assert made["unseen"].tolist() == [2.0] and made["counts"].sum().item() == 5
    depths = WordDepths(6)
    assert depths.look_up(words_of(packed), 0.0).tolist() == [6] * 5  # empty: everything is unseen and unlimited
    depths.fill(made)
    words = words_of(packed)
    assert depths.look_up(words, 0.0).tolist() == [1, 3, 2, 1, 2]
    tokens, rows = token_and_row_depths(words, depths.look_up(words, 0.0), packed, without_words=6)
    assert tokens.tolist() == [3, 1, 1, 3, 3, 2, 2, 2, 1, 1, 2, 6, 6]
    assert rows.tolist() == [3, 2, 2, 6]
    other = batch([[10, 99, 10]], [[0, 1, 2]])
    assert depths.look_up(words_of(other), 0.0).tolist() == [3, 2, 3]  # 99 was never seen: the median


def test_a_table_survives_saving_and_takes_the_size_of_what_is_loaded() -> None:
    packed = batch()
    found = vocabulary(words_of(packed))
    depths = WordDepths(4)
    made = depth_table(packed.tokens["id"], found, torch.rand(3, 2) * 4, torch.tensor([0.0, 1.0]), 3)
    depths.fill(made)
    fresh = WordDepths(4)
    fresh.load_state_dict(depths.state_dict())
    for penalty in (0.0, 0.3, 1.0):
        assert torch.equal(fresh.look_up(words_of(packed), penalty), depths.look_up(words_of(packed), penalty))


@pytest.mark.parametrize(("penalty", "wanted"), [(0.0, 6), (0.1, 4), (0.15, 3), (0.125, 4), (0.2, 2), (9.0, 2)])
def test_depths_between_penalties_are_interpolated(penalty: float, wanted: int) -> None:
    assert depths_at(torch.tensor([[6.0, 4.0, 2.0]]), torch.tensor([0.0, 0.1, 0.2]), penalty).tolist() == [wanted]


def test_depths_of_occurrences_are_averaged_by_word() -> None:
    found = vocabulary(words_of(batch()))
    each = torch.tensor([[1.0], [5.0], [2.0], [4.0], [6.0]])
    mean = {(2,): 2.5}  # pieces → mean: "10 11" has 1 and 4
    made = mean_by_word(found, each, some_occurrences(found, 0))
    assert made[found.which[0]].item() == mean[(2,)]
    assert made[found.which[2]].item() == 4.0 and made[found.which[1]].item() == 5.0
    first = mean_by_word(found, each, torch.tensor([True, True, True, False, False]))  # only those looked at count
    assert first[found.which[0]].item() == 1.0 and first[found.which[2]].item() == 2.0


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_frequent_words_are_looked_at_a_few_times_all_over_the_text(most: int) -> None:
    torch.manual_seed(0)
    ids = (torch.rand(400) ** 4 * 40).long()  # a few words often, many seldom
    words = words_of(batch([ids.tolist()], [list(range(400))]))
    found = vocabulary(words)
    frequent = found.only(found.times > 1)
    some = some_occurrences(frequent, most)
    looked = torch.bincount(frequent.which[some], minlength=len(frequent.times))
    assert torch.equal(looked, frequent.times.clamp(max=most))
    assert not bool(some[frequent.which < 0].any())
    assert torch.equal(some_occurrences(frequent, 0), frequent.which >= 0)
    often = (found.which == found.times.argmax()).nonzero().squeeze(1)
    gaps = some_occurrences(found, most)[often].nonzero().squeeze(1).diff()
    assert not len(gaps) or int(gaps.max() - gaps.min()) <= 1  # evenly
