"""The C++ engine: BERT-like encoders in fp32, bf16 or int8; embeddings, pooled features, norms and softmax are fp32.

A row's numbers do not depend on its batch at all, bit by bit, in every precision: every sum has one fixed order, and
int8 activations have a scale per token. Where a policy is a rule over exits, a batch goes in as token ids and comes out
as logits and exit layers; other policies run segment by segment on the same kernels.

An engine is for parameters that do not change any more. It keeps copies of matrices, packed, and of norms, but reads
tables by token (embeddings, bags of words) where the modules keep them, because they can be most of the memory. A table
that was changed in place raises an error at the next call; other changes are not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offramp.backbones import EmbeddingTables, Encoder
from offramp.backbones._post_norm import PostNormLayer
from offramp.core.columns import ID, PATIENCE, POSITION, TEMPERATURES, THRESHOLDS, TYPE
from offramp.core.engine import Engine, ExitHeads, RuleResult, Segment
from offramp.core.layout import AttentionScores, Layout
from offramp.core.packed import Packed, RowArrays
from offramp.core.rules import ExitRule
from offramp.engines import EngineOptions
from offramp.engines.native.heads import NativeExitHeads
from offramp.engines.native.library import import_native, instruction_set
from offramp.engines.native.weights import Floats, Matrix, SharedTables, as_floats, pack_matrices
from offramp.errors import OfframpError
from offramp.utils.cores import usable_cores

ACTIVATIONS = {  # class of the activation module → its name in C++
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "ReLU": "relu",
}
MOST_MODELS = 8  # whose exit heads one engine keeps
FIRST_PRECISION = {"bf16": "avx512_bf16"}  # precisions that need an instruction set


class NativeEngine(Engine):
    """Runs layers, exits and whole rules in C++."""

    rule_measures: ClassVar[frozenset[str]] = frozenset(
        {"entropy", "normalised_entropy", "least_confidence", "exit_unit", "patience"}
    )

    takes_arrays: ClassVar[bool] = True

    def __init__(self, encoder: Encoder, native: Any, precision: str) -> None:
        self.encoder, self.native, self.precision = encoder, native, precision
        self._tables = SharedTables() if encoder.tables is None else _shared_tables(encoder.tables)
        self._depth = encoder.depth
        self._heads: dict[int, NativeExitHeads] = {}
        self._lock = threading.Lock()

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self._depth

    @property
    def instruction_set(self) -> str:
        """The instruction set of the kernels that run."""
        name: str = self.native.instruction_set
        return name

    def embed(self, packed: Packed) -> Tensor:
        """Return the embeddings of the packed tokens."""
        return self._run(0, 0, packed, None)[0]

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, AttentionScores | None]:
        """Run the first half of a layer (1…depth)."""
        same = queries is keys
        keys = keys.contiguous()
        queries = keys if same else queries.contiguous()
        output = torch.empty(queries.shape[0], self.encoder.hidden)
        given = AttentionScores(torch.empty(keys.shape[0]), torch.empty(keys.shape[0])) if scores else None
        self.native.attend(
            layer,
            queries.numpy(),
            keys.numpy(),
            where.query_lengths,
            where.key_lengths,
            where.query_position.contiguous().numpy(),
            where.key_position.contiguous().numpy(),
            output.numpy(),
            None if given is None else given.columns.numpy(),
            None if given is None else given.diagonal.numpy(),
            same,
        )
        return output, given

    def feed(self, layer: int, x: Tensor) -> Tensor:
        """Run the second half of a layer."""
        output = torch.empty(x.shape)
        self.native.feed(layer, x.contiguous().numpy(), output.numpy())
        return output

    def run_segment(self, first: int, last: int, exit_heads: ExitHeads | None, packed: Packed) -> Segment:
        """Run layers together, with the exit after the last one where it is described."""
        return Segment(*self._run(first, last, packed, exit_heads))

    def runs_rule(self, rule: ExitRule, exit_heads: ExitHeads) -> bool:
        """Return whether all exits that the rule consults can be computed in C++."""
        return self._plan(rule, self._own(exit_heads)) is not None

    def run_rule(self, rule: ExitRule, exit_heads: ExitHeads, packed: Packed) -> RuleResult:
        """Run a whole batch under an exit rule, in one call."""
        tokens, rows = packed.tokens, packed.rows
        given: list[Any] = [None, None, None]  # thresholds, temperatures and patience of each row
        if rule.by_row and rule.measure == "patience":
            given[2] = rows[PATIENCE].contiguous().numpy()
        elif rule.by_row:
            given[0] = rows[THRESHOLDS].contiguous().numpy()
            given[1] = rows[TEMPERATURES].contiguous().numpy() if TEMPERATURES in rows else None
        columns = (tokens[ID].numpy(), tokens[TYPE].numpy(), tokens[POSITION].numpy(), packed.lengths.numpy())
        logits, exit_layer = self._run_rule(rule, exit_heads, RowArrays(*columns), given)
        return RuleResult(torch.from_numpy(logits), torch.from_numpy(exit_layer))

    def run_rule_arrays(
        self, rule: ExitRule, exit_heads: ExitHeads, rows: RowArrays
    ) -> tuple[Floats, NDArray[np.int64]]:
        """Run rows of token ids under an exit rule, in one call and without tensors."""
        return self._run_rule(rule, exit_heads, rows, (None, None, None))

    def _run_rule(
        self, rule: ExitRule, exit_heads: ExitHeads, rows: RowArrays, by_row: Sequence[Any]
    ) -> tuple[Floats, NDArray[np.int64]]:
        heads, count = self._own(exit_heads), len(rows.lengths)
        plan = self._plan(rule, heads)
        assert plan is not None, "the loop calls runs_rule first"
        self._tables.check()
        heads.check_tables()
        logits = np.empty((count, heads.outputs(self.depth)), np.float32)
        exit_layer = np.empty(count, np.int64)
        self.native.run_rule(*plan, *rows, *by_row, logits, exit_layer)
        return logits, exit_layer

    def compile_heads(self, exit_heads: ExitHeads) -> ExitHeads:
        """Return the same exit heads in C++ where they are described."""
        return self._own(exit_heads)

    def _own(self, exit_heads: ExitHeads) -> NativeExitHeads:
        if isinstance(exit_heads, NativeExitHeads):
            return exit_heads
        found = self._heads.get(id(exit_heads))  # kept with what it was built from, so the number stays its own
        if found is None:
            found = NativeExitHeads(self.native, exit_heads, self.precision)
            if found.described:  # others have nothing to keep, and may be new ones with every batch
                with self._lock:
                    kept = list(self._heads.items())[1 - MOST_MODELS :]
                    self._heads = {**dict(kept), id(exit_heads): found}
        return found

    def _plan(self, rule: ExitRule, heads: NativeExitHeads) -> tuple[Any, list[Any], Any] | None:
        """Return a rule, the heads by layer and the exit unit as C++ takes them; None if that cannot be."""
        if rule in (plans := heads.plans):
            return plans[rule]
        plan = self._make_plan(rule, heads)
        # settings that change with every call are not kept for ever; other threads may read the old dictionary
        heads.plans = {**plans, rule: plan} if len(plans) < 100 else {rule: plan}
        return plan

    def _make_plan(self, rule: ExitRule, heads: NativeExitHeads) -> tuple[Any, list[Any], Any] | None:
        if rule.measure not in self.rule_measures:
            return None
        wanted = {*rule.consulted, self.depth}
        by_layer = [heads.head(layer) if layer in wanted else None for layer in range(self.depth + 1)]
        unit = heads.unit() if rule.measure == "exit_unit" and rule.consulted else None
        missing = rule.measure == "exit_unit" and rule.consulted and unit is None
        if missing or any(by_layer[layer] is None for layer in wanted):
            return None
        settings = (rule.exits, rule.thresholds, rule.temperatures, rule.patience, rule.tolerance, rule.by_row)
        return import_native().Rule(rule.measure, *settings), by_layer, unit

    def _run(self, first: int, last: int, packed: Packed, exit_heads: ExitHeads | None) -> tuple[Tensor, Tensor | None]:
        tokens, head, logits = packed.tokens, None, None
        if first == 0:
            self._tables.check()
        if exit_heads is not None:
            heads = self._own(exit_heads)
            head = heads.head(last)
            heads.check_tables()
            logits = None if head is None else torch.empty(packed.count, heads.outputs(last))
        states = torch.empty(packed.total, self.encoder.hidden)
        self.native.run_layers(
            first,
            last,
            packed.lengths.numpy(),
            tokens[ID].numpy(),
            tokens[TYPE].numpy(),
            tokens[POSITION].numpy(),
            None if first == 0 else packed.states.contiguous().numpy(),
            states.numpy(),
            head,
            None if logits is None else logits.numpy(),
        )
        return states, logits


def unserved_reason(encoder: Encoder, options: EngineOptions) -> str:
    """Return why this engine cannot run a model; empty if it can. The package must be installed."""
    if encoder.tables is None:
        return "its embeddings are more than look-ups"
    if not isinstance(encoder.final, nn.Identity):
        return "it has a norm before every head"
    for layer in encoder.layers:
        if type(layer) is not PostNormLayer:
            return f"its layers are of the kind {type(layer).__name__}"
        if type(layer.parts.activation).__name__ not in ACTIVATIONS:
            return f"its activation is {type(layer.parts.activation).__name__}"
        distances = layer.distance_logits()
        if layer.query_scale != 1.0:
            return "its queries are scaled"
        if distances is not None and (distances.with_queries is not None or distances.with_keys is not None):
            return "its attention multiplies states with distances"
    needed = FIRST_PRECISION.get(options.precision)
    available: list[str] = import_native().instruction_sets()
    if needed is not None and available.index(instruction_set()) < (
        available.index(needed) if needed in available else len(available)
    ):
        return f"{options.precision} needs the instruction set {needed}, and {instruction_set()} runs"
    return ""


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute, and the instruction set."""
    return {
        "torch": torch.__version__,
        "offramp-native": import_native().__version__,
        "instruction_set": instruction_set(),
    }


def make(encoder: Encoder, options: EngineOptions) -> NativeEngine:
    """Create the engine from an encoder's parameters, which may not change any more."""
    import_native()
    reason = unserved_reason(encoder, options)
    if reason:
        raise OfframpError(
            "the native engine", f"a model it does not serve: {reason}", "use --engine openvino or torch"
        )
    native = _build(encoder, options)
    return NativeEngine(encoder, native, options.precision)


def _build(encoder: Encoder, options: EngineOptions) -> Any:
    tables = encoder.tables
    assert tables is not None, "checked by unserved_reason"
    distinct = list({id(layer): layer for layer in encoder.layers}.values())  # ALBERT shares layers
    matrices = [matrix for layer in distinct for matrix in _layer_matrices(layer)]
    packed = pack_matrices(matrices, options.precision, options.packed_weights)
    native = _embeddings(encoder.hidden, _threads(options), tables)
    by_layer = {id(layer): packed[4 * i : 4 * i + 4] for i, layer in enumerate(distinct)}
    for layer in encoder.layers:
        assert isinstance(layer, PostNormLayer), "checked by unserved_reason"
        parts = layer.parts
        kept = parts.query.out_features if layer.columns is None else len(layer.columns)
        native.add_layer(
            layer.heads,
            kept // layer.heads,
            *by_layer[id(layer)],
            ACTIVATIONS[type(parts.activation).__name__],
            *_norm(parts.attention_norm),
            *_norm(parts.feed_norm),
            _distance_bias(layer),
        )
    return native


def _threads(options: EngineOptions) -> int:
    most: int = import_native().MOST_THREADS
    if options.threads is not None and options.threads > most:
        raise OfframpError(
            "a number of threads of the native engine",
            f"threads={options.threads}",
            f"use 1 to {most}, or leave it out",
        )
    return options.threads or min(usable_cores(), most)


def _shared_tables(tables: EmbeddingTables) -> SharedTables:
    types = None if tables.types is None else tables.types.weight
    return SharedTables(tables.words.weight, tables.positions.weight, types)


def _embeddings(hidden: int, threads: int, tables: EmbeddingTables) -> Any:
    projection = None
    if tables.projection is not None:
        linear = tables.projection
        bias = None if linear.bias is None else as_floats(linear.bias)
        projection = pack_matrices([Matrix(as_floats(linear.weight), bias)], "fp32", None)[0]
    return import_native().Encoder(
        hidden,
        threads,
        instruction_set(),
        as_floats(tables.words.weight),
        as_floats(tables.positions.weight),
        None if tables.types is None else as_floats(tables.types.weight),
        tables.first_position,
        *_norm(tables.norm),
        projection,
    )


def _layer_matrices(layer: Any) -> list[Matrix]:
    """Return a layer's four matrices: queries, keys and values as one, each filled up to whole panels."""
    own = layer.matrices()
    panel = import_native().PANEL
    parts = [(as_floats(weight), as_floats(bias)) for weight, bias in (own.query, own.key, own.value)]
    filler = -len(parts[0][0]) % panel
    weight = np.concatenate([np.pad(part, ((0, filler), (0, 0))) for part, _ in parts])
    bias = np.concatenate([np.pad(part, (0, filler)) for _, part in parts])
    rest = [Matrix(as_floats(weight), as_floats(bias)) for weight, bias in (own.out, own.up, own.down)]
    return [Matrix(weight, bias), *rest]


def _norm(norm: nn.LayerNorm) -> tuple[Floats, Floats, float]:
    return as_floats(norm.weight), as_floats(norm.bias), norm.eps


def _distance_bias(layer: PostNormLayer) -> NDArray[np.float32] | None:
    """Return what each distance adds to the attention scores of each head."""  # [heads, 2·reach + 1]
    distances = layer.distance_logits()
    if distances is None or distances.bias is None:
        return None
    table = distances.bias if distances.entries is None else distances.bias[distances.entries]
    return np.ascontiguousarray(as_floats(table).T)
