"""The table of how deep each word goes."""

from __future__ import annotations

import pytest
import torch

from offramp.methods.faster_dat.word_depths import (
    WordDepths,
    depth_table,
    interpolate_depths,
    mean_by_word,
    select_occurrences,
    vocabulary,
)
from offramp.nn.words import words_of
from tests.nn.test_words import pack_words


def test_word_depths_look_up_known_and_unseen_words() -> None:
    packed = pack_words()
    words, found = words_of(packed), vocabulary(words_of(packed))
    depth = {(10, 11): 1.0, (10,): 3.0, (12,): 2.0}
    pieces = [tuple(packed.tokens["id"][f : f + n].tolist()) for f, n in zip(found.first, found.size, strict=True)]
    table = depth_table(packed.tokens["id"], found, torch.tensor([[depth[word]] for word in pieces]), torch.zeros(1), 0)
    assert table["unseen"].tolist() == [2.0] and table["counts"].sum().item() == 5
    depths = WordDepths(6)
    assert depths.look_up(words, 0.0).tolist() == [6] * 5  # empty: every word is unseen and goes through all layers
    depths.fill(table)
    assert depths.look_up(words, 0.0).tolist() == [1, 3, 2, 1, 2]
    other = pack_words([[10, 99, 10]], [[0, 1, 2]])
    assert depths.look_up(words_of(other), 0.0).tolist() == [3, 2, 3]  # 99 is unseen: the median


def test_word_depths_are_saved_and_take_the_size_of_what_is_loaded() -> None:
    packed = pack_words()
    words, found = words_of(packed), vocabulary(words_of(packed))
    depths, loaded = WordDepths(4), WordDepths(4)
    depths.fill(depth_table(packed.tokens["id"], found, torch.rand(3, 2) * 4, torch.tensor([0.0, 1.0]), 3))
    loaded.load_state_dict(depths.state_dict())
    for penalty in (0.0, 0.3, 1.0):
        assert torch.equal(loaded.look_up(words, penalty), depths.look_up(words, penalty))


@pytest.mark.parametrize(("penalty", "expected"), [(0.0, 6), (0.1, 4), (0.15, 3), (0.125, 4), (0.2, 2), (9.0, 2)])
def test_depths_at_interpolates_between_penalties(penalty: float, expected: int) -> None:
    assert interpolate_depths(torch.tensor([[6.0, 4.0, 2.0]]), torch.tensor([0.0, 0.1, 0.2]), penalty).tolist() == [
        expected
    ]


def test_mean_by_word_averages_the_chosen_occurrences() -> None:
    found = vocabulary(words_of(pack_words()))
    depths = torch.tensor([[1.0], [5.0], [2.0], [4.0], [6.0]])
    mean = mean_by_word(found, depths, select_occurrences(found, 0))
    assert mean[found.which[0]].item() == 2.5  # "10 11" has 1 and 4
    assert mean[found.which[2]].item() == 4.0 and mean[found.which[1]].item() == 5.0
    first = mean_by_word(found, depths, torch.tensor([True, True, True, False, False]))
    assert first[found.which[0]].item() == 1.0 and first[found.which[2]].item() == 2.0


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_some_occurrences_of_frequent_words_are_spread_over_the_text(most: int) -> None:
    torch.manual_seed(0)
    ids = (torch.rand(400) ** 4 * 40).long()  # a few words often, many seldom
    found = vocabulary(words_of(pack_words([ids.tolist()], [list(range(400))])))
    frequent = found.only(found.times > 1)
    chosen = select_occurrences(frequent, most)
    counts = torch.bincount(frequent.which[chosen], minlength=len(frequent.times))
    assert torch.equal(counts, frequent.times.clamp(max=most))
    assert not bool(chosen[frequent.which < 0].any())
    assert torch.equal(select_occurrences(frequent, 0), frequent.which >= 0)
    most_frequent = (found.which == found.times.argmax()).nonzero().squeeze(1)
    gaps = select_occurrences(found, most)[most_frequent].nonzero().squeeze(1).diff()
    assert not len(gaps) or int(gaps.max() - gaps.min()) <= 1  # evenly
