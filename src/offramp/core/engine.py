"""What the loop requires of an engine, which executes layers, and of the exit heads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offramp.core.layout import AttentionScores, Layout
from offramp.core.packed import Packed, RowArrays
from offramp.core.rules import ExitRule, Measure


class Segment(NamedTuple):
    """Result of several layers run together."""

    states: Tensor | None  # [tokens, hidden]; None where the segment ends the model and gave logits
    logits: Tensor | None  # of the exit after the segment; None where the engine did not compute them with the layers


class RuleResult(NamedTuple):
    """Result of a whole batch under an exit rule."""

    logits: Tensor  # [rows, outputs], of the exit where each row left
    exit_layer: Tensor  # [rows] int64, CPU


class Engine(Protocol):
    """Executes half-layers; `run_segment` and `run_rule` are fast paths that an engine may add."""

    rule_measures: ClassVar[frozenset[str]] = frozenset()  # measures of the rules that `run_rule` understands
    takes_arrays: ClassVar[bool] = False  # whether `run_rule_arrays` exists, for rows that are nothing but token ids

    @property
    def depth(self) -> int:
        """Number of layers."""

    def embed(self, packed: Packed) -> Tensor:
        """Return the embeddings of the packed tokens."""  # [tokens, hidden]

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, AttentionScores | None]:
        """Run the first half of a layer (1…depth)."""

    def feed(self, layer: int, x: Tensor) -> Tensor:
        """Run the second half of a layer."""

    def run_segment(self, first: int, last: int, exit_heads: ExitHeads | None, packed: Packed) -> Segment:
        """Run layers first…last (0: the embeddings), with no policy in between.

        `exit_heads` is given where the exit after `last` will be read; an engine may compute its logits together with
        the layers, or leave them to the loop. By default one half-layer runs after the other.
        """
        x = self.embed(packed) if first == 0 else packed.states
        for layer in range(max(first, 1), last + 1):
            x = self.feed(layer, self.attend(layer, x, x, packed.layout, False)[0])
        return Segment(x, None)

    def runs_rule(self, rule: ExitRule, exit_heads: ExitHeads) -> bool:
        """Return whether `run_rule` serves a rule over these exit heads."""
        return rule.measure in self.rule_measures

    def run_rule(self, rule: ExitRule, exit_heads: ExitHeads, packed: Packed) -> RuleResult:
        """Run a whole batch under an exit rule; called only where `runs_rule` is true."""
        raise AssertionError(f"this engine lists no measures, so it is never given the rule {rule}")

    def run_rule_arrays(
        self, rule: ExitRule, exit_heads: ExitHeads, rows: RowArrays
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Run rows of token ids under a rule without tensors: logits, and the layer where each row left."""
        raise AssertionError(f"this engine takes no arrays, so it is never given the rule {rule}")

    def running(self) -> AbstractContextManager[None]:
        """Return a context held while a batch runs.

        An engine with its own threads restrains torch's meanwhile; one that goes back to Python after every step waits
        for a turn (`utils.cores`), because more callers than cores would only wait for the interpreter's lock.
        """
        return nullcontext()

    def compile_heads(self, exit_heads: ExitHeads) -> ExitHeads:
        """Return the same exit heads as this engine runs them; by default unchanged."""
        return exit_heads


class ExitHeads(Protocol):
    """The exits of a model, its learned exit unit and its predictors."""

    @property
    def per_token(self) -> bool:
        """Whether logits are per token instead of per row."""

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        """Return the logits of the exit after a layer, per row or per token."""

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """Return the output of the method's learned exit unit for each row, 0 certain … 1 uncertain."""

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """Return the output of the method's own predictor before a layer for each token."""


@runtime_checkable
class MeasuringExitHeads(Protocol):
    """Exit heads whose engine measures uncertainty itself.

    Policies that go step by step ask for it, so that rows leave exactly where `run_rule` lets them leave.
    """

    def uncertainty(self, measure: Measure, logits: Tensor, temperatures: Tensor | None) -> Tensor:
        """Return how uncertain each row of logits is, in a measure of one distribution a row."""  # [n, C], [n] → [n]
