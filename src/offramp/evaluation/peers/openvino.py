"""OpenVINO over the complete padded graph with dynamic shapes, to compare with Offramp's engine on OpenVINO.

It is imported as that engine imports it, without the module that sends telemetry.
"""

from __future__ import annotations

from pathlib import Path

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

VARIANTS = (EngineVariant("openvino-graph", "fp32"), EngineVariant("openvino-graph", "bf16"))
HINTS = {"fp32": "f32", "bf16": "bf16"}


def load_peer(model: BenchModel, variant: EngineVariant) -> PeerRunner:
    """Compile the converted graph for this precision."""
    try:
        openvino = import_openvino()
    except OfframpError as error:
        raise missing_package("openvino", "openvino") from error
    hints = {"INFERENCE_PRECISION_HINT": HINTS[variant.precision], "INFERENCE_NUM_THREADS": model.threads}
    compiled = openvino.Core().compile_model(str(_converted(model)), "CPU", hints)
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
