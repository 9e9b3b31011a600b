"""Rows a second while training: Offramp's packed trainer against the Hugging Face Trainer with padding.

    python benchmarks/training_throughput.py --model MODEL --train FILE --out results/sst2/bench/training.json

The same model, rows, batch size, AdamW, clipping, dropout and precision for both; complete epochs with the data
preparation of each batch, without evaluation and saving; rounds are interleaved and medians compared. Timings are
meaningful only on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import offramp
from offramp import methods, tasks
from offramp.data.readers import read_rows
from offramp.evaluation.result_cells import hardware, model_name
from offramp.inference.batching import score_for_training
from offramp.inference.run_folder import build_network, load_backbone, load_tokenizer
from offramp.nn.batches import Data
from offramp.training.trainer import Schedule, Trainer
from offramp.utils.files import write_json


class StepClock(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Measures the seconds between the first and the last step."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.started


def hugging_face_epoch(source: str, task: Any, data: Data, precision: str, size: int) -> float:
    """Return the seconds of one epoch with the Hugging Face Trainer, each batch padded to its longest row."""
    model, tokenizer, clock = load_backbone(source, task), load_tokenizer(source), StepClock()
    rows = [
        {"input_ids": e.ids, "token_type_ids": e.types, "attention_mask": [1] * len(e.ids), "labels": target}
        for e in data.encoded
        for _, target in [task.inputs_and_targets(e, data.rows[e.example], None)]
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=size,
            num_train_epochs=1,
            learning_rate=5e-5,
            weight_decay=0.01,
            max_grad_norm=1.0,
            bf16=precision == "bf16",
            use_cpu=not torch.cuda.is_available(),
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=rows,
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
            callbacks=[clock],
        )
        trainer.train()
    return clock.seconds


def offramp_epoch(source: str, task: Any, data: Data, precision: str, size: int) -> float:
    """Return the seconds of one epoch with Offramp's trainer."""
    method = methods.get("full")
    net = build_network(load_backbone(source, task), task, method, method.options())
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(epochs=1, batch_size=size, precision=precision, save_seconds=1e9)
        trainer = Trainer(net, schedule, Path(folder), score_for_training, lambda **_: None)
        few = Data(data.rows[:2], data.encoded[:2])
        return trainer.fit(method.stages(net, method.options()), data, few).seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--rows", type=int, default=1920)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--out", required=True)
    args = parser.parse_args(arguments)

    rows = read_rows(args.train, limit=args.rows)
    task = tasks.get("classification").from_rows(rows, args.train)
    data = Data(rows, task.encode(load_tokenizer(args.model), rows, 128))
    measured = {}
    for precision in args.precisions.split(","):
        seconds: dict[str, list[float]] = {"offramp": [], "hf_trainer": []}
        for _ in range(args.rounds):
            seconds["offramp"].append(offramp_epoch(args.model, task, data, precision, args.batch_size))
            seconds["hf_trainer"].append(hugging_face_epoch(args.model, task, data, precision, args.batch_size))
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        measured[precision] = {
            "rows_per_second": {name: round(len(rows) / s, 1) for name, s in medians.items()},
            "seconds_each_round": {name: [round(s, 2) for s in values] for name, values in seconds.items()},
            "speed_up": round(medians["hf_trainer"] / medians["offramp"], 3),
        }
        print(precision, measured[precision])
    write_json(
        Path(args.out),
        {
            "what": "training throughput, one epoch over the same rows",
            "command": f"python benchmarks/training_throughput.py --train {'/'.join(Path(args.train).parts[-2:])} "
            f"--rows {args.rows} --batch-size {args.batch_size} --rounds {args.rounds}",
            "model": model_name(args.model),
            "data": "/".join(Path(args.train).parts[-2:]),
            "rows": len(rows),
            "mean_tokens": round(sum(len(e.ids) for e in data.encoded) / len(data.encoded), 2),
            "precisions": measured,
            "hardware": hardware(),
            "versions": {m.__name__: m.__version__ for m in (offramp, torch, transformers)},
            "date": datetime.date.today().isoformat(),
        },
    )


if __name__ == "__main__":
    main()
