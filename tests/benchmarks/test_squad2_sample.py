"""Samples with unanswerable questions: no question is lost, and none that moved can be answered where it went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import squad2_sample
from offramp.data.readers import read_rows


def article(number: int) -> dict[str, Any]:
    context = f"the town {number} has a tower . it lies at river r{number} ."
    answers = [{"text": f"r{number}", "answer_start": context.index(f"r{number}")}]
    questions = [{"id": f"{number}-{i}", "question": "which river ?", "answers": answers} for i in range(4)]
    return {"title": f"t{number}", "paragraphs": [{"context": context, "qas": questions}]}


def test_moved_questions_have_no_answer_and_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"data": [article(number) for number in range(10, 20)]}))
    out = str(tmp_path / "two.json")
    squad2_sample.main(["--data", str(tmp_path / "one.json"), "--out", out, "--unanswerable", "0.5"])
    rows = read_rows(out)
    assert len(rows) == 40
    impossible = [row for row in rows if not row["answers"]["text"]]
    assert 10 < len(impossible) < 30
    questions = [
        (q, p["context"]) for a in json.loads(Path(out).read_text())["data"] for p in a["paragraphs"] for q in p["qas"]
    ]
    for question, context in questions:
        number = question["id"].split("-")[0]
        assert question["is_impossible"] == (f"town {number} " not in context) == (not question["answers"])


def test_a_question_whose_answer_is_everywhere_stays_answerable() -> None:
    same = {"text": "tower", "answer_start": 16}
    articles = [article(1), article(2)]
    for one in articles:
        for question in one["paragraphs"][0]["qas"]:
            question["answers"] = [same]
    found = squad2_sample.with_unanswerable(articles, 1.0, 0)
    assert not any(q["is_impossible"] for a in found for p in a["paragraphs"] for q in p["qas"])
