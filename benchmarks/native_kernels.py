"""How fast full depth is in the C++ engine, beside static runtimes: milliseconds and GMAC/s by shape.

    python benchmarks/native_kernels.py --models 6x384,12x768 --shapes 1x8,1x32,32x8-64 --out kernels.json
    python benchmarks/native_kernels.py --products --threads 1 --out results/products.json

A shape is rows × tokens; `32x8-64` is 32 rows of 8 to 64 tokens, as they come. Models have random weights: time does
not depend on them. The clock runs from token ids (lists) to logits (arrays), packing or padding included. Contenders
take turns of several calls, and medians are reported. `--products` compares single matrix products with FBGEMM, as
torch runs it. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from offramp import __version__, engines, methods, tasks
from offramp.data.tokenization import Encoded
from offramp.engines import EngineOptions
from offramp.engines.native import import_native, instruction_set
from offramp.evaluation import peers
from offramp.evaluation.bench import package_versions
from offramp.evaluation.contenders import failure_reason
from offramp.evaluation.peers import BenchModel, EngineVariant
from offramp.inference.batching import run_encoded
from offramp.inference.run_folder import build_network
from offramp.nn.network import Network
from offramp.utils.files import write_json
from offramp.utils.hardware import hardware

Run = Callable[[], Any]
TURNS = 5
VOCABULARY = 5000
PEERS = {"onnxruntime": "onnxruntime", "openvino-graph": "openvino", "ctranslate2": "ctranslate2"}  # contender → peer


def save_model(layers: int, hidden: int, folder: Path) -> BertForSequenceClassification:
    """Write a BERT of this size with random weights, as transformers writes it, and return it."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64 if hidden >= 768 else 12,
        intermediate_size=4 * hidden,
        num_labels=2,
    )
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    words = {"[UNK]": 0, "[PAD]": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
    return model


def rows_of(shape: str) -> list[Encoded]:
    """Return random rows of a shape such as 32x16, or 32x8-64 for rows of different lengths."""
    count, tokens = shape.split("x")
    low, _, high = tokens.partition("-")
    draw = np.random.default_rng(len(shape) + int(count))
    lengths = draw.integers(int(low), int(high or low) + 1, int(count)).tolist()
    rows = [draw.integers(5, VOCABULARY, length).tolist() for length in lengths]
    return [Encoded(ids, [0] * len(ids), number, [], [], 0) for number, ids in enumerate(rows)]


def network_of(model: BertForSequenceClassification) -> Network:
    """Return a model with exits that are not consulted at full depth."""
    method = methods.get("deebert")
    task = tasks.get("classification").from_rows([{"text": "w", "label": name} for name in "ab"], "rows")
    network = build_network(model, task, method, method.options())
    network.eval()
    return network


def engine_run(name: str, network: Network, precision: Any, threads: int) -> Callable[[list[Encoded]], Any]:
    """Return a function that runs a batch at full depth on one of Offramp's engines."""
    engine, method = engines.make(name, network.encoder, EngineOptions(precision, threads)), methods.get("deebert")
    policy = method.policy(network, method.settings())
    return lambda rows: run_encoded(network, engine, policy, rows, len(rows))


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


def macs_of(network: Network, rows: Sequence[Encoded]) -> float:
    """Return the multiply-accumulates of all layers."""
    tokens, pairs = sum(len(row.ids) for row in rows), float(sum(len(row.ids) ** 2 for row in rows))
    costs = (layer.cost for layer in network.encoder.layers)
    return sum(tokens * (c.query + c.key + c.feed) + pairs * c.pair for c in costs)


def measure_models(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every model and shape."""
    found = []
    for size in arguments.models.split(","):
        layers, hidden = (int(part) for part in size.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            network = network_of(save_model(layers, hidden, Path(folder)))
            samples = tuple(rows_of("16x16"))
            model = BenchModel(folder, "AutoModelForSequenceClassification", folder, arguments.threads, samples)
            opened: dict[str, Callable[[list[Encoded]], Any]] = {}
            for name in arguments.contenders.split(","):
                kind, precision = name.rsplit("-", 1)
                try:
                    if kind in PEERS:
                        opened[name] = peers.get(PEERS[kind]).load(model, EngineVariant(kind, precision))
                    else:
                        opened[name] = engine_run(kind, network, precision, arguments.threads)
                except Exception as error:  # other runtimes raise errors of any class
                    print(f"{name} is missing: {failure_reason(error)}", file=sys.stderr)
            for shape in arguments.shapes.split(","):
                found += measure_shape(size, shape, opened, network, arguments.seconds)
    return found


def measure_shape(
    size: str, shape: str, opened: dict[str, Callable[[list[Encoded]], Any]], network: Network, seconds: float
) -> list[dict[str, Any]]:
    """Measure one shape on every contender."""
    rows, found = rows_of(shape), []
    total = macs_of(network, rows)
    taken = milliseconds({name: partial(run, rows) for name, run in opened.items()}, seconds)
    for name, spent in taken.items():
        entry = {"model": size, "shape": shape, "contender": name, "ms": round(spent, 4)}
        peer_times = [ms for other, ms in taken.items() if is_rival(other, name)]
        ratio = round(min(peer_times) / spent, 3) if peer_times and name.startswith("native") else None
        found.append({**entry, "gmac_per_second": round(total / spent / 1e6, 1), "over_fastest_peer": ratio})
        print(
            f"{size:8} {shape:8} {name:22} {spent:9.3f} ms {total / spent / 1e6:8.1f} GMAC/s {ratio or ''}", flush=True
        )
    return found


def is_rival(other: str, name: str) -> bool:
    """Return whether a contender is a static runtime of the same precision."""
    (kind, precision), own = other.rsplit("-", 1), name.rsplit("-", 1)[1]
    return kind in PEERS and precision == own


def measure_products(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure single products of 8 to 1024 rows with a matrix 384 → 1536: FBGEMM's int8 and MKL's fp32 beside ours."""
    inputs, outputs, found = 384, 1536, []
    generator = np.random.default_rng(0)
    torch.backends.quantized.engine = "fbgemm"
    weight = generator.normal(size=(outputs, inputs)).astype(np.float32) / 20
    linear = torch.nn.Linear(inputs, outputs, bias=True)
    linear.weight.data.copy_(torch.from_numpy(weight))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch will move it to another package
        low = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(linear), {torch.nn.Linear}, torch.qint8)
    ours = {precision: single_product(weight, precision, arguments.threads) for precision in ("fp32", "int8")}
    for count in (8, 16, 32, 64, 128, 256, 512, 1024):
        given = generator.normal(size=(count, inputs)).astype(np.float32)
        tensor, output = torch.from_numpy(given), np.empty((count, outputs), np.float32)
        lengths = np.array([count], np.int64)
        runs: dict[str, Run] = {"torch-fp32": partial(linear, tensor), "fbgemm-int8": partial(low, tensor)}
        for precision, (encoder, head) in ours.items():
            given_rows = (1, 0, lengths, None, None, None, given, None, head, output[:1])  # no layer, the head alone
            runs[f"native-{precision}"] = partial(encoder.run_layers, *given_rows)
        with torch.inference_mode():
            taken = milliseconds(runs, arguments.seconds)
        for name, spent in taken.items():
            rate = count * inputs * outputs / spent / 1e6
            found.append({"rows": count, "contender": name, "ms": round(spent, 4), "gmac_per_second": round(rate, 1)})
            print(f"{count:5} {name:14} {spent:9.4f} ms {rate:8.1f} GMAC/s", flush=True)
    return found


def single_product(weight: Any, precision: str, threads: int) -> tuple[Any, Any]:
    """Return an encoder without layers and a head that multiplies every token with a matrix and takes the first."""
    native, (outputs, inputs) = import_native(), weight.shape
    ones, table = np.ones(inputs, np.float32), np.zeros((8, inputs), np.float32)
    encoder = native.Encoder(inputs, threads, instruction_set(), table, table, None, 0, ones, ones, 1e-5, None)
    head = native.Head()
    head.add_linear(True, weight, np.zeros(outputs, np.float32), "", precision)
    head.set_pools(["first"])
    return encoder, head


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse options, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="6x384,12x384,12x768")
    parser.add_argument("--shapes", default="1x8,1x16,1x32,1x64,1x128,1x256,32x32,32x8-64")
    default = (
        "native-fp32,native-bf16,native-int8,onnxruntime-fp32,onnxruntime-int8,openvino-graph-fp32,openvino-graph-bf16,"
        "openvino-graph-int8,ctranslate2-fp32,ctranslate2-int8"
    )
    parser.add_argument("--contenders", default=default)
    parser.add_argument("--products", action="store_true", help="single matrix products instead of models")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each contender and shape")
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    given = list(arguments) if arguments is not None else sys.argv[1:]
    what = (
        "Single matrix products 384 → 1536 of the C++ engine beside FBGEMM and MKL in torch"
        if options.products
        else "Milliseconds of whole models at full depth: the C++ engine beside static runtimes"
    )
    rows = measure_products(options) if options.products else measure_models(options)
    content = {
        "what": what,
        "hardware": hardware(),
        "threads": options.threads,
        "seconds": options.seconds,
        "seed": 0,
        "command": " ".join(["python benchmarks/native_kernels.py", *given]),
        "version": __version__,
        "versions": package_versions(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    if options.out:
        write_json(Path(options.out), content)


if __name__ == "__main__":
    main()
