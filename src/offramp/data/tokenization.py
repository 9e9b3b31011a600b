"""From texts to token ids, as lists of `Encoded`, never padded.

The result of a row depends on that row and the maximum length alone, never on the other rows of the call.
Tokenizers are those of transformers 5, all backed by the Rust library `tokenizers`. They encode rows whole, and rows
are cut here: a call of transformers would set the truncation of the tokenizer, which threads share.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from offramp.errors import OfframpError

if TYPE_CHECKING:
    from typing import TypeAlias

    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    Tokenizer: TypeAlias = PreTrainedTokenizerBase

_CONFIGURING = threading.Lock()  # a tokenizer that is configured while another thread encodes raises an error
LONGEST_QUESTION = 64  # tokens, as in the SQuAD scripts of BERT; the rest of a window is for the context


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row (or window of a row) as token ids."""

    ids: list[int]
    types: list[int]  # token_type_ids; zeros for tokenizers that have none
    example: int  # index of the input row
    words: list[int]  # index of the word, through both texts of a pair; -1 for special tokens; see encode_windows
    offsets: list[tuple[int, int]]  # characters of the context, for windows only
    cut: int  # tokens that truncation removed
    target: tuple[int, ...] = ()  # ids of the translation, for tasks that generate one


def max_tokens(tokenizer: Tokenizer, config_max: int, requested: int | None) -> int:
    """Return the length limit of a row in tokens: as requested, within what the model and its tokenizer allow."""
    most = min(config_max, tokenizer.model_max_length)
    least = tokenizer.num_special_tokens_to_add(pair=True) + 2  # a pair with one token each
    if requested is not None and requested < least:
        raise OfframpError(
            f"rows of at most {requested} tokens", f"{least - 2} of them are special tokens", f"ask for {least} or more"
        )
    if requested is not None and requested > most:
        warnings.warn(
            f"the model takes rows of {most} tokens, not {requested}: longer ones are cut there", stacklevel=2
        )
    return most if requested is None else min(requested, most)


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int
) -> list[Encoded]:
    """Encode single texts, or pairs, of which the longer text is cut first."""
    return _encode(tokenizer, list(texts), None if pairs is None else list(pairs), max_length)


def encode_text_windows(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> list[Encoded]:
    """Encode texts whole: those that are too long in windows, which overlap by a quarter, with the same `example`."""
    if not texts:
        return []
    overlap = (max_length - tokenizer.num_special_tokens_to_add()) // 4
    typed, side = "token_type_ids" in tokenizer.model_input_names, tokenizer.truncation_side
    windows: list[Encoded] = []
    for example, encoding in enumerate(_whole(tokenizer, list(texts))):
        row = _row(encoding, example, typed, False)
        places = _window_places(encoding.sequence_ids, 0, max_length, overlap, side)
        windows += [_piece(row, kept) for kept in places]
    return windows


def encode_words(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], max_length: int) -> list[Encoded]:
    """Encode sentences that are already split into words; `words` is the word of each token.

    A word without tokens (for example a lone control character) does not occur in `words`, nor do words that were cut.
    """
    space = " " if _spaces_matter(tokenizer) else ""
    spaced = [[space + word for word in sentence] for sentence in sentences]
    return _encode(tokenizer, spaced, None, max_length, split=True)


def encode_windows(
    tokenizer: Tokenizer, questions: Sequence[str], contexts: Sequence[str], max_length: int, stride: int
) -> list[Encoded]:
    """Encode questions and contexts, the context in windows that overlap by `stride` tokens: nothing of it is cut.

    `words` is 0 or more for tokens of the context, the candidates for an answer, and -1 elsewhere. Questions are cut
    to at most half the row (`cut` counts that), and the overlap to half of what is then left for the context.
    """
    if not questions:
        return []
    room = max_length - tokenizer.num_special_tokens_to_add(pair=True)
    longest = min(LONGEST_QUESTION, room // 2)
    heads, cuts = _shorten(tokenizer, questions, longest)
    overlap = min(stride, (room - longest) // 2)
    typed, side = "token_type_ids" in tokenizer.model_input_names, tokenizer.truncation_side
    windows: list[Encoded] = []
    for example, encoding in enumerate(_whole(tokenizer, list(zip(heads, contexts, strict=True)))):
        row = _question_row(encoding, example, typed, cuts[example])
        places = _window_places(encoding.sequence_ids, 1, max_length, overlap, side)
        windows += [_piece(row, kept) for kept in places]
    return windows


def _encode(
    tokenizer: Tokenizer, first: list[Any], second: list[str] | None, max_length: int, split: bool = False
) -> list[Encoded]:
    """Encode all rows in one call of the Rust library, then cut rows that are too long."""
    if not first:
        return []
    encodings = _whole(tokenizer, first if second is None else list(zip(first, second, strict=True)), split)
    typed = "token_type_ids" in tokenizer.model_input_names
    pair, side = second is not None, tokenizer.truncation_side
    return [_row(encoding, i, typed, pair, max_length, side) for i, encoding in enumerate(encodings)]


def _whole(tokenizer: Tokenizer, inputs: list[Any], split: bool = False, special: bool = True) -> list[Any]:
    """Return the encodings of texts, pairs or words, uncut; a tokenizer that cuts or pads does so no longer."""
    rust = cast("PreTrainedTokenizerFast", tokenizer).backend_tokenizer
    with _CONFIGURING:
        if rust.truncation is not None:  # as stored in its file
            rust.no_truncation()
        if rust.padding is not None:
            rust.no_padding()
    encodings: list[Any] = rust.encode_batch(inputs, split, special)
    return encodings


def _row(
    encoding: Any, example: int, typed: bool, pair: bool, max_length: int | None = None, truncation_side: str = "right"
) -> Encoded:
    """Return one row, cut to `max_length` tokens where that is given."""
    ids, types = encoding.ids, encoding.type_ids if typed else [0] * len(encoding)
    words = [-1 if word is None else word for word in encoding.word_ids]
    cut = 0 if max_length is None else max(0, len(ids) - max_length)
    sides = encoding.sequence_ids if pair or cut else []
    if cut:
        kept = _kept_places(sides, len(ids) - cut, truncation_side)
        ids, types, words, sides = ([column[place] for place in kept] for column in (ids, types, words, sides))
    if pair:
        shift = 1 + max((word for word, side in zip(words, sides, strict=True) if side == 0), default=-1)
        words = [word + shift if side == 1 else word for word, side in zip(words, sides, strict=True)]
    return Encoded(ids, types, example, words, [], cut)


def _kept_places(sides: Sequence[int | None], count: int, truncation_side: str) -> list[int]:
    """Return the places of tokens that stay: special tokens always; the longer text of a pair is cut first."""
    places: tuple[list[int], list[int]] = ([], [])
    for place, side in enumerate(sides):
        if side is not None:
            places[side].append(place)
    kept = [place for place, side in enumerate(sides) if side is None]
    room = count - len(kept)
    short, long = sorted(places, key=len)
    of_short = min(len(short), room // 2)
    for own, share in ((short, of_short), (long, room - of_short)):
        kept += own[len(own) - share :] if truncation_side == "left" else own[:share]
    return sorted(kept)


def _question_row(encoding: Any, example: int, typed: bool, cut: int) -> Encoded:
    """Return a whole question and context; words and offsets are those of the context."""
    ids = encoding.ids
    inside = [side == 1 for side in encoding.sequence_ids]
    words = [word if is_in else -1 for word, is_in in zip(encoding.word_ids, inside, strict=True)]
    offsets = [pair if is_in else (0, 0) for pair, is_in in zip(encoding.offsets, inside, strict=True)]
    return Encoded(ids, encoding.type_ids if typed else [0] * len(ids), example, words, offsets, cut)


def _window_places(
    sides: Sequence[int | None], cut_side: int, max_length: int, overlap: int, truncation_side: str
) -> Iterator[list[int]]:
    """Yield the places of tokens of each window: all, save that of one text only a piece of the length that is left.

    Pieces overlap; they begin at the end of the text if the tokenizer cuts on the left, as those of `tokenizers` do.
    """
    if len(sides) <= max_length:
        yield list(range(len(sides)))
        return
    cut = [place for place, side in enumerate(sides) if side == cut_side]
    others = [place for place, side in enumerate(sides) if side != cut_side]
    room = max_length - len(others)
    for begin in range(0, len(cut), room - overlap):
        end = min(begin + room, len(cut))
        piece = cut[begin:end] if truncation_side == "right" else cut[len(cut) - end : len(cut) - begin]
        yield sorted([*others, *piece])
        if end == len(cut):
            return


def _piece(row: Encoded, kept: Sequence[int]) -> Encoded:
    """Return a row with the tokens at some places."""
    if len(kept) == len(row.ids):
        return row
    ids, types, words = ([column[place] for place in kept] for column in (row.ids, row.types, row.words))
    return Encoded(
        ids, types, row.example, words, [row.offsets[place] for place in kept] if row.offsets else [], row.cut
    )


def _shorten(tokenizer: Tokenizer, texts: Iterable[str], longest: int) -> tuple[list[str], list[int]]:
    """Return texts cut to a number of tokens, and how many tokens each lost.

    The beginning of a text may have more tokens alone than within the text, hence the loop; each turn cuts further.
    """
    heads, before = list(texts), None
    while True:
        encodings = _whole(tokenizer, heads, special=False)
        counts = [len(encoding) for encoding in encodings]
        before = before or counts
        if max(counts) <= longest:
            return heads, [full - count for full, count in zip(before, counts, strict=True)]
        for row, encoding in enumerate(encodings):
            if counts[row] > longest:
                place, size = encoding.offsets[longest][0], len(heads[row])
                heads[row] = heads[row][: place if place < size else size // 2].rstrip()  # offsets leave spaces out


def _spaces_matter(tokenizer: Tokenizer) -> bool:
    """Return whether a first word and the same word after a space differ (byte-level BPE of RoBERTa, ModernBERT).

    Split words reach such a tokenizer without their spaces and would all look like continuations of one another.
    """
    splitter = cast("PreTrainedTokenizerFast", tokenizer).backend_tokenizer.pre_tokenizer
    if splitter is None:
        return False
    pieces = splitter.pre_tokenize_str("x x")
    return len(pieces) == 2 and pieces[0][0] != pieces[1][0]
