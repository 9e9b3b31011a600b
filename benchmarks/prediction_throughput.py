"""Rows a second at full depth: the packed torch engine against Hugging Face's padded SDPA, same weights, same batches.

    python benchmarks/prediction_throughput.py --run RUN --data FILE --out results/agnews/bench/prediction.json

Batches are taken in file order for both, without sorting by length; texts are tokenised beforehand; rounds are
interleaved, and the medians are compared. Timings are meaningful only on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import offramp
from offramp.core.policy import Policy
from offramp.data.readers import read_rows
from offramp.evaluation.result_cells import hardware, model_name
from offramp.inference.batching import run_packed
from offramp.inference.predictor import Predictor
from offramp.nn.batches import pack_rows
from offramp.utils.files import write_json


def padded_batches(encoded: list[Any], size: int, fill: int) -> list[dict[str, torch.Tensor]]:
    """Return the rows as padded batches for Hugging Face."""
    batches = []
    for start in range(0, len(encoded), size):
        rows = [e.ids for e in encoded[start : start + size]]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [fill] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def timed(job: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=1600)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", required=True)
    args = parser.parse_args(arguments)

    predictor = Predictor.load(args.run)
    rows = read_rows(args.data, limit=args.rows)
    encoded = predictor.prepare(rows)
    auto = getattr(transformers, predictor.task.auto_class)
    plain = auto.from_pretrained(args.run, attn_implementation="sdpa", dtype=torch.float32).eval()
    padded = padded_batches(encoded, args.batch_size, plain.config.pad_token_id)

    def hugging_face() -> list[torch.Tensor]:
        with torch.inference_mode():
            return [plain(**batch).logits for batch in padded]

    def packed_engine() -> list[torch.Tensor]:
        parts = []
        for start in range(0, len(encoded), args.batch_size):
            packed = pack_rows(predictor.task, encoded[start : start + args.batch_size])
            outcome = run_packed(predictor.network, predictor.engine, Policy(), packed)
            parts.append(torch.from_numpy(np.stack(outcome.logits)))
        return parts

    difference = max(float((a - b).abs().max()) for a, b in zip(packed_engine(), hugging_face(), strict=True))
    seconds: dict[str, list[float]] = {"offramp": [], "hf_sdpa_padded": []}
    for _ in range(args.rounds):
        seconds["offramp"].append(timed(packed_engine))
        seconds["hf_sdpa_padded"].append(timed(hugging_face))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    tokens = sum(len(e.ids) for e in encoded)
    cells = sum(batch["input_ids"].numel() for batch in padded)
    result = {
        "what": "prediction throughput at full depth, fp32, batches in file order, tokenised beforehand",
        "command": f"python benchmarks/prediction_throughput.py --run {Path(args.run).name} --data "
        f"{'/'.join(Path(args.data).parts[-2:])} --rows {args.rows} --batch-size {args.batch_size}",
        "model": model_name(predictor.model.base_model),
        "data": "/".join(Path(args.data).parts[-2:]),
        "rows": len(rows),
        "real_tokens_share": round(tokens / cells, 4),
        "rows_per_second": {name: round(len(rows) / s, 1) for name, s in medians.items()},
        "seconds_each_round": {name: [round(s, 3) for s in values] for name, values in seconds.items()},
        "speed_up": round(medians["hf_sdpa_padded"] / medians["offramp"], 3),
        "largest_logit_difference": difference,
        "hardware": hardware(),
        "versions": {m.__name__: m.__version__ for m in (offramp, torch, transformers)},
        "date": datetime.date.today().isoformat(),
    }
    write_json(Path(args.out), result)
    print(result["rows_per_second"], "speed-up", result["speed_up"])


if __name__ == "__main__":
    main()
