"""Tokenizers learned from texts: the same texts give the same vocabulary, in every process."""

from __future__ import annotations

import pytest

from offramp.data.tokenizer_training import WORDPIECE_SPECIAL, train_bpe_tokenizer, train_wordpiece_tokenizer
from offramp.errors import OfframpError

TEXTS = [" ".join(f"{start}{middle}{end}" for middle in "aeiou" for end in "bdfgklmnprst") for start in "hjvwz"]


def test_the_same_texts_give_the_same_wordpiece_vocabulary() -> None:
    """Ties between merges must not be broken by chance: several processes each learn the vocabulary for themselves."""
    first, *others = [train_wordpiece_tokenizer(TEXTS, 120).get_vocab() for _ in range(6)]
    assert all(other == first for other in others)
    assert len(first) == 120


def test_the_same_texts_give_the_same_bpe_vocabulary() -> None:
    first, *others = [train_bpe_tokenizer(TEXTS, 330).get_vocab() for _ in range(4)]
    assert all(other == first for other in others)


def test_wordpiece_encodes_pairs_and_unknown_letters() -> None:
    tokenizer = train_wordpiece_tokenizer(iter(TEXTS), 120)
    encoded = tokenizer("Hab", "jeb §")
    pieces = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert pieces[0] == "[CLS]" and pieces.count("[SEP]") == 2 and pieces[-2] == "[UNK]"
    assert set(encoded["token_type_ids"]) == {0, 1}
    assert [tokenizer.convert_tokens_to_ids(piece) for piece in WORDPIECE_SPECIAL.values()] == [0, 1, 2, 3, 4]
    assert tokenizer.pad_token_id == 0
    assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True).startswith("hab jeb")
    assert tokenizer.all_special_tokens == list(dict.fromkeys(tokenizer.all_special_tokens))
    assert len(tokenizer.all_special_tokens) == 5, "pieces within words are no special tokens"


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    with pytest.raises(OfframpError, match="ask for 100 or more"):
        train_wordpiece_tokenizer(TEXTS, 20)
