"""Token ids, word indices, offsets and cut counts, for a tokenizer like BERT's and one like RoBERTa's."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.data.tokenization import encode_text_windows, encode_texts, encode_windows, encode_words, max_tokens
from offramp.errors import OfframpError
from tests.factories import bytelevel_tokenizer, wordpiece_tokenizer

BOTH = [wordpiece_tokenizer, bytelevel_tokenizer]
CONTEXT = "the man lives in paris and the woman is not in paris . who saw it ? a film is very good ."


def tokenizer_ids(tokenizer: Any, *texts: str, **options: Any) -> list[int]:
    ids: list[int] = tokenizer(*texts, **options)["input_ids"]
    return ids


@pytest.mark.parametrize("make", BOTH)
def test_encode_texts_equals_the_tokenizer(make: Any) -> None:
    tokenizer = make()
    texts = ["the film is good", "unable", "the film is good . " * 9]
    found = encode_texts(tokenizer, texts, None, 12)
    assert [row.ids for row in found] == [tokenizer_ids(tokenizer, t, truncation=True, max_length=12) for t in texts]
    assert [row.cut for row in found] == [max(0, len(tokenizer_ids(tokenizer, t)) - 12) for t in texts]
    assert found[2].cut > 0 and [row.example for row in found] == [0, 1, 2]
    assert all(len(row.ids) == len(row.types) == len(row.words) and not any(row.types) for row in found)
    assert all(row.words[0] == row.words[-1] == -1 and min(row.words[1:-1]) == 0 for row in found)


def test_pairs_have_types_and_continuous_words() -> None:
    (row,) = encode_texts(wordpiece_tokenizer(), ["the films"], ["not bad"], 16)
    assert wordpiece_tokenizer().convert_ids_to_tokens(row.ids) == [
        "[CLS]",
        "the",
        "film",
        "##s",
        "[SEP]",
        "not",
        "bad",
        "[SEP]",
    ]
    assert row.types == [0, 0, 0, 0, 0, 1, 1, 1]
    assert row.words == [-1, 0, 1, 1, -1, 2, 3, -1] and row.cut == 0 and row.offsets == []


@pytest.mark.parametrize("make", BOTH)
def test_the_longer_text_of_a_pair_is_cut_first(make: Any) -> None:
    tokenizer, short, long = make(), "the film", "is not very good and it is a bad film . " * 4
    (row,) = encode_texts(tokenizer, [short], [long], 14)
    assert row.ids == tokenizer_ids(tokenizer, short, long, truncation="longest_first", max_length=14)
    assert len(row.ids) == 14 and row.cut == len(tokenizer_ids(tokenizer, short, long)) - 14
    head = tokenizer_ids(tokenizer, short)
    assert row.ids[: len(head)] == head


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("side", ["right", "left"])
@given(st.integers(0, 12), st.integers(0, 12), st.integers(5, 14))
def test_cut_rows_and_pairs_equal_those_of_the_tokenizer(
    make: Any, side: str, first: int, second: int, longest: int
) -> None:
    tokenizer = copy.deepcopy(make())  # the factory keeps one
    tokenizer.truncation_side = side
    short, long = " ".join(["unable", "film"] * first), " ".join(["good", "films"] * second)
    for pairs in (None, [long]):
        whole = tokenizer([short], pairs)
        (found,) = encode_texts(tokenizer, [short], pairs, longest)
        wanted = tokenizer([short], pairs, truncation="longest_first", max_length=longest).encodings[0]
        assert found.ids == wanted.ids and found.cut == max(0, len(whole["input_ids"][0]) - longest)
        assert len(found.types) == len(found.words) == len(wanted.ids)
        if pairs is None:
            assert found.words == [-1 if word is None else word for word in wanted.word_ids]


@pytest.mark.parametrize("make", BOTH)
def test_rows_do_not_depend_on_the_truncation_and_padding_that_a_tokenizer_was_left_with(make: Any) -> None:
    tokenizer, texts = make(), ["the film is good", "unable"]
    expected = encode_texts(tokenizer, texts, None, 32)
    tokenizer(texts, truncation=True, max_length=3, padding="max_length")
    assert encode_texts(tokenizer, texts, None, 32) == expected


def test_tokenizers_without_types_get_zeros() -> None:
    (row,) = encode_texts(bytelevel_tokenizer(), ["the film"], ["not bad"], 32)
    assert row.types == [0] * len(row.ids)


@pytest.mark.parametrize("make", BOTH)
def test_no_texts_give_no_rows(make: Any) -> None:
    assert (
        encode_texts(make(), [], None, 8) == encode_words(make(), [], 8) == encode_windows(make(), [], [], 32, 4) == []
    )


@pytest.mark.parametrize("make", BOTH)
def test_encode_words_equals_running_text(make: Any) -> None:
    tokenizer, words = make(), ["a", "film", "is", "very", "good"]
    (row,) = encode_words(tokenizer, [words], 40)
    leading = " " if make is bytelevel_tokenizer else ""
    assert row.ids == tokenizer_ids(tokenizer, leading + " ".join(words))
    assert sorted({word for word in row.words if word >= 0}) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("make", BOTH)
def test_encode_words_with_several_no_and_truncated_tokens(make: Any) -> None:
    tokenizer = make()
    rows = encode_words(tokenizer, [["unable", "films"], ["the"] * 30], 10)
    assert rows[0].words == [*sorted(rows[0].words[:-1]), -1] and set(rows[0].words) == {-1, 0, 1}
    assert len(rows[1].ids) == 10 and rows[1].words[1:-1] == list(range(8)) and rows[1].cut == 22
    (gap,) = encode_words(wordpiece_tokenizer(), [["the", "\u0000", "film"]], 10)
    assert gap.words == [-1, 0, 2, -1]


@pytest.mark.parametrize("make", BOTH)
def test_windows_cover_the_context_and_offsets_point_into_it(make: Any) -> None:
    tokenizer, question = make(), "who lives in paris ?"
    windows = encode_windows(tokenizer, ["what ?", question], ["a film .", CONTEXT], 24, 4)
    assert [w.example for w in windows][:2] == [0, 1] and len(windows) > 2
    covered: set[int] = set()
    for window in windows[1:]:
        assert len(window.ids) <= 24 and window.cut == 0
        head = tokenizer_ids(tokenizer, question)
        assert window.ids[: len(head)] == head and all(word == -1 for word in window.words[: len(head)])
        for token, word, (start, end) in zip(window.ids, window.words, window.offsets, strict=True):
            if word >= 0:
                assert tokenizer.decode([token]).strip().removeprefix("##") == CONTEXT[start:end].strip()
                covered.update(range(start, end))
    assert {place for place, letter in enumerate(CONTEXT) if letter != " "} <= covered
    first, second = ([o for o, w in zip(x.offsets, x.words, strict=True) if w >= 0] for x in windows[1:3])
    assert len(set(first) & set(second)) == 4


@pytest.mark.parametrize("make", BOTH)
def test_windows_do_not_depend_on_other_rows(make: Any) -> None:
    tokenizer, long = make(), "what is it and who saw it ? " * 40
    alone = encode_windows(tokenizer, ["who ?"], [CONTEXT], 24, 100)
    together = encode_windows(tokenizer, ["who ?", long], [CONTEXT, CONTEXT], 24, 100)
    assert together[: len(alone)] == alone
    assert all(len(w.ids) <= 24 and max(w.words) >= 0 for w in together)
    lost = (
        len(tokenizer_ids(tokenizer, long, add_special_tokens=False))
        - (24 - tokenizer.num_special_tokens_to_add(True)) // 2
    )
    assert together[-1].cut == lost > 0


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("side", ["right", "left"])
@given(st.integers(0, 60), st.integers(16, 28), st.integers(0, 12))
def test_windows_equal_those_of_the_tokenizer(make: Any, side: str, words: int, longest: int, stride: int) -> None:
    tokenizer = copy.deepcopy(make())  # the factory keeps one
    tokenizer.truncation_side = side
    question, context = "what ?", " ".join((CONTEXT * 3).split()[:words])
    shared = {"max_length": longest, "return_overflowing_tokens": True}
    room = longest - tokenizer.num_special_tokens_to_add(pair=True)
    found = encode_windows(copy.deepcopy(tokenizer), [question], [context], longest, stride)
    overlap = min(stride, (room - room // 2) // 2)
    wanted = tokenizer([question], [context], truncation="only_second", stride=overlap, **shared).encodings
    assert [row.ids for row in found] == [one.ids for one in wanted]
    for row, one in zip(found, wanted, strict=True):
        inside = [side == 1 for side in one.sequence_ids]
        assert row.offsets == [o if is_in else (0, 0) for o, is_in in zip(one.offsets, inside, strict=True)]
        assert row.words == [w if is_in else -1 for w, is_in in zip(one.word_ids, inside, strict=True)]
        assert row.types == (one.type_ids if make is wordpiece_tokenizer else [0] * len(one.ids))
    alone = encode_text_windows(copy.deepcopy(tokenizer), [context], longest)
    overlap = (longest - tokenizer.num_special_tokens_to_add()) // 4
    texts = tokenizer([context], truncation=True, stride=overlap, **shared).encodings
    assert [row.ids for row in alone] == [one.ids for one in texts]
    assert [row.words for row in alone] == [[-1 if w is None else w for w in one.word_ids] for one in texts]


@pytest.mark.parametrize("make", BOTH)
def test_threads_that_share_a_tokenizer_get_the_rows_that_they_get_alone(make: Any) -> None:
    tokenizer, texts = copy.deepcopy(make()), [CONTEXT * 3, "the film is good"] * 8

    def encode(kind: int) -> list[Any]:
        if kind == 0:
            return encode_texts(tokenizer, texts, None, 24)
        if kind == 1:
            return encode_text_windows(tokenizer, texts, 24)
        return encode_windows(tokenizer, ["who saw it ? " * 9] * len(texts), texts, 24, 6)

    alone = [encode(kind) for kind in range(3)]
    assert tokenizer.backend_tokenizer.truncation is None, "nothing of it changes"
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(encode, [0, 1, 2] * 60)) == alone * 60


@given(st.lists(st.text(max_size=40), min_size=1, max_size=4), st.integers(8, 20))
def test_rows_of_any_text_keep_the_length_limit_alone_and_together(texts: list[str], longest: int) -> None:
    for make in BOTH:
        together = encode_texts(make(), texts, texts[::-1], longest)
        for index, row in enumerate(together):
            assert len(row.ids) <= longest and len(row.ids) == len(row.words)
            (alone,) = encode_texts(make(), [texts[index]], [texts[::-1][index]], longest)
            assert (alone.ids, alone.words, alone.cut) == (row.ids, row.words, row.cut)
        for window in encode_windows(make(), texts, texts[::-1], longest, 3):
            assert len(window.ids) <= longest


def test_max_tokens_is_bounded_by_model_and_special_tokens() -> None:
    tokenizer = wordpiece_tokenizer()
    assert [max_tokens(tokenizer, 512, requested) for requested in (None, 128, 999)] == [512, 128, 512]
    with pytest.raises(OfframpError, match="5 or more"):
        max_tokens(tokenizer, 512, 4)
