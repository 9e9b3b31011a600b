"""Exit heads in C++, built from their descriptions when first needed; heads that have none stay torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offramp.core.columns import ID, POSITION
from offramp.core.engine import ExitHeads
from offramp.core.head_spec import (
    ActivationStep,
    AttentionStep,
    DescribedExitHeads,
    HeadSpec,
    LinearStep,
    NormStep,
    Step,
)
from offramp.core.packed import Packed
from offramp.core.rules import ExitRule, Measure
from offramp.engines.native.library import import_native
from offramp.engines.native.weights import SharedTables, as_floats


class NativeExitHeads:
    """The exits of a model as the engine computes them."""

    def __init__(self, encoder: Any, exit_heads: ExitHeads, precision: str) -> None:
        self.encoder, self.exit_heads, self.precision = encoder, exit_heads, precision
        self.per_token = exit_heads.per_token
        described = isinstance(exit_heads, DescribedExitHeads) and not self.per_token
        self._described: DescribedExitHeads | None = exit_heads if described else None  # type: ignore[assignment]
        self.plans: dict[ExitRule, tuple[Any, list[Any], Any] | None] = {}  # what the engine prepared for each rule
        self._built: dict[int | str, Any] = {}
        self._outputs: dict[int | str, int] = {}
        self._tables: list[SharedTables] = []
        self._lock = threading.Lock()

    @property
    def described(self) -> bool:
        """Whether any exit can be computed in C++."""
        return self._described is not None

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        """Return the logits of the exit after a layer, per row or per token."""
        head = self.head(layer)
        if head is None:
            return self.exit_heads(layer, packed)
        return self._run(head, self._outputs[layer], packed)

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """Return the output of the learned exit unit for each row."""
        unit = self.unit()
        return self.exit_heads.exit_unit(layer, packed) if unit is None else self._run(unit, 1, packed)[:, 0]

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """Return the output of the method's own predictor for each token: torch computes it."""
        return self.exit_heads.predictor(layer, packed)

    def uncertainty(self, measure: Measure, logits: Tensor, temperatures: Tensor | None) -> Tensor:
        """Return how uncertain each row of logits is, as rules measure it."""  # [n, C], [n] → [n]
        values = torch.empty(len(logits))
        own = None if temperatures is None else temperatures.contiguous().numpy()
        import_native().measure_logits(measure, logits.float().contiguous().numpy(), own, values.numpy())
        return values

    def head(self, layer: int) -> Any | None:
        """Return the exit after a layer in C++; None if it cannot be."""
        described = self._described
        return None if described is None else self._build(layer, lambda: described.head_spec(layer))

    def unit(self) -> Any | None:
        """Return the learned exit unit in C++; None if it cannot be."""
        if self._described is None:
            return None
        unit = self._build("unit", self._described.exit_unit_spec)
        return unit if self._outputs.get("unit") == 1 else None

    def check_tables(self) -> None:
        """Refuse to run with tables of words that changed since a head was built."""
        for tables in self._tables:
            tables.check()

    def outputs(self, layer: int) -> int:
        """Return the number of logits of an exit that was built."""
        return self._outputs[layer]

    def _build(self, name: int | str, describe: Callable[[], HeadSpec | None]) -> Any | None:
        if name not in self._built:
            with self._lock:
                if name not in self._built:
                    spec = describe()
                    if spec is not None and spec.word_tables is not None:
                        self._tables.append(SharedTables(spec.word_tables.words, spec.word_tables.pairs))
                    self._outputs[name] = 0 if spec is None else _outputs(spec)
                    self._built[name] = None if spec is None else build_head(spec, self.precision)
        return self._built[name]

    def _run(self, head: Any, outputs: int, packed: Packed) -> Tensor:
        self.check_tables()
        logits = torch.empty(packed.count, outputs)
        columns = packed.tokens
        self.encoder.run_layers(
            1,
            0,  # no layer at all
            packed.lengths.numpy(),
            columns[ID].numpy(),
            None,
            columns[POSITION].numpy(),
            packed.states.contiguous().numpy(),
            None,
            head,
            logits.numpy(),
        )
        return logits


def build_head(spec: HeadSpec, precision: str) -> Any:
    """Return a head of the compiled package with copies of the parameters, tables by reference.

    Matrices that every token goes through have the precision of the layers, all others are fp32.
    """
    head = import_native().Head()
    for step in spec.token_steps:
        _add(head, step, True, precision)
    head.set_pools(list(spec.pooling))
    for step in spec.row_steps:
        _add(head, step, False, "fp32")
    tables = spec.word_tables
    if tables is not None:
        bias = None if tables.bias is None else as_floats(tables.bias)
        words, pairs = as_floats(tables.words), as_floats(tables.pairs)
        head.set_bag_of_words(words, pairs, *tables.factors, bias, tables.scale, tables.by_root_of_length)
    return head


def _add(head: Any, step: Step, tokens: bool, precision: str) -> None:
    if isinstance(step, LinearStep):
        bias = None if step.linear.bias is None else as_floats(step.linear.bias)
        head.add_linear(tokens, as_floats(step.linear.weight), bias, step.activation or "", precision)
    elif isinstance(step, NormStep):
        head.add_norm(tokens, as_floats(step.norm.weight), as_floats(step.norm.bias), step.norm.eps)
    elif isinstance(step, ActivationStep):
        head.add_activation(tokens, step.activation)
    else:
        assert isinstance(step, AttentionStep) and tokens, "attention runs over tokens"
        head.add_attention(step.heads)


def _outputs(spec: HeadSpec) -> int:
    widths = [step.linear.out_features for step in spec.row_steps if isinstance(step, LinearStep)]
    return widths[-1]
