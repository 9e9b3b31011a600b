"""OpenVINO itself: importing it without telemetry, converting a traced function, running a compiled graph.

A graph first runs on a sample: with OpenVINO 2026.4 a first input of length 1 fixes the shape of its attention, and
later inputs get wrong results. A new graph must also equal torch on two samples before it is used.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offramp.engines.openvino.graphs import GraphSpec
from offramp.engines.openvino.tracing import NamedTensors, without_gradients
from offramp.errors import OfframpError, install_command

TOLERANCE = {"fp32": 1e-3, "bf16": 0.5, "int8": 0.5}  # on samples of standard normal states
GROUP = 128  # int8: number of neighbouring values of one token that share a scale


@cache
def import_openvino() -> Any:
    """Return the package, imported while its telemetry module is hidden so that nothing is sent."""
    hidden = "openvino" not in sys.modules and "openvino_telemetry" not in sys.modules
    if hidden:
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # importing it fails
    try:
        import openvino
    except ImportError as error:
        raise OfframpError(
            "the openvino engine",
            f"an environment without OpenVINO ({error})",
            f"{install_command('openvino')}; or use --engine torch",
        ) from error
    finally:
        if hidden:
            del sys.modules["openvino_telemetry"]
    return openvino


@dataclass(frozen=True)
class CompileSettings:
    """Precision and threads of compiled graphs."""

    precision: str
    threads: int | None

    @property
    def exact(self) -> bool:
        """Whether results equal torch's, decisions included."""
        return self.precision == "fp32"

    def properties(self) -> dict[str, Any]:
        """Return OpenVINO's properties: one request at a time, and fp32 without lower precision inside."""
        result: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "bf16" if self.precision == "bf16" else "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP if self.precision == "int8" else 0,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
        }
        return result if self.threads is None else {**result, "INFERENCE_NUM_THREADS": self.threads}


class Graph:
    """A compiled graph. Threads may share it, because each has its own request."""

    def __init__(self, compiled: Any, sample: NamedTensors) -> None:
        self.compiled, self.local = compiled, threading.local()
        self.names: list[str] = [given.get_node().get_friendly_name() for given in compiled.inputs]
        shapes = [list(given.partial_shape)[1:] for given in compiled.outputs]
        self.widths = [tuple(n.get_length() for n in shape if n.is_static) for shape in shapes]  # behind the first
        self.tensor = import_openvino().Tensor
        self.request().infer([sample[name].numpy() for name in self.names])

    def request(self) -> Any:
        """Return this thread's request."""
        try:
            return self.local.request
        except AttributeError:
            self.local.request = self.compiled.create_infer_request()
            return self.local.request

    def __call__(self, given: Mapping[str, Any], outputs: Sequence[Tensor]) -> None:
        """Run on inputs by name, tensors or results of `share`; results are written into `outputs`."""
        request, shared = self.request(), self.tensor
        for place, name in enumerate(self.names):
            value = given[name]
            request.set_input_tensor(place, share(value) if isinstance(value, Tensor) else value)
        for place, out in enumerate(outputs):
            request.set_output_tensor(place, shared(out.numpy(), shared_memory=True))
        request.infer({}, share_outputs=True)


def share(value: Tensor | np.ndarray[Any, Any]) -> Any:
    """Return an OpenVINO tensor over the same memory."""
    array = value.contiguous().numpy() if isinstance(value, Tensor) else value
    return import_openvino().Tensor(array, shared_memory=True)


class _Function(nn.Module):
    """The function of a specification as a module with positional inputs, for the tracer."""

    def __init__(self, spec: GraphSpec) -> None:
        super().__init__()
        self.function, self.names = spec.function, list(spec.samples[0].given)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return self.function(dict(zip(self.names, given, strict=True)))


def convert(spec: GraphSpec, constants: Sequence[Tensor]) -> Any:
    """Convert a traced function into an OpenVINO model by its front end, because `convert_model` sends telemetry."""
    import_openvino()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    first, second = (sample.given for sample in spec.samples)
    quiet, plain = warnings.catch_warnings(), torch.inference_mode(False)
    with quiet, plain, torch.no_grad(), without_gradients(constants):
        warnings.simplefilter("ignore")  # the tracer warns about shapes, which are dynamic on purpose
        options = {"check_trace": False}
        decoder = TorchScriptPythonDecoder(_Function(spec), example_input=tuple(first.values()), trace_kwargs=options)
        front = FrontEndManager().load_by_framework("pytorch")
        model = front.convert(front.load(decoder))
    free = {name: [n if n == second[name].shape[i] else -1 for i, n in enumerate(t.shape)] for name, t in first.items()}
    given = dict(zip(first, model.inputs, strict=True))
    for name, port in given.items():
        port.get_node().set_friendly_name(name)
    model.reshape({port: import_openvino().PartialShape(free[name]) for name, port in given.items()})
    for parameter in list(model.get_parameters()):
        if not parameter.output(0).get_target_inputs():
            model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()
    return model


def quantise(model: Any) -> None:
    """Store weights of linear layers in 8 bits, one scale per output, in place; activations are rounded at run time."""
    from openvino import Type
    from openvino import opset13 as ops

    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        weight = node.input_value(1).get_node()
        if weight.get_type_name() != "Constant" or len(weight.shape) != 2 or not node.get_attributes()["transpose_b"]:
            continue
        values = weight.data.astype(np.float32)  # [outputs, inputs]
        scale = np.maximum(np.abs(values).max(1, keepdims=True), 1e-12) / 127
        whole = ops.constant(np.round(values / scale).astype(np.int8))
        node.input(1).replace_source_output(ops.multiply(ops.convert(whole, Type.f32), ops.constant(scale)).output(0))
