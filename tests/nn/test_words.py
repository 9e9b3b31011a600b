"""Words of packed tokens."""

from __future__ import annotations

import torch

from offramp.core.packed import Packed, pack
from offramp.nn.words import token_and_row_depths, words_of

IDS = [[2, 10, 11, 10, 3], [2, 12, 3], [10, 11, 12], [2, 3]]
WORDS = [[-1, 0, 0, 1, -1], [-1, 0, -1], [0, 0, 1], [-1, -1]]  # the third row has no special tokens, the last no words


def pack_words(ids: list[list[int]] = IDS, words: list[list[int]] = WORDS) -> Packed:
    return pack(ids).with_tokens(word=torch.tensor([word for row in words for word in row]))


def test_words_of_finds_rows_pieces_and_equal_words() -> None:
    words = words_of(pack_words())
    assert words.of_token.tolist() == [-1, 0, 0, 1, -1, -1, 2, -1, 3, 3, 4, -1, -1]
    assert words.row.tolist() == [0, 0, 1, 2, 2] and words.size.tolist() == [2, 1, 1, 2, 1]
    assert words.first.tolist() == [1, 3, 6, 8, 10]
    equal = words.key[:, None] == words.key[None, :]
    assert equal.sum().item() == 5 + 4  # "10 11" twice, "12" twice, "10" once, each counted in both directions


def test_words_of_gives_all_short_words_different_keys() -> None:
    """Pieces in another order, pieces that are prefixes: 30 + 30² words, no two alike."""
    pieces = [[a] for a in range(30)] + [[a, b] for a in range(30) for b in range(30)]
    packed = pack_words(pieces, [[0] * len(word) for word in pieces])
    assert words_of(packed).key.unique().numel() == len(pieces)


def test_words_of_distinguishes_long_words_by_every_piece() -> None:
    """All beginnings of a long word, and the word with any one piece changed."""
    long = [7 + position % 5 for position in range(200)]
    pieces = [long[:n] for n in range(1, 201)] + [[*long[:n], 99, *long[n + 1 :]] for n in range(200)]
    packed = pack_words(pieces, [[0] * len(word) for word in pieces])
    assert words_of(packed).key.unique().numel() == len(pieces)


def test_token_and_row_depths_spreads_word_depths_over_pieces_and_special_tokens() -> None:
    packed = pack_words()
    tokens, rows = token_and_row_depths(words_of(packed), torch.tensor([1, 3, 2, 1, 2]), packed, without_words=6)
    assert tokens.tolist() == [3, 1, 1, 3, 3, 2, 2, 2, 1, 1, 2, 6, 6]
    assert rows.tolist() == [3, 2, 2, 6]
