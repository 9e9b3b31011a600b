"""ONNX Runtime: the complete graph with all optimisations; int8 by its own dynamic quantisation of linear layers.

The graph comes from the tracing exporter, which is quick and needs `onnx` only.
"""

from __future__ import annotations

from pathlib import Path

import torch

from offramp.errors import missing_package
from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits, PeerRunner
from offramp.evaluation.plain_model import (
    PADDED_INPUTS,
    example_inputs,
    load_plain_model,
    pad_batch,
    padding_token,
    silence_converters,
    unpad_logits,
)
from offramp.utils.files import atomic_replace

VARIANTS = (EngineVariant("onnxruntime", "fp32"), EngineVariant("onnxruntime", "int8"))
OPSET = 18


def load_peer(model: BenchModel, variant: EngineVariant) -> PeerRunner:
    """Open a session over the exported and, for int8, quantised graph."""
    try:
        import onnx  # noqa: F401  # the exporter and the quantiser need it
        import onnxruntime
    except ImportError as error:
        raise missing_package("bench", error.name or "onnxruntime") from error
    path = _quantised(model) if variant.precision == "int8" else _exported(model)
    padding = padding_token(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = model.threads, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = [given.name for given in session.get_inputs()]  # a model without token types lacks that input

    def run(batch: EncodedBatch) -> Logits:
        padded = pad_batch(batch, padding)
        (logits,) = session.run(None, {name: padded[name] for name in inputs})
        return unpad_logits(logits, batch)

    return run


def _exported(model: BenchModel) -> Path:
    path = Path(model.work) / "model.onnx"
    if not path.is_file():
        axes = {name: {0: "rows", 1: "tokens"} for name in PADDED_INPUTS}
        plain, example = load_plain_model(model), example_inputs(padding_token(model))
        with atomic_replace(path) as fresh, torch.inference_mode(), silence_converters():
            torch.onnx.export(
                plain,
                example,
                str(fresh),
                input_names=list(PADDED_INPUTS),
                output_names=["logits"],
                dynamic_axes=axes,
                opset_version=OPSET,
                dynamo=False,
            )
    return path


def _quantised(model: BenchModel) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = Path(model.work) / "model.int8.onnx"
    if not path.is_file():
        with atomic_replace(path) as fresh, silence_converters():
            quantize_dynamic(
                str(_exported(model)),
                str(fresh),
                op_types_to_quantize=["MatMul", "Gemm"],
                per_channel=True,
                weight_type=QuantType.QInt8,
            )
    return path
