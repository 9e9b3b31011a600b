"""The words of packed tokens. A word is identified by a hash of its pieces (token ids), without text or tokenizer."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offramp.core.columns import ID, POSITION, WORD
from offramp.core.packed import Packed

HASH_BASE = 6364136223846793005  # odd: the pieces of a word are digits of a number in this base, modulo 2⁶⁴
LONGEST_WORD = 1024  # in pieces


class Words(NamedTuple):
    """The words of a packed batch in order; special tokens belong to none."""

    key: Tensor  # [words] equal for equal words
    of_token: Tensor  # [tokens] index of a token's word; −1 for special tokens
    row: Tensor  # [words]
    first: Tensor  # [words] index of the word's first token
    size: Tensor  # [words] pieces


def words_of(packed: Packed) -> Words:
    """Return the words of the packed tokens; needs the columns `id` and `word`."""
    ids, word, row = packed.tokens[ID], packed.tokens[WORD], packed.row_of_token
    before = torch.cat((word.new_full((1,), -1), word[:-1]))
    begins = (word >= 0) & ((word != before) | (packed.tokens[POSITION] == 0))
    first = begins.nonzero().squeeze(1)
    of_token = torch.where(word >= 0, begins.long().cumsum(0) - 1, -1)
    pieces = (word >= 0).nonzero().squeeze(1)
    word_of_piece = of_token[pieces]
    digit = (ids[pieces] + 1) * _powers(ids.device)[(pieces - first[word_of_piece]).clamp(max=LONGEST_WORD - 1)]
    key = ids.new_zeros(len(first)).index_add(0, word_of_piece, digit)  # overflow wraps around, modulo 2⁶⁴
    return Words(key, of_token, row[first], first, torch.bincount(word_of_piece, minlength=len(first)))


@cache
def _powers(device: torch.device) -> Tensor:
    """Return the powers of HASH_BASE modulo 2⁶⁴, from power 0."""  # [LONGEST_WORD]
    base = np.full(LONGEST_WORD, HASH_BASE, dtype=np.uint64)
    base[0] = 1
    return torch.from_numpy(np.cumprod(base, dtype=np.uint64).view(np.int64)).to(device)


def token_and_row_depths(words: Words, depth: Tensor, packed: Packed, without_words: int) -> tuple[Tensor, Tensor]:
    """Return the depth of every token and the largest of every row, from the depths of words.

    Pieces have their word's depth, special tokens their row's largest; a row without words has depth `without_words`.
    """  # [tokens], [rows]
    deepest = depth.new_zeros(packed.count).scatter_reduce(0, words.row, depth, "amax")
    deepest = torch.where(deepest == 0, without_words, deepest)
    of_token = torch.cat((depth, depth.new_zeros(1)))[words.of_token]  # −1 reads the appended 0
    return torch.where(words.of_token >= 0, of_token, deepest[packed.row_of_token]), deepest
