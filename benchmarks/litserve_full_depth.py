"""Full depth behind LitServe with dynamic batching: the server that `serve_comparison.py` compares with.

    python benchmarks/litserve_full_depth.py runs/agnews --port 8001 --runtime openvino-int8 --batch 16 --wait 0.002

It answers `POST /v1/predict` in the shape of `offramp serve`, so that one client loads both. The model is whole: no row
leaves early. Runtimes: ONNX Runtime int8, CTranslate2 int8, OpenVINO with the whole graph in bf16 or int8 (NNCF, which
needs `--samples`), OpenVINO int8 layer by layer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from offramp.data.readers import read_rows
from offramp.errors import missing_package
from offramp.evaluation import peers
from offramp.inference.predictor import Predictor

try:
    from litserve import LitAPI, LitServer
except ImportError:  # the runtimes are used without it, too
    LitAPI, LitServer = object, None

RUNTIMES = ("onnxruntime-int8", "ctranslate2-int8", "openvino-graph-bf16", "openvino-graph-int8", "openvino-int8")
SAMPLES = 300  # rows on which the ranges of activations are measured
Rows = Sequence[Mapping[str, Any]]


class StaticRuntime:
    """A run at full depth on a static runtime: texts to labels."""

    def __init__(self, run: str, name: str, threads: int, work: str, samples: str | None = None) -> None:
        self.name, self.adaptive = name, name == "openvino-int8"
        self.predictor = Predictor.load(
            run, "openvino" if self.adaptive else "torch", "int8" if self.adaptive else "fp32", threads
        )
        task = self.predictor.task
        if not self.adaptive:
            runtime, precision = name.rsplit("-", 1)
            rows = read_rows(samples)[:SAMPLES] if samples else []
            encoded = tuple(self.predictor.prepare(rows, str(samples))) if rows else ()
            model = peers.BenchModel(run, task.auto_class, work, threads, encoded)
            peer = peers.get("openvino" if runtime == "openvino-graph" else runtime)
            self.run = peer.load(model, peers.EngineVariant(runtime, precision))

    def predict(self, rows: Rows) -> list[str]:
        """Return the label of every row."""
        if self.adaptive:
            return [str(one["label"]) for one in self.predictor.predict(rows, budget=1.0, batch_size=len(rows))]
        encoded = self.predictor.prepare(rows)
        predictions = self.predictor.task.predictions(rows, encoded, self.run(encoded))
        return [str(one["label"]) for one in predictions]


class FullDepth(LitAPI):  # type: ignore[misc]  # litserve has no types
    """A run at full depth as LitServe calls it; batches are lists of rows."""

    def __init__(self, runtime: tuple[str, str, int, str, str | None], **settings: Any) -> None:
        super().__init__(**settings)
        self.chosen = runtime  # the process that computes loads it

    def setup(self, device: str) -> None:
        """Load the runtime and warm it up."""
        self.runtime = StaticRuntime(*self.chosen)
        column = self.runtime.predictor.task.input_columns[0]
        for size in (1, 2, 4, 8, 16, 32):
            self.runtime.predict([{column: "a text to warm up " * (1 + size % 5)}] * size)

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # LitServe reads annotations as bodies
        """Return the row of a request."""
        return request["inputs"][0]

    def batch(self, inputs: Sequence[Any]) -> list[Any]:
        """Return rows as one batch."""
        return list(inputs)

    def predict(self, rows: Any) -> Any:
        """Return the labels of a batch, or of one row where batching is off."""
        return self.runtime.predict(rows) if isinstance(rows, list) else self.runtime.predict([rows])[0]

    def unbatch(self, output: Any) -> Any:
        """Return the labels one by one."""
        return output

    def encode_response(self, output):  # type: ignore[no-untyped-def]  # the same
        """Return an answer in the shape of `offramp serve`."""
        spent = {"exit_layer": self.runtime.predictor.network.depth, "budget": {"mac_share": 1.0}}
        return {"predictions": [{"label": output, **spent}]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--runtime", choices=RUNTIMES, default="openvino-int8")
    parser.add_argument("--batch", type=int, default=16, help="most rows of a batch")
    parser.add_argument("--wait", type=float, default=0.002, help="seconds that a batch waits to be filled")
    parser.add_argument("--workers", type=int, default=1, help="processes that compute")
    parser.add_argument("--threads", type=int, default=2, help="threads of each")
    parser.add_argument("--samples", help="rows on which a runtime measures the ranges of activations")
    parser.add_argument("--work", default=tempfile.gettempdir(), help="a folder for converted models")
    options = parser.parse_args(arguments)
    if LitServer is None:
        raise missing_package("bench", "litserve")
    runtime = (options.run, options.runtime, options.threads, options.work, options.samples)
    api = FullDepth(runtime, max_batch_size=options.batch, batch_timeout=options.wait, api_path="/v1/predict")
    server = LitServer(api, accelerator="cpu", workers_per_device=options.workers, fast_queue=True)
    server.run(host="127.0.0.1", port=options.port, generate_client_file=False, log_level="error")


if __name__ == "__main__":
    main()
