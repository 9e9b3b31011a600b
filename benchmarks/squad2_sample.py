"""Make a file in the form of SQuAD 2.0 from one of SQuAD 1.1: some questions lose the paragraph that answers them.

    python benchmarks/squad2_sample.py --data train-v1.1.json --out train-v2-sample.json --unanswerable 0.33

Questions that become unanswerable go to a paragraph of another article, one that contains none of the question's
answers. This is easier than SQuAD 2.0, whose unanswerable questions were written for their paragraph: results on such a
sample show that unanswerable questions work end to end, and are not results on SQuAD 2.0.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offramp.utils.files import write_text

PROGRAM = "python benchmarks/squad2_sample.py"
TRIES = 50  # paragraphs that are drawn for a question before it stays answerable
Article = Mapping[str, Any]


def with_unanswerable(articles: Sequence[Article], share: float, seed: int) -> list[dict[str, Any]]:
    """Return articles of which about a share of the questions moved, without answers, to paragraphs of other ones."""
    rng, paragraphs = random.Random(seed), [(place, p) for place, a in enumerate(articles) for p in a["paragraphs"]]
    kept: dict[int, list[dict[str, Any]]] = {id(paragraph): [] for _, paragraph in paragraphs}
    for place, paragraph in paragraphs:
        for question in paragraph["qas"]:
            moved = other_paragraph(place, question, paragraphs, rng) if rng.random() < share else None
            if moved is None:
                kept[id(paragraph)].append({**question, "is_impossible": False})
            else:
                kept[id(moved)].append({**question, "answers": [], "is_impossible": True})
    return [
        {**article, "paragraphs": [{**p, "qas": kept[id(p)]} for p in article["paragraphs"] if kept[id(p)]]}
        for article in articles
    ]


def other_paragraph(
    article: int, question: Mapping[str, Any], paragraphs: Sequence[tuple[int, Any]], rng: random.Random
) -> Any | None:
    """Return a paragraph of another article that contains none of the question's answers; None if none was drawn."""
    answers = [answer["text"].lower() for answer in question["answers"]]
    for _ in range(TRIES):
        place, paragraph = paragraphs[rng.randrange(len(paragraphs))]
        if place != article and not any(answer in paragraph["context"].lower() for answer in answers):
            return paragraph
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the file, move questions, write the new file and print how many cannot be answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="SQuAD 1.1 as .json or .json.gz")
    parser.add_argument("--out", required=True, help="where the new .json is written")
    parser.add_argument(
        "--unanswerable", type=float, default=0.33, help="share of the questions that lose their answer"
    )
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args(arguments)
    raw = Path(options.data).read_bytes()
    content = json.loads(gzip.decompress(raw) if options.data.endswith(".gz") else raw)
    articles = with_unanswerable(content["data"], options.unanswerable, options.seed)
    write_text(Path(options.out), json.dumps({"version": "v2.0-sample", "data": articles}))
    questions = [q for article in articles for p in article["paragraphs"] for q in p["qas"]]
    impossible = sum(question["is_impossible"] for question in questions)
    print(f"{len(questions)} questions, {impossible} of them without an answer in their paragraph")


if __name__ == "__main__":
    main()
