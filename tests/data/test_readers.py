"""Rows from every format; errors name the file, the line and how to fix it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.data.readers import fingerprint, read_rows, require_columns, stream_rows
from offramp.errors import OfframpError

ROWS = [{"text": "a gem, really", "label": "good"}, {"text": 'he wrote "no"', "label": "bad"}]


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


FORMATS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "jsonl": as_jsonl,
    "json": lambda rows: json.dumps(rows).encode(),
    "csv": lambda rows: as_table(rows, ","),
    "tsv": lambda rows: as_table(rows, "\t"),
    "parquet": as_parquet,
}


def write(folder: Path, name: str, content: bytes) -> str:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(path)


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(OfframpError) as caught:
        read_rows(source, **options)
    return str(caught.value)


@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize("ending", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, ending: str, gz: str) -> None:
    source = write(tmp_path, f"train.{ending}{gz}", FORMATS[ending](ROWS))
    assert read_rows(source) == list(stream_rows(source)) == ROWS
    assert read_rows(source, limit=1) == ROWS[:1]
    assert read_rows(source, columns={"target": "label"})[1] == {"text": 'he wrote "no"', "target": "bad"}


def test_columns_may_be_swapped_and_replaced(tmp_path: Path) -> None:
    source = write(tmp_path, "a.jsonl", b'{"a": 1, "b": 2, "c": 3}\n')
    assert read_rows(source, columns={"a": "b", "b": "a"}) == [{"a": 2, "b": 1, "c": 3}]
    assert read_rows(source, columns={"a": "c"}) == [{"a": 3, "b": 2}]


def test_words_and_tags_are_split_in_tables_only(tmp_path: Path) -> None:
    table = write(tmp_path, "a.tsv", b"words\ttags\nEU rejects\tB-ORG O\n")
    assert read_rows(table, columns={"tokens": "words"}) == [{"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]}]
    lines = write(tmp_path, "a.jsonl", b'{"tokens": "EU rejects"}\n')
    assert read_rows(lines) == [{"tokens": "EU rejects"}]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"data": [{"paragraphs": [{"context": "c", "qas": ["a question"]}]}]}, "data[0].paragraphs[0].qas[0]"),
        ({"data": [{"paragraphs": [{"context": "c", "qas": [["q"]]}]}]}, "data[0].paragraphs[0].qas[0]"),
        (
            {"data": [{"paragraphs": []}, {"paragraphs": [{"context": "c", "qas": "abc"}]}]},
            "data[1].paragraphs[0].qas[0]",
        ),
        ({"data": [{"paragraphs": [{"context": "c", "qas": None}]}]}, "data[0].paragraphs[0]"),
        (
            {"data": [{"paragraphs": [{"qas": [{"question": "q"}]}]}]},
            "data[0].paragraphs[0].qas[0]: KeyError, 'context'",
        ),
        ({"data": [{"title": "t"}]}, "data[0]: KeyError, 'paragraphs'"),
        ({"version": 1}, "its top level: KeyError, 'data'"),
        ([1], "its top level"),
    ],
)
def test_squad_json_of_another_form_is_refused_with_its_place(tmp_path: Path, content: Any, place: str) -> None:
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(OfframpError) as refused:
        read_rows(str(path))
    assert f"something else at {place}" in str(refused.value)


def test_squad_json_gives_one_row_a_question(tmp_path: Path) -> None:
    answer = {"text": "Paris", "answer_start": 3}
    questions = [
        {"id": "1", "question": "Where?", "answers": [answer, answer]},
        {"id": "2", "question": "Who?", "answers": [], "is_impossible": True},
        {"id": "3", "question": "When?"},
    ]
    content = {"data": [{"paragraphs": [{"context": "In Paris.", "qas": questions}]}]}
    first, second, third = read_rows(write(tmp_path, "dev.json.gz", json.dumps(content).encode()))
    assert first["answers"] == {"text": ["Paris", "Paris"], "answer_start": [3, 3]}
    assert first["context"] == "In Paris." and first["question"] == "Where?" and first["id"] == "1"
    assert second["answers"] == {"text": [], "answer_start": []}
    assert "answers" not in third


def test_unquoted_tsv_keeps_lone_quotes(tmp_path: Path) -> None:
    source = write(tmp_path, "a.tsv", b'text\tlabel\n" It begins\t1\nand "ends"\t0\n')
    assert [row["text"] for row in read_rows(source)] == ['" It begins', 'and "ends"']


def test_byte_order_marks_line_separators_and_long_fields_are_read(tmp_path: Path) -> None:
    content = '\ufeff{"text": "one\u2028two"}\r\n\r\n{"text": "three"}'.encode()
    assert [row["text"] for row in read_rows(write(tmp_path, "a.jsonl", content))] == ["one\u2028two", "three"]
    assert read_rows(write(tmp_path, "a.csv", b'\xef\xbb\xbftext, label\r\n"two\r\nlines",1\r\n')) == [
        {"text": "two\r\nlines", "label": "1"}
    ]
    assert read_rows(write(tmp_path, "long.csv", b"text\n" + b"x" * 200_000)) == [{"text": "x" * 200_000}]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5))
def test_any_text_is_unchanged_by_jsonl(texts: list[str]) -> None:
    rows = [{"text": text} for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(as_jsonl(rows))))
        assert read_rows("-") == rows


@pytest.mark.parametrize(
    ("piped", "texts"),
    [
        ("one\n\nthree {\n", ["one", "", "three {"]),
        ('\n{"text": "one"}\n\n{"text": "two"}\n', ["one", "two"]),
        ("no line end", ["no line end"]),
    ],
)
def test_stdin_is_plain_lines_or_json_by_its_first_line(
    monkeypatch: pytest.MonkeyPatch, piped: str, texts: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
    assert [row["text"] for row in read_rows("-")] == texts


def test_plain_text_files_are_lines(tmp_path: Path) -> None:
    assert read_rows(write(tmp_path, "a.txt.gz", b"{not json\r\nsecond\n")) == [
        {"text": "{not json"},
        {"text": "second"},
    ]


def test_stream_rows_reads_no_further_than_needed(tmp_path: Path) -> None:
    rows = stream_rows(write(tmp_path, "a.jsonl", b'{"text": "good"}\nbroken\n'))
    assert next(rows) == {"text": "good"}
    with pytest.raises(OfframpError, match="line 2"):
        next(rows)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', "line 3"),
        ("a.jsonl", b'{"text": "x"}\n["x"]\n', "line 2 holds a list"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}\n', "line 2 is not UTF-8: byte 0xe9"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", "line 1"),
        ("a.csv", b"text,label\nx,1\nx,y,1\n", "line 3 has 3 fields, the header has 2"),
        ("a.csv", b"text,label\nx\n", "line 2 has 1 fields"),
        ("a.csv", b'text,label\nx,1\n"never closed,1\n', "line 3"),
        ("a.csv", b"text,text\nx,1\n", "a name twice: text, text"),
        ("a.tsv", b"text\tlabel\nx\t1\ny\t2\t3\n", "line 3 has 3 fields"),
        ("a.json", b'{"text": 1}\n{"text": 2}\n', "line 2"),
        ("a.json", b'{"rows": []}', ".jsonl"),
        ("a.json", b'{"text": 1}\n{"text": 2}\n', "belongs in a .jsonl file"),
        ("a.json", b'{"data": [{"paragraphs": [{"qas": [{"question": "?"}]}]}]}', "context"),
        ("a.xml", b"<a/>", ".parquet"),
        ("noending", b"x", ".parquet"),
        *((f"a.{ending}", b"", "no rows") for ending in ("jsonl", "csv", "tsv", "json", "txt", "jsonl.gz")),
        ("a.csv", b"text,label\n", "no rows"),
        ("a.jsonl", b"\n\n", "no rows"),
    ],
)
def test_bad_content_is_refused_with_file_and_line(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    message = refusal(write(tmp_path, name, content))
    assert expected in message and name in message


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(as_jsonl(ROWS * 500))
    for content in (whole[: len(whole) // 2], b"not gzip at all", whole[:20] + b"\xff" * 40 + whole[60:]):
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(content)
        assert "download it again" in refusal(str(path))
    pytest.importorskip("pyarrow")
    for content in (b"", b"not parquet", as_parquet(ROWS)[:-30]):
        assert "download it again" in refusal(write(tmp_path, "a.parquet", content))


def test_a_missing_file_is_refused_at_once_with_similar_names(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl.gz", as_jsonl(ROWS))
    with pytest.raises(OfframpError, match=r"did you mean .*train.jsonl.gz"):
        stream_rows(str(tmp_path / "train.jsonl"))
    with pytest.raises(OfframpError, match=r"did you mean .*train.jsonl.gz"):
        stream_rows(str(tmp_path / "trian.jsonl"))
    assert "there is no folder" in refusal(str(tmp_path / "nowhere" / "x.csv"))
    assert "a folder, not a file" in refusal(str(tmp_path)) and "train.jsonl.gz" in refusal(str(tmp_path))


def test_a_mapped_column_that_is_missing_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, "a.csv", b"sentence,label\nx,1\n")
    message = refusal(source, columns={"text": "sentense"})
    assert "columns found: sentence, label" in message and "--column text=sentence" in message


def test_require_columns_names_row_column_and_flag() -> None:
    require_columns([{"text": "x", "label": 0}], ["text", "label"], "a.csv")
    with pytest.raises(OfframpError, match="row 2, where 'text' is missing; columns found: texts, label") as caught:
        require_columns([{"text": "x"}, {"texts": "x", "label": 0}], ["text"], "a.csv")
    assert "--column text=texts" in str(caught.value)
    with pytest.raises(OfframpError, match="row 1, where 'label' is null or empty"):
        require_columns([{"text": "x", "label": None}], ["text", "label"], "a.csv")


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    assert "limit" in refusal(write(tmp_path, "a.jsonl", as_jsonl(ROWS)), limit=0)


def test_fingerprint_depends_on_content_only(tmp_path: Path) -> None:
    files = [write(tmp_path, f"a.{ending}", FORMATS[ending](ROWS)) for ending in FORMATS]
    assert len({fingerprint(file, read_rows(file)) for file in files}) == 1
    base = fingerprint("x", ROWS)
    assert len(base) == 16 and base == fingerprint("y", [dict(reversed(row.items())) for row in ROWS])
    assert base != fingerprint("x", ROWS[::-1]) != fingerprint("x", ROWS[:1])


def test_a_missing_pyarrow_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'offramp[data]'" in refusal(write(tmp_path, "a.parquet", b"x"))


def test_importing_data_and_tasks_loads_no_heavy_library() -> None:
    script = (
        "import sys, offramp.data.readers, offramp.data.tokenization, offramp.tasks; print(offramp.tasks.names(), "
        "{'torch', 'transformers', 'sklearn', 'scipy', 'numpy', 'pyarrow', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("set()"), done.stdout
