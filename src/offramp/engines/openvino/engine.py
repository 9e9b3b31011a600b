"""OpenVINO on the CPU: layers, exits and predictors compiled one by one, with free shapes, when first needed.

Precision: fp32 takes the same decisions as torch. bf16 computes layers in bfloat16. int8 keeps weights in 8 bits (one
scale for each output) and rounds each token's activations by itself as it comes (one scale for `GROUP` values), so no
token ever shares a scale with another row: the law of the house holds, and no calibration is needed. Embeddings and
exits stay in fp32.
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
from offramp.engines import How
from offramp.engines.openvino import fused_graphs as _joined
from offramp.engines.openvino import graphs as _sketch
from offramp.engines.openvino import tracing as _traced
from offramp.engines.openvino.cache import Shelf
from offramp.engines.openvino.inputs import block, columns, filled, inputs, rows, sparse
from offramp.engines.openvino.padding import many, room
from offramp.engines.openvino.runtime import Graph, Settings, library


@dataclass(frozen=True)
class OpenVINOEngine(Engine):
    """Runs compiled half-layers."""

    encoder: Encoder
    shelf: Shelf

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.encoder.depth

    @cached_property
    def _twins(self) -> list[int]:
        """For each layer the first one with the same parameters (ALBERT): they share graphs."""
        first: dict[int, int] = {}
        return [first.setdefault(id(layer), number) for number, layer in enumerate(self.encoder.layers)]

    def embed(self, packed: Packed) -> Tensor:
        """Embeddings of the packed tokens."""
        graph = self.shelf.attempt("embed", lambda: _sketch.embed("embed", self.encoder.embed))
        if graph is None:
            return self.encoder.embed(packed)
        out = torch.empty(room(packed.total), self.encoder.hidden)
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
        if len(layers) == self.depth and self.shelf.settings.exact:
            return self._same(0, "whole", x, where)[0]
        for layer in layers:
            x = self._same(layer, "whole", x, where)[0]
        return x

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, AttentionScores | None]:
        """First half of a layer (1…depth)."""
        half = "scored" if scores else "attend"
        if queries is keys:
            made = self._same(layer, half, keys, where)
        else:
            made = self._idle(layer, half, queries, keys, where)
        return made[0], AttentionScores(made[1], made[2]) if scores else None

    def feed(self, layer: int, x: Tensor) -> Tensor:
        """Second half of a layer."""
        out = torch.empty(room(x.shape[0]), x.shape[1])
        self._graph(layer, "feed", _sketch.feed)({"x": filled(x, len(out))}, [out])
        return out[: x.shape[0]]

    def _embeddings_with_exit(self, heads: ExitHeads, packed: Packed) -> Segment | None:
        """Run embeddings and exit 0 in one graph; None where that cannot be compiled or rows are too uneven."""
        where = packed.layout
        name = f"opened-{'even' if where.even else 'ragged'}"
        draw = _joined.opened_even if where.even else _joined.opened_ragged
        graph = self.shelf.attempt(name, lambda: draw(name, self.encoder.embed, partial(heads, 0)))
        if graph is None or (not where.even and sparse(where)):
            return None
        out, logits = self._outputs(packed, graph, heads.per_token)
        if where.even:
            graph(columns(where, graph, packed.tokens), [out, logits])
        else:
            graph({**_columns(packed), **inputs(where), **rows(where, graph)}, [out, logits])
        return _cut(packed, out, logits, heads.per_token)

    def _joins_exits(self, where: Layout) -> bool:
        """Whether a layer and its exit run as one graph: in fp32, where layers do not share their weights."""
        return self.shelf.settings.exact and len(set(self._twins)) == self.depth and (where.even or not sparse(where))

    def _layer_with_exit(self, layer: int, heads: ExitHeads, packed: Packed) -> Segment | None:
        """Run a layer and its exit in one graph; None where that cannot be compiled."""
        where = packed.layout
        name = f"layer-{layer}-exit-{'even' if where.even else 'ragged'}"
        draw = _joined.exit_even if where.even else _joined.exit_ragged
        own, head, wide = self.encoder.layers[layer - 1], partial(heads, layer), self.encoder.hidden
        graph = self.shelf.attempt(name, lambda: draw(name, own, head, wide))
        if graph is None:
            return None
        out, logits = self._outputs(packed, graph, heads.per_token)
        if where.even:
            graph(*block(where, graph, packed.states, [out, logits], packed.tokens))
        else:
            x = filled(packed.states, len(out))
            graph({**_columns(packed), "x": x, **inputs(where), **rows(where, graph)}, [out, logits])
        return _cut(packed, out, logits, heads.per_token)

    def _whole_model(self, heads: ExitHeads, packed: Packed) -> Tensor | None:
        """Run everything as one graph, in fp32 only, since embeddings and exits stay in fp32; None if impossible."""
        where = packed.layout
        name = "model-even" if where.even else "model-ragged"
        graph = self.shelf.attempt(name, lambda: self._model(name, heads)) if self.shelf.settings.exact else None
        if graph is None or (not where.even and sparse(where)):
            return None
        out = _answers(packed, graph.widths[0], heads.per_token, where.even)
        if where.even:
            graph(columns(where, graph, packed.tokens), [out])
        else:
            graph({**_columns(packed), **inputs(where), **rows(where, graph)}, [out])
        return out[: packed.total if heads.per_token else packed.count]

    def _outputs(self, packed: Packed, graph: Graph, per_token: bool) -> tuple[Tensor, Tensor]:
        """Room for states and answers."""
        even = packed.layout.even
        states = torch.empty(packed.total if even else room(packed.total), self.encoder.hidden)
        return states, _answers(packed, graph.widths[1], per_token, even)

    def _model(self, name: str, last: ExitHeads) -> _sketch.Sketch:
        draw = _joined.model_even if name == "model-even" else _joined.model_ragged
        return draw(name, _joined.Parts(self.encoder.embed, self.encoder.layers, partial(last, self.depth)))

    @contextmanager
    def running(self) -> Iterator[None]:
        """One thread for torch: after every small product its others would spin where graphs want to compute."""
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

    def _graph(self, layer: int, name: str, draw: Any) -> Graph:
        """A graph of a layer, or of all (0)."""
        first = self._twins[layer - 1] if layer else 0
        name = f"layer-{first + 1}-{name}" if layer else f"layers-{name}"
        stack = [self.encoder.layers[first]] if layer else list(self.encoder.layers)
        return self.shelf.get(name, lambda: draw(name, stack, hidden=self.encoder.hidden))

    def _same(self, layer: int, half: str, x: Tensor, where: Layout) -> list[Tensor]:
        """All tokens are queries and keys."""
        count = x.shape[0] if where.even else room(x.shape[0])
        outputs = [torch.empty(count, x.shape[1]), *(torch.empty(count) for _ in range(2 * (half == "scored")))]
        if where.even:
            graph = self._graph(layer, f"{half}-even", partial(_sketch.layer_even, half=half))
            graph(*block(where, graph, x, outputs))
            return outputs
        graph = self._graph(layer, f"{half}-ragged", partial(_sketch.layer_ragged, half=half))
        graph({"x": filled(x, count), **inputs(where)}, outputs)
        return [out[: x.shape[0]] for out in outputs]

    def _idle(self, layer: int, half: str, queries: Tensor, keys: Tensor, where: Layout) -> list[Tensor]:
        """Some tokens are keys only."""
        asks, seen = filled(queries, room(queries.shape[0])), filled(keys, room(keys.shape[0]))
        outputs = [torch.empty(asks.shape), *(torch.empty(len(seen)) for _ in range(2 * (half == "scored")))]
        graph = self._graph(layer, f"{half}-idle", partial(_sketch.layer_idle, half=half))
        graph({"queries": asks, "x": seen, **inputs(where)}, outputs)
        return [outputs[0][: queries.shape[0]], *(out[: keys.shape[0]] for out in outputs[1:])]


@dataclass(frozen=True)
class CompiledExitHeads:
    """Exits, learned units and token predictors, compiled when first asked; what cannot be traced stays torch's."""

    engine: OpenVINOEngine
    exit_heads: ExitHeads

    @property
    def per_token(self) -> bool:
        """Whether answers are per token."""
        return self.exit_heads.per_token

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        """Logits per row or per token."""
        return self._run(f"head-{layer}", partial(self.exit_heads, layer), packed, self.per_token)

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """How unsure a learned unit is of each row's answer."""
        return self._run(f"exit_unit-{layer}", partial(self.exit_heads.exit_unit, layer), packed, False)

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """What a method's own predictor says of each token."""
        return self._run(f"predictor-{layer}", partial(self.exit_heads.predictor, layer), packed, True)

    def _run(self, name: str, function: Any, packed: Packed, per_token: bool) -> Tensor:
        hidden = self.engine.encoder.hidden
        graph = self.engine.shelf.attempt(name, lambda: _sketch.head(name, function, hidden))
        if graph is None or sparse(packed.layout):
            made: Tensor = function(packed)
            return made
        x = filled(packed.states, room(packed.total))
        out = _answers(packed, graph.widths[0], per_token, False)
        graph({**_columns(packed), "x": x, **rows(packed.layout, graph)}, [out])
        return out[: packed.total if per_token else packed.count]


def _columns(packed: Packed) -> dict[str, Tensor]:
    """What is known of each token, filled up."""
    return {name: filled(packed.tokens[name], room(packed.total)) for name in _traced.IDS}


def _answers(packed: Packed, wide: tuple[int, ...], per_token: bool, even: bool) -> Tensor:
    """Room for answers of each token or row, and of filler unless rows are of one length."""
    count, up = (packed.total, room) if per_token else (packed.count, many)
    return torch.empty((count if even else up(count), *wide))


def _cut(packed: Packed, states: Tensor, answers: Tensor, per_token: bool) -> Segment:
    """Return states and logits without filler."""
    return Segment(states[: packed.total], answers[: packed.total if per_token else packed.count])


def versions() -> dict[str, str]:
    """What computes."""
    return {"torch": torch.__version__, "openvino": library().get_version()}


def make(encoder: Encoder, how: How) -> OpenVINOEngine:
    """The engine over an encoder's own parameters."""
    return OpenVINOEngine(encoder, Shelf(Settings(how.precision, how.threads), how.cache))
