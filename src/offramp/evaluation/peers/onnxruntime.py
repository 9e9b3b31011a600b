"""ONNX Runtime: the whole graph, all its optimisations on; int8 by its own dynamic quantisation of linear layers.

The graph comes from the tracing exporter: it is quick, and needs no more than `onnx`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from offramp.errors import need
from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits, PeerRunner, _padded
from offramp.utils.files import atomic_replace

VARIANTS = (EngineVariant("onnxruntime", "fp32"), EngineVariant("onnxruntime", "int8"))
OPSET = 18


def load(ground: BenchModel, variant: EngineVariant) -> PeerRunner:
    """A session over the exported (and perhaps quantised) graph."""
    try:
        import onnx  # noqa: F401  # the exporter and the quantiser need it
        import onnxruntime
    except ImportError as error:
        raise need("bench", error.name or "onnxruntime") from error
    path, blank = (
        _quantised(ground) if variant.precision == "int8" else _exported(ground),
        _padded.padding_token(ground),
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = ground.threads, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = [given.name for given in session.get_inputs()]  # a model without token types has lost that input

    def answer(batch: EncodedBatch) -> Logits:
        padded = _padded.pad_batch(batch, blank)
        (made,) = session.run(None, {name: padded[name] for name in inputs})
        return _padded.unpad_logits(made, batch)

    return answer


def _exported(ground: BenchModel) -> Path:
    path = Path(ground.work) / "model.onnx"
    if not path.is_file():
        axes = {name: {0: "rows", 1: "tokens"} for name in _padded.INPUTS}
        model, given = _padded.load_plain_model(ground), _padded.example_inputs(_padded.padding_token(ground))
        with atomic_replace(path) as fresh, torch.inference_mode(), _padded.silence_converters():
            torch.onnx.export(
                model,
                given,
                str(fresh),
                input_names=list(_padded.INPUTS),
                output_names=["logits"],
                dynamic_axes=axes,
                opset_version=OPSET,
                dynamo=False,
            )
    return path


def _quantised(ground: BenchModel) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = Path(ground.work) / "model.int8.onnx"
    if not path.is_file():
        with atomic_replace(path) as fresh, _padded.silence_converters():
            quantize_dynamic(
                str(_exported(ground)),
                str(fresh),
                op_types_to_quantize=["MatMul", "Gemm"],
                per_channel=True,
                weight_type=QuantType.QInt8,
            )
    return path
