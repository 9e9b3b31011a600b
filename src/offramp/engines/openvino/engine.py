"""OpenVINO on the CPU: layers, exits and predictors compiled one by one with dynamic shapes, on first use.

Precision: fp32 takes the same decisions as torch. bf16 computes layers in bfloat16. int8 stores weights in 8 bits (one
scale per output) and rounds the activations of each token by itself (one scale for `GROUP` values), so no token shares
a scale with another row: a batch does not change an answer, and no calibration is needed. Embeddings and exits stay in
fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from offramp.backbones import Encoder
from offramp.core.engine import Engine, ExitHeads, Segment
from offramp.core.layout import AttentionScores, Layout
from offramp.core.packed import Packed
from offramp.engines import EngineOptions
from offramp.engines.openvino import fused_graphs, graphs, tracing
from offramp.engines.openvino.cache import GraphCache
from offramp.engines.openvino.inputs import even_columns, even_inputs, mostly_filler, padded, ragged_inputs, row_inputs
from offramp.engines.openvino.padding import padded_rows, padded_tokens
from offramp.engines.openvino.runtime import CompileSettings, Graph, import_openvino
from offramp.utils.cores import TURNS


@dataclass(frozen=True)
class OpenVINOEngine(Engine):
    """Executes compiled half-layers."""

    encoder: Encoder
    graph_cache: GraphCache

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.encoder.depth

    @cached_property
    def _first_equal_layer(self) -> list[int]:
        """For each layer the index of the first one with the same parameters (ALBERT); they share graphs."""
        first: dict[int, int] = {}
        return [first.setdefault(id(layer), number) for number, layer in enumerate(self.encoder.layers)]

    def embed(self, packed: Packed) -> Tensor:
        """Return the embeddings of the packed tokens."""
        graph = self.graph_cache.get_or_none("embed", lambda: graphs.embed_spec("embed", self.encoder.embed))
        if graph is None:
            return self.encoder.embed(packed)
        out = torch.empty(padded_tokens(packed.total), self.encoder.hidden)
        graph(_columns(packed), [out])
        return out[: packed.total]

    def run_segment(self, first: int, last: int, exit_heads: ExitHeads | None, packed: Packed) -> Segment:
        """Run layers together: embeddings with exit 0, the whole model, or a layer with its exit are one graph each."""
        heads = exit_heads.exit_heads if isinstance(exit_heads, CompiledExitHeads) else exit_heads
        if first == 0:
            if heads is not None and last == self.depth:
                logits = self._whole_model(heads, packed)
                if logits is not None:
                    return Segment(None, logits)
            joined = self._embeddings_with_exit(heads, packed) if heads is not None and last == 0 else None
            if joined is not None:
                return joined
            packed, first = packed.with_states(self.embed(packed)), 1
        if last < first:
            return Segment(packed.states, None)
        if heads is None or not self._joins_exits(packed.layout):
            return Segment(self._layers(range(first, last + 1), packed.states, packed.layout), None)
        below = range(first, last)
        if below:
            packed = packed.with_states(self._layers(below, packed.states, packed.layout))
        joined = self._layer_with_exit(last, heads, packed)
        return joined or Segment(self._layers(range(last, last + 1), packed.states, packed.layout), None)

    def _layers(self, layers: range, x: Tensor, where: Layout) -> Tensor:
        """Run whole layers: all of them at once, or one by one (graphs of other ranges would hold weights again).

        In low precision always one by one: a new graph is checked on random states, where six layers in a row make a
        large difference of a small one (int8: 0.06 after one layer of MiniLM, 0.9 after six)."""
        if len(layers) == self.depth and self.graph_cache.settings.exact:
            return self._same(0, "whole", x, where)[0]
        for layer in layers:
            x = self._same(layer, "whole", x, where)[0]
        return x

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, AttentionScores | None]:
        """Run the first half of a layer (1…depth)."""
        half = "scored" if scores else "attend"
        if queries is keys:
            result = self._same(layer, half, keys, where)
        else:
            result = self._idle(layer, half, queries, keys, where)
        return result[0], AttentionScores(result[1], result[2]) if scores else None

    def feed(self, layer: int, x: Tensor) -> Tensor:
        """Run the second half of a layer."""
        out = torch.empty(padded_tokens(x.shape[0]), x.shape[1])
        self._graph(layer, "feed", graphs.feed_spec)({"x": padded(x, len(out))}, [out])
        return out[: x.shape[0]]

    def _embeddings_with_exit(self, heads: ExitHeads, packed: Packed) -> Segment | None:
        """Run embeddings and exit 0 in one graph; None where that cannot be compiled or rows are too uneven."""
        where = packed.layout
        name = f"embeddings-exit-{'even' if where.even else 'ragged'}"
        build_spec = fused_graphs.even_embeddings_spec if where.even else fused_graphs.ragged_embeddings_spec
        graph = self.graph_cache.get_or_none(name, lambda: build_spec(name, self.encoder.embed, partial(heads, 0)))
        if graph is None or (not where.even and mostly_filler(where)):
            return None
        out, logits = self._outputs(packed, graph, heads.per_token)
        if where.even:
            graph(even_columns(where, graph, packed.tokens), [out, logits])
        else:
            graph({**_columns(packed), **ragged_inputs(where), **row_inputs(where, graph)}, [out, logits])
        return _cut(packed, out, logits, heads.per_token)

    def _joins_exits(self, where: Layout) -> bool:
        """Whether a layer and its exit run as one graph: in fp32, where layers do not share their weights."""
        return (
            self.graph_cache.settings.exact
            and len(set(self._first_equal_layer)) == self.depth
            and (where.even or not mostly_filler(where))
        )

    def _layer_with_exit(self, layer: int, heads: ExitHeads, packed: Packed) -> Segment | None:
        """Run a layer and its exit in one graph; None where that cannot be compiled."""
        where = packed.layout
        name = f"layer-{layer}-exit-{'even' if where.even else 'ragged'}"
        build_spec = fused_graphs.even_exit_spec if where.even else fused_graphs.ragged_exit_spec
        own, head, hidden = self.encoder.layers[layer - 1], partial(heads, layer), self.encoder.hidden
        graph = self.graph_cache.get_or_none(name, lambda: build_spec(name, own, head, hidden))
        if graph is None:
            return None
        out, logits = self._outputs(packed, graph, heads.per_token)
        if where.even:
            graph(*even_inputs(where, graph, packed.states, [out, logits], packed.tokens))
        else:
            x = padded(packed.states, len(out))
            graph({**_columns(packed), "x": x, **ragged_inputs(where), **row_inputs(where, graph)}, [out, logits])
        return _cut(packed, out, logits, heads.per_token)

    def _whole_model(self, heads: ExitHeads, packed: Packed) -> Tensor | None:
        """Run everything as one graph, in fp32 only, since embeddings and exits stay in fp32; None if impossible."""
        where = packed.layout
        name = "model-even" if where.even else "model-ragged"
        graph = (
            self.graph_cache.get_or_none(name, lambda: self._model(name, heads))
            if self.graph_cache.settings.exact
            else None
        )
        if graph is None or (not where.even and mostly_filler(where)):
            return None
        out = _answers(packed, graph.widths[0], heads.per_token, where.even)
        if where.even:
            graph(even_columns(where, graph, packed.tokens), [out])
        else:
            graph({**_columns(packed), **ragged_inputs(where), **row_inputs(where, graph)}, [out])
        return out[: packed.total if heads.per_token else packed.count]

    def _outputs(self, packed: Packed, graph: Graph, per_token: bool) -> tuple[Tensor, Tensor]:
        """Return empty tensors for states and logits."""
        even = packed.layout.even
        states = torch.empty(packed.total if even else padded_tokens(packed.total), self.encoder.hidden)
        return states, _answers(packed, graph.widths[1], per_token, even)

    def _model(self, name: str, last: ExitHeads) -> graphs.GraphSpec:
        build_spec = fused_graphs.even_model_spec if name == "model-even" else fused_graphs.ragged_model_spec
        return build_spec(name, fused_graphs.Parts(self.encoder.embed, self.encoder.layers, partial(last, self.depth)))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold a turn on the cores, as every step goes back to Python, and give torch one thread meanwhile.

        After every small product torch's other threads would spin on the cores.
        """
        with TURNS.turn():
            before = torch.get_num_threads()
            if before == 1:
                yield
                return
            torch.set_num_threads(1)
            try:
                yield
            finally:
                torch.set_num_threads(before)

    def compile_heads(self, exit_heads: ExitHeads) -> ExitHeads:
        """Return compiled exit heads."""
        return CompiledExitHeads(self, exit_heads)

    def _graph(self, layer: int, name: str, build_spec: Any) -> Graph:
        """Return a graph of a layer, or of all layers (0)."""
        first = self._first_equal_layer[layer - 1] if layer else 0
        name = f"layer-{first + 1}-{name}" if layer else f"layers-{name}"
        stack = [self.encoder.layers[first]] if layer else list(self.encoder.layers)
        return self.graph_cache.get(name, lambda: build_spec(name, stack, hidden=self.encoder.hidden))

    def _same(self, layer: int, half: str, x: Tensor, where: Layout) -> list[Tensor]:
        """Run a graph in which all tokens are queries and keys."""
        count = x.shape[0] if where.even else padded_tokens(x.shape[0])
        outputs = [torch.empty(count, x.shape[1]), *(torch.empty(count) for _ in range(2 * (half == "scored")))]
        if where.even:
            graph = self._graph(layer, f"{half}-even", partial(graphs.even_layer_spec, half=half))
            graph(*even_inputs(where, graph, x, outputs))
            return outputs
        graph = self._graph(layer, f"{half}-ragged", partial(graphs.ragged_layer_spec, half=half))
        graph({"x": padded(x, count), **ragged_inputs(where)}, outputs)
        return [out[: x.shape[0]] for out in outputs]

    def _idle(self, layer: int, half: str, queries: Tensor, keys: Tensor, where: Layout) -> list[Tensor]:
        """Run a graph in which some tokens are keys only."""
        padded_queries = padded(queries, padded_tokens(queries.shape[0]))
        padded_keys = padded(keys, padded_tokens(keys.shape[0]))
        scores = (torch.empty(len(padded_keys)) for _ in range(2 * (half == "scored")))
        outputs = [torch.empty(padded_queries.shape), *scores]
        graph = self._graph(layer, f"{half}-idle", partial(graphs.idle_layer_spec, half=half))
        graph({"queries": padded_queries, "x": padded_keys, **ragged_inputs(where)}, outputs)
        return [outputs[0][: queries.shape[0]], *(out[: keys.shape[0]] for out in outputs[1:])]


@dataclass(frozen=True)
class CompiledExitHeads:
    """Exit heads, exit units and predictors, compiled on first use; what cannot be traced runs in torch."""

    engine: OpenVINOEngine
    exit_heads: ExitHeads

    @property
    def per_token(self) -> bool:
        """Whether logits are per token."""
        return self.exit_heads.per_token

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        """Return logits per row or per token."""
        return self._run(f"head-{layer}", partial(self.exit_heads, layer), packed, self.per_token)

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """Return the output of the learned exit unit for each row."""
        return self._run(f"exit_unit-{layer}", partial(self.exit_heads.exit_unit, layer), packed, False)

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """Return the output of the method's predictor for each token."""
        return self._run(f"predictor-{layer}", partial(self.exit_heads.predictor, layer), packed, True)

    def _run(self, name: str, function: Any, packed: Packed, per_token: bool) -> Tensor:
        hidden = self.engine.encoder.hidden
        graph = self.engine.graph_cache.get_or_none(name, lambda: graphs.head_spec(name, function, hidden))
        if graph is None or mostly_filler(packed.layout):
            result: Tensor = function(packed)
            return result
        x = padded(packed.states, padded_tokens(packed.total))
        out = _answers(packed, graph.widths[0], per_token, False)
        graph({**_columns(packed), "x": x, **row_inputs(packed.layout, graph)}, [out])
        return out[: packed.total if per_token else packed.count]


def _columns(packed: Packed) -> dict[str, Tensor]:
    """Return the id columns of the tokens, padded."""
    return {name: padded(packed.tokens[name], padded_tokens(packed.total)) for name in tracing.IDS}


def _answers(packed: Packed, width: tuple[int, ...], per_token: bool, even: bool) -> Tensor:
    """Return an empty tensor for logits per token or row, with room for filler unless rows have one length."""
    count, round_up = (packed.total, padded_tokens) if per_token else (packed.count, padded_rows)
    return torch.empty((count if even else round_up(count), *width))


def _cut(packed: Packed, states: Tensor, answers: Tensor, per_token: bool) -> Segment:
    """Return states and logits without filler."""
    return Segment(states[: packed.total], answers[: packed.total if per_token else packed.count])


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute."""
    return {"torch": torch.__version__, "openvino": import_openvino().get_version()}


def make(encoder: Encoder, options: EngineOptions) -> OpenVINOEngine:
    """Create the engine over an encoder's parameters."""
    return OpenVINOEngine(encoder, GraphCache(CompileSettings(options.precision, options.threads), options.cache))
