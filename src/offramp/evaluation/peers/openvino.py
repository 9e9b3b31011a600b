"""OpenVINO over the whole padded graph with dynamic shapes: what our engine of that name must stand beside.

Imported as our engine imports it, without the module that sends: `convert_model` then has nothing to phone home with.
"""

from __future__ import annotations

from pathlib import Path

from offramp.engines.openvino.runtime import library
from offramp.errors import OfframpError, need
from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits, PeerRunner, _padded

VARIANTS = (EngineVariant("openvino-graph", "fp32"), EngineVariant("openvino-graph", "bf16"))
HINTS = {"fp32": "f32", "bf16": "bf16"}


def load(ground: BenchModel, variant: EngineVariant) -> PeerRunner:
    """The converted graph, compiled for this precision."""
    try:
        openvino = library()
    except OfframpError as error:
        raise need("openvino", "openvino") from error
    hints = {"INFERENCE_PRECISION_HINT": HINTS[variant.precision], "INFERENCE_NUM_THREADS": ground.threads}
    compiled, blank = (
        openvino.Core().compile_model(str(_converted(ground)), "CPU", hints),
        _padded.padding_token(ground),
    )
    inputs = [given.any_name for given in compiled.inputs]  # a model without token types has lost that input

    def answer(batch: EncodedBatch) -> Logits:
        padded = _padded.pad_batch(batch, blank)
        made = compiled({name: padded[name] for name in inputs}, share_inputs=True)[0]
        return _padded.unpad_logits(made, batch)

    return answer


def _converted(ground: BenchModel) -> Path:
    openvino, path = library(), Path(ground.work) / "graph.xml"
    if not path.is_file():
        with _padded.silence_converters():
            graph = openvino.convert_model(
                _padded.load_plain_model(ground), example_input=_padded.example_inputs(_padded.padding_token(ground))
            )
        openvino.save_model(graph, str(path), compress_to_fp16=False)
    return path
