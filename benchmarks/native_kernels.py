"""How fast the C++ engine's encoder is, beside torch, OpenVINO and ONNX Runtime: milliseconds and GMAC/s by shape.

    python benchmarks/native_kernels.py --shapes 1x8,1x16,1x32,32x32 --models 6x384,12x768 --out results/kernels.json

Models have random weights: time does not depend on them. Contenders take turns, and the median
is reported. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel

from offramp import backbones, engines
from offramp.backbones import Encoder
from offramp.core.columns import ID
from offramp.core.packed import Packed, pack
from offramp.engines import EngineOptions, Precision
from offramp.utils.files import write_text
from offramp.utils.hardware import hardware

Run = Callable[[], Any]
TURNS = 5


def build_model(layers: int, hidden: int) -> BertModel:
    """Return a BERT of this size with random weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=5000,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64 if hidden >= 768 else 12,
        intermediate_size=4 * hidden,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def batch_of(rows: int, tokens: int) -> Packed:
    """Return random rows of one length."""
    generator = torch.Generator().manual_seed(rows * 1000 + tokens)
    return pack(torch.randint(5, 5000, (rows, tokens), generator=generator).tolist())


def engine_run(name: str, encoder: Encoder, precision: Precision, threads: int, packed: Packed) -> Run:
    """Return a function that runs all layers of a batch on one of Offramp's engines."""
    engine = engines.make(name, encoder, EngineOptions(precision, threads))

    def run() -> None:
        with torch.inference_mode(), engine.running():
            engine.run_segment(0, encoder.depth, None, packed)

    return run


def onnx_run(model: BertModel, quantised: bool, threads: int, packed: Packed, folder: Path) -> Run:
    """Return a function that runs a batch in ONNX Runtime."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = folder / "model.onnx"
    if not path.is_file():
        ids = torch.ones((2, 9), dtype=torch.int64)
        shapes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
        with torch.no_grad():
            torch.onnx.export(
                model, (ids, ids), str(path), input_names=["ids", "mask"], dynamic_shapes=(shapes, shapes), dynamo=True
            )
    if quantised:
        low = folder / "model-int8.onnx"
        if not low.is_file():
            quantize_dynamic(str(path), str(low), per_channel=True, weight_type=QuantType.QInt8)
        path = low
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    ids = packed.tokens[ID].view(packed.count, -1).numpy()
    given = dict(zip((i.name for i in session.get_inputs()), (ids, np.ones_like(ids)), strict=True))
    return lambda: session.run(None, given)


def milliseconds(runs: dict[str, Run], seconds: float) -> dict[str, float]:
    """Return the median time of each. All take turns of several calls, as a server would: after a change of turns the
    weights must first come back into the caches and the threads of the other runtimes go to sleep, so the first calls
    of a turn, a third of its time, do not count."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    turn = seconds / TURNS
    for run in runs.values():
        run()
    for _, (name, run) in itertools.product(range(TURNS), runs.items()):
        calls, started = 0, time.perf_counter()
        while calls < 4 or time.perf_counter() - started < turn:
            before = time.perf_counter()
            run()
            if calls >= 2 and before - started > turn / 3:
                taken[name].append(time.perf_counter() - before)
            calls += 1
    return {name: 1000 * statistics.median(times) for name, times in taken.items()}


def macs_of(encoder: Encoder, packed: Packed) -> float:
    """Return the multiply-accumulates of all layers."""
    tokens, pairs = packed.total, float((packed.lengths**2).sum())
    return sum(tokens * (c.query + c.key + c.feed) + pairs * c.pair for c in (layer.cost for layer in encoder.layers))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every model and shape."""
    torch.set_num_threads(arguments.threads)
    rows = []
    for size in arguments.models.split(","):
        layers, hidden = (int(part) for part in size.split("x"))
        model = build_model(layers, hidden)
        encoder = backbones.encoder(model)
        with tempfile.TemporaryDirectory() as folder:
            for shape in arguments.shapes.split(","):
                packed = batch_of(*(int(part) for part in shape.split("x")))
                runs: dict[str, Run] = {}
                for name in arguments.contenders.split(","):
                    kind, precision = name.rsplit("-", 1)
                    if kind == "onnxruntime":
                        runs[name] = onnx_run(model, precision == "int8", arguments.threads, packed, Path(folder))
                    else:
                        runs[name] = engine_run(kind, encoder, precision, arguments.threads, packed)  # type: ignore[arg-type]  # one of Precision
                total = macs_of(encoder, packed)
                for name, spent in milliseconds(runs, arguments.seconds).items():
                    entry = {"model": size, "shape": shape, "contender": name, "ms": round(spent, 4)}
                    rows.append({**entry, "gmac_per_second": round(total / spent / 1e6, 1)})
                    print(f"{size:8} {shape:8} {name:18} {spent:9.3f} ms {total / spent / 1e6:8.1f} GMAC/s", flush=True)
    return {
        "what": "Milliseconds of an encoder at full depth: the C++ engine beside other runtimes",
        "hardware": hardware(),
        "threads": arguments.threads,
        "versions": engines.versions("native"),
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse options, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="6x384,12x384,12x768")
    parser.add_argument("--shapes", default="1x1,1x8,1x16,1x32,1x64,1x128,1x256,32x16,32x32")
    default = (
        "native-fp32,native-bf16,native-int8,torch-fp32,openvino-fp32,openvino-int8,onnxruntime-fp32,onnxruntime-int8"
    )
    parser.add_argument("--contenders", default=default)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each contender and shape")
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args(arguments)
    found = measure(options)
    if options.out:
        write_text(Path(options.out), json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
