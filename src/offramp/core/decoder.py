"""What a backbone implements so that the decode loop can run its decoder: one block, one target token at a time.

These protocols stand in core because backbones implement them and `decoding/` calls them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class BlockCost:
    """MACs of one decoder block as coefficients."""

    token: float  # per target token that passes the block: its own projections and the feed-forward part
    copied_token: float  # per target token that left below the block: its key and value
    self_pair: float  # per pair of target tokens in self-attention
    source_token: float  # per source token: its key and value
    cross_pair: float  # per pair of a target token and a source token


class KVProjections(Protocol):
    """The projections of a decoder block that turn states into keys and values, side by side."""

    def project_kv(self, states: Tensor) -> Tensor:
        """Return the self-attention keys and values of target tokens: [n, hidden] → [n, 2 · hidden]."""

    def project_source_kv(self, states: Tensor) -> Tensor:
        """Return the cross-attention keys and values of source tokens: [n, hidden] → [n, 2 · hidden]."""


class StepBlock(KVProjections, Protocol):
    """A decoder block for one-token steps; its methods are called in the order in which they stand here."""

    def project_qkv(self, x: Tensor) -> Tensor:
        """Return self-attention query, key and value side by side: [n, hidden] → [n, 3 · hidden]."""

    def add_self_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the states after the self-attention sublayer, given the attention output."""

    def cross_query(self, x: Tensor) -> Tensor:
        """Return the query of cross-attention."""

    def add_cross_attention_and_feed(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the states after the cross-attention and feed-forward sublayers, given the attention output."""
