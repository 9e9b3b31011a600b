"""Fine-tune a Hugging Face model with plain transformers, without Offramp: models to try `offramp attach` on.

    python benchmarks/finetune_plain.py --model FOLDER --train train.jsonl --out my-model --epochs 3

Rows are JSON lines with `text` (or `text_a` and `text_b`) and `label`, or `tokens` and `tags` (--task tagging). A
tenth of the rows is held out and scored after training.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)


def read(path: str, limit: int | None) -> list[dict[str, Any]]:
    content = gzip.decompress(Path(path).read_bytes()) if path.endswith(".gz") else Path(path).read_bytes()
    rows = [json.loads(line) for line in content.decode("utf-8").splitlines() if line.strip()]
    return rows[:limit] if limit else rows


def texts_of(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["text"],) if "text" in row else (row["text_a"], row["text_b"])


def encode(tokenizer: Any, rows: list[dict[str, Any]], task: str, index: dict[Any, int], longest: int) -> Any:
    if task == "tagging":
        batch = tokenizer([r["tokens"] for r in rows], is_split_into_words=True, truncation=True, max_length=longest,
                          padding=True, return_tensors="pt")  # fmt: skip
        labels = torch.full_like(batch["input_ids"], -100)
        for number, row in enumerate(rows):
            before = None
            for place, word in enumerate(batch.word_ids(number)):
                if word is not None and word != before:
                    labels[number, place] = index[row["tags"][word]]
                before = word
        return batch, labels
    columns = list(zip(*(texts_of(row) for row in rows), strict=True))
    batch = tokenizer(*map(list, columns), truncation=True, max_length=longest, padding=True, return_tensors="pt")
    if task == "regression":
        return batch, torch.tensor([[float(row["label"])] for row in rows])
    return batch, torch.tensor([index[row["label"]] for row in rows])


def batches(rows: list[dict[str, Any]], size: int, rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return shuffled batches; rows of similar length stand together, so that little is spent on padding."""
    order = rng.sample(rows, len(rows))
    pools = [order[begin : begin + 20 * size] for begin in range(0, len(order), 20 * size)]
    by_length = [row for pool in pools for row in sorted(pool, key=row_length)]
    found = [by_length[begin : begin + size] for begin in range(0, len(by_length), size)]
    rng.shuffle(found)
    return found


def row_length(row: dict[str, Any]) -> int:
    return len(row["tokens"]) if "tokens" in row else sum(map(len, texts_of(row)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune, score the held-out rows and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--task", choices=["classification", "regression", "tagging"], default="classification")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    rows = read(options.train, options.limit)
    random.Random(options.seed).shuffle(rows)
    held, rows = rows[: len(rows) // 10], rows[len(rows) // 10 :]
    names = sorted({tag for row in rows for tag in row["tags"]} if options.task == "tagging" else
                   set() if options.task == "regression" else {row["label"] for row in rows}, key=str)  # fmt: skip
    index = {name: number for number, name in enumerate(names)}
    kind = AutoModelForTokenClassification if options.task == "tagging" else AutoModelForSequenceClassification
    labels = {"num_labels": 1, "problem_type": "regression"} if options.task == "regression" else {
        "num_labels": len(names), "id2label": {i: str(n) for n, i in index.items()},
        "label2id": {str(n): i for n, i in index.items()}}  # fmt: skip
    model = kind.from_pretrained(options.model, dtype=torch.float32, **labels)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    steps = options.epochs * (-(-len(rows) // options.batch_size))
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    started, step = time.time(), 0
    for epoch in range(options.epochs):
        model.train()
        for chosen in batches(rows, options.batch_size, random.Random(options.seed + epoch)):
            batch, target = encode(tokenizer, chosen, options.task, index, options.max_length)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch, labels=target).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 50 == 0:
                print(f"step {step}/{steps} loss {float(loss.detach()):.3f} {time.time() - started:.0f} s", flush=True)
    model.eval()
    right = total = 0
    with torch.no_grad():
        for begin in range(0, len(held), 64):
            batch, target = encode(tokenizer, held[begin : begin + 64], options.task, index, options.max_length)
            logits = model(**batch).logits
            if options.task == "regression":
                right += float((logits - target).square().sum())
                total += len(target)
                continue
            marked = target != -100
            right += int(((logits.argmax(-1) == target) & marked).sum())
            total += int(marked.sum())
    Path(options.out).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    name = "mean squared error" if options.task == "regression" else "accuracy"
    print(f"{name} on {len(held)} held-out rows: {right / max(1, total):.4f}; {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
