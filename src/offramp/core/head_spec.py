"""Exit heads as plain data: an engine that understands a head computes it together with the layers.

A head that is nothing but linear layers, norms, activations and pooling describes itself by a `HeadSpec`; the modules
in it are the head's own, so the description follows their parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

Activation = Literal["gelu", "gelu_tanh", "relu", "tanh", "sigmoid"]
Pooling = Literal["first", "mean", "max"]


@dataclass(frozen=True)
class LinearStep:
    """A linear layer, then an activation if there is one."""

    linear: nn.Linear
    activation: Activation | None = None


@dataclass(frozen=True)
class NormStep:
    """A layer norm."""

    norm: nn.LayerNorm


@dataclass(frozen=True)
class ActivationStep:
    """An activation by itself."""

    activation: Activation


@dataclass(frozen=True)
class AttentionStep:
    """Attention within each row; the step before gives queries, keys and values side by side."""

    heads: int


Step = LinearStep | NormStep | ActivationStep | AttentionStep


@dataclass(frozen=True)
class WordTables:
    """Rows of two tables, of tokens and of pairs of neighbours, whose sum over a row is added to the logits."""

    words: Tensor  # [vocabulary, outputs]
    pairs: Tensor  # [buckets, outputs]
    factors: tuple[int, int]  # of the hash of a pair: (first · a % buckets + second · b % buckets) % buckets
    bias: Tensor | None  # [outputs]
    scale: float  # of the sum
    by_root_of_length: bool  # the sum is divided by the square root of the row's length


@dataclass(frozen=True)
class HeadSpec:
    """An exit head that answers per row."""

    pooling: tuple[Pooling, ...]  # the pooled vectors stand side by side
    row_steps: tuple[Step, ...]  # on pooled vectors
    token_steps: tuple[Step, ...] = ()  # on the states, before pooling
    word_tables: WordTables | None = None


@runtime_checkable
class DescribedHead(Protocol):
    """A head module that can describe itself."""

    def spec(self) -> HeadSpec | None:
        """Return the head as plain data; None where it is more than that."""


@runtime_checkable
class DescribedExitHeads(Protocol):
    """Exits that can describe themselves."""

    def head_spec(self, layer: int) -> HeadSpec | None:
        """Return the exit after a layer as plain data; None where it is more than that, or missing."""

    def exit_unit_spec(self) -> HeadSpec | None:
        """Return the learned exit unit as plain data; None where it is more than that, or missing."""
