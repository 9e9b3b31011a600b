"""OpenVINO over the complete padded graph with dynamic shapes, to compare with Offramp's engine on OpenVINO.

int8 is static, by NNCF: the ranges of activations are measured on sample rows beforehand, what is not quantised runs in
bf16 where the processor has it (OpenVINO's default). Both packages are imported as that engine imports OpenVINO,
without the module that sends telemetry.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from offramp.engines.openvino.runtime import import_openvino
from offramp.errors import OfframpError, missing_package
from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits, PeerRunner
from offramp.evaluation.plain_model import (
    example_inputs,
    load_plain_model,
    pad_batch,
    padding_token,
    silence_converters,
    unpad_logits,
)

VARIANTS = tuple(EngineVariant("openvino-graph", precision) for precision in ("fp32", "bf16", "int8"))
HINTS = {"fp32": {"INFERENCE_PRECISION_HINT": "f32"}, "bf16": {"INFERENCE_PRECISION_HINT": "bf16"}, "int8": {}}
TELEMETRY = "openvino_telemetry"


def load_peer(model: BenchModel, variant: EngineVariant) -> PeerRunner:
    """Compile the converted graph for this precision."""
    try:
        openvino = import_openvino()
    except OfframpError as error:
        raise missing_package("openvino", "openvino") from error
    path = _quantised(model) if variant.precision == "int8" else _converted(model)
    hints = {**HINTS[variant.precision], "INFERENCE_NUM_THREADS": model.threads}
    compiled = openvino.Core().compile_model(str(path), "CPU", hints)
    padding = padding_token(model)
    inputs = [given.any_name for given in compiled.inputs]  # a model without token types lacks that input

    def run(batch: EncodedBatch) -> Logits:
        padded = pad_batch(batch, padding)
        logits = compiled({name: padded[name] for name in inputs}, share_inputs=True)[0]
        return unpad_logits(logits, batch)

    return run


def _converted(model: BenchModel) -> Path:
    openvino, path = import_openvino(), Path(model.work) / "graph.xml"
    if not path.is_file():
        with silence_converters():
            example = example_inputs(padding_token(model))
            graph = openvino.convert_model(load_plain_model(model), example_input=example)
        openvino.save_model(graph, str(path), compress_to_fp16=False)
    return path


def _quantised(model: BenchModel) -> Path:
    path = Path(model.work) / "graph-int8.xml"
    if path.is_file():
        return path
    nncf = _import_nncf()
    if not model.samples:
        raise OfframpError("static int8 of OpenVINO", "no sample rows", "give rows to measure activations on")
    openvino, padding = import_openvino(), padding_token(model)
    graph = openvino.Core().read_model(str(_converted(model)))
    names = [given.any_name for given in graph.inputs]
    samples = [{name: pad_batch([row], padding)[name] for name in names} for row in model.samples]
    kind, count = nncf.ModelType.TRANSFORMER, len(samples)
    with silence_converters():
        low = nncf.quantize(graph, nncf.Dataset(samples), model_type=kind, subset_size=count)
    openvino.save_model(low, str(path), compress_to_fp16=False)
    return path


def _import_nncf() -> Any:
    before = sys.modules.get(TELEMETRY)
    sys.modules[TELEMETRY] = None  # type: ignore[assignment]  # importing it fails, and NNCF uses its stub
    try:
        import nncf
    except ImportError as error:
        raise missing_package("bench", "nncf") from error
    finally:
        del sys.modules[TELEMETRY]
        if before is not None:
            sys.modules[TELEMETRY] = before
    return nncf
