"""The post-norm layer of BERT and related families: attention, add, norm; feed-forward, add, norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.backbones._prunable import PrunableLayer
from offramp.core.attention import AttentionOptions, AttentionScores, Layout, RelativePositions, attend
from offramp.core.cost import LayerCost
from offramp.core.dropout import apply_dropout


@dataclass(frozen=True)
class Sublayers:
    """The modules of a post-norm layer under common names."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    attention_dropout: nn.Dropout
    out: nn.Linear
    out_dropout: nn.Module
    attention_norm: nn.LayerNorm
    up: nn.Linear
    activation: Callable[[Tensor], Tensor]
    down: nn.Linear
    down_dropout: nn.Module
    feed_norm: nn.LayerNorm


class LayerMatrices(NamedTuple):
    """Weight and bias of every matrix of a layer, of the heads and neurons that are computed."""

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


class PostNormLayer(PrunableLayer):
    """A post-norm layer in two halves; while no gradient is recorded, Q, K and V are one fused product.

    `relative` gives the attention logits of distances, of families that have such; `query_scale` multiplies queries.
    """

    def __init__(
        self,
        parts: Sublayers,
        heads: int,
        relative: Callable[[], RelativePositions] | None = None,
        query_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.parts, self.heads, self.relative, self.query_scale = parts, heads, relative, query_scale
        self._fused: tuple[tuple[int, ...], Tensor, Tensor] | None = None
        wide, inner, up = parts.query.in_features, parts.query.out_features, parts.up.out_features
        self.cost = LayerCost(query=2.0 * wide * inner, key=2.0 * wide * inner, pair=2.0 * inner, feed=2.0 * wide * up)

    def attend(
        self, queries: Tensor, keys: Tensor, where: Layout, scores: bool = False, key_bias: Tensor | None = None
    ) -> tuple[Tensor, AttentionScores | None]:
        """Return the states after the attention half, and attention scores if they are wanted."""
        p = self.parts
        if queries is keys and not torch.is_grad_enabled():
            weight, bias = self._fuse()
            q, k, v = F.linear(keys, weight, bias).chunk(3, dim=-1)
        else:
            q, k, v = (F.linear(x, *self._project(n)) for n, x in (("query", queries), ("key", keys), ("value", keys)))
        q = q if self.query_scale == 1.0 else q * self.query_scale
        dropout = p.attention_dropout.p if p.attention_dropout.training else 0.0
        attended, attention_scores = attend(
            q, k, v, where, AttentionOptions(self.heads, dropout, None, scores, key_bias, self._relative())
        )
        projected = F.linear(attended, self.kept_part("out", p.out.weight, self.columns, 1), p.out.bias)
        return p.attention_norm(queries + apply_dropout(p.out_dropout, projected)), attention_scores

    def feed(self, x: Tensor) -> Tensor:
        """Return the states after the feed-forward half."""
        p = self.parts
        up, bias = (self.kept_part(f"up {i}", t, self.neurons, 0) for i, t in enumerate((p.up.weight, p.up.bias)))
        down = self.kept_part("down", p.down.weight, self.neurons, 1)
        fed = F.linear(p.activation(F.linear(x, up, bias)), down, p.down.bias)
        y: Tensor = p.feed_norm(x + apply_dropout(p.down_dropout, fed))
        return y

    def _relative(self) -> RelativePositions | None:
        """Return the logits of distances, for the heads that are computed."""
        if self.relative is None:
            return None
        tables = self.relative()
        if self.columns is None:
            return tables
        width = len(self.columns) // self.heads
        return tables.select_heads(self.columns[::width] // width)

    def matrices(self) -> LayerMatrices:
        """Return the matrices that the layer computes with, for engines that keep their own copy."""
        p = self.parts
        out = self.kept_part("out", p.out.weight, self.columns, 1), p.out.bias
        up = (
            self.kept_part("up 0", p.up.weight, self.neurons, 0),
            self.kept_part("up 1", p.up.bias, self.neurons, 0),
        )
        down = self.kept_part("down", p.down.weight, self.neurons, 1), p.down.bias
        query, key, value = (self._project(name) for name in ("query", "key", "value"))
        return LayerMatrices(query, key, value, out, up, down)

    def distance_logits(self) -> RelativePositions | None:
        """Return the logits of distances, for the heads that are computed; None in families without."""
        return self._relative()

    def output_projections(self) -> tuple[nn.Linear, nn.Linear]:
        return self.parts.out, self.parts.down

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the layer."""
        for part in vars(self.parts).values():
            if isinstance(part, nn.Module):
                yield from part.parameters()

    def _project(self, name: str) -> tuple[Tensor, Tensor]:
        """Return weight and bias of query, key or value, for the heads that are computed."""
        linear: nn.Linear = getattr(self.parts, name)
        weight = self.kept_part(f"{name} weight", linear.weight, self.columns, 0)
        return weight, self.kept_part(f"{name} bias", linear.bias, self.columns, 0)

    def _fuse(self) -> tuple[Tensor, Tensor]:
        """Return Q, K and V as one matrix; it is rebuilt when one of them changed."""
        sources = [t for name in ("query", "key", "value") for t in self._project(name)]
        stamp = tuple(n for t in sources for n in (t.data_ptr(), t._version))
        if self._fused is None or self._fused[0] != stamp:
            weight, bias = torch.cat(sources[0::2]).detach(), torch.cat(sources[1::2]).detach()
            self._fused = (stamp, weight, bias)
        return self._fused[1], self._fused[2]
