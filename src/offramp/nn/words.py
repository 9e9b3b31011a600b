"""Words of packed tokens, and a table of how deep each word goes.

A word is known by its pieces (token ids), so a table needs no text, no tokenizer and no pickles: it is a few tensors.
Looking words up costs one hash of the pieces and one binary search for the whole batch.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offramp.core.columns import ID, POSITION, WORD
from offramp.core.packed import Packed

HASH_BASE = 6364136223846793005  # an odd multiplier: pieces of a word are digits of a number in this base, modulo 2⁶⁴
LONGEST_WORD = 1024  # pieces of one word


class Words(NamedTuple):
    """The words of a packed batch in order; special tokens belong to none."""

    key: Tensor  # [words] what words are told apart by
    of_token: Tensor  # [tokens] index of a token's word; −1 for special tokens
    row: Tensor  # [words]
    first: Tensor  # [words] index of the word's first token
    size: Tensor  # [words] pieces


def words_of(packed: Packed) -> Words:
    """Which tokens make which words; needs the columns `id` and `word`."""
    ids, word, row = packed.tokens[ID], packed.tokens[WORD], packed.row_of_token
    before = torch.cat((word.new_full((1,), -1), word[:-1]))
    begins = (word >= 0) & ((word != before) | (packed.tokens[POSITION] == 0))
    first = begins.nonzero().squeeze(1)
    of_token = torch.where(word >= 0, begins.long().cumsum(0) - 1, -1)
    mine = (word >= 0).nonzero().squeeze(1)
    owner = of_token[mine]
    digit = (ids[mine] + 1) * _powers(ids.device)[(mine - first[owner]).clamp(max=LONGEST_WORD - 1)]
    key = ids.new_zeros(len(first)).index_add(0, owner, digit)  # wraps around, as meant
    return Words(key, of_token, row[first], first, torch.bincount(owner, minlength=len(first)))


@cache
def _powers(device: torch.device) -> Tensor:
    """Powers of SPREAD modulo 2⁶⁴, the first 1."""  # [LONGEST]
    base = np.full(LONGEST_WORD, HASH_BASE, dtype=np.uint64)
    base[0] = 1
    return torch.from_numpy(np.cumprod(base, dtype=np.uint64).view(np.int64)).to(device)


def token_and_row_depths(words: Words, depth: Tensor, packed: Packed, alone: int) -> tuple[Tensor, Tensor]:
    """Word depths → token depths and row maxima. Pieces share their word's depth, special tokens their row's largest;
    a row without words goes as deep as `alone`."""  # [tokens], [rows]
    deepest = depth.new_zeros(packed.count).scatter_reduce(0, words.row, depth, "amax")
    deepest = torch.where(deepest == 0, alone, deepest)
    of_token = torch.cat((depth, depth.new_zeros(1)))[words.of_token]  # −1 reads the filler
    return torch.where(words.of_token >= 0, of_token, deepest[packed.row_of_token]), deepest
