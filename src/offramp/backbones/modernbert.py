"""ModernBERT: norm first, rotary positions, gated feed-forward; most layers attend within a sliding window.

Rotations and windows use the original positions of tokens, which do not change when other tokens are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.backbones import Encoder, Head, linear_macs, row_head, token_head
from offramp.backbones._prunable import PrunableLayer
from offramp.core.attention import AttentionOptions, AttentionScores, Layout, attend
from offramp.core.columns import ID
from offramp.core.cost import HeadCost, LayerCost
from offramp.core.dropout import apply_dropout
from offramp.core.packed import Packed

MODEL_TYPES = ("modernbert",)


class PreNormRotaryLayer(PrunableLayer):
    """One ModernBERT layer in two halves."""

    def __init__(self, layer: Any, rotary: Any, config: Any) -> None:
        super().__init__()
        self.layer, self.rotary, self.heads = layer, rotary, config.num_attention_heads
        self.window = config.sliding_window if layer.attention_type == "sliding_attention" else None
        wide, up = config.hidden_size, config.intermediate_size
        self.cost = LayerCost(query=2.0 * wide * wide, key=2.0 * wide * wide, pair=2.0 * wide, feed=3.0 * wide * up)

    def attend(
        self, queries: Tensor, keys: Tensor, where: Layout, scores: bool = False, key_bias: Tensor | None = None
    ) -> tuple[Tensor, AttentionScores | None]:
        """Return the states after the attention half: norm, rotate, attend, add."""
        own = self.layer.attn
        weight, bias = self.kept_rows("Wqkv", own.Wqkv, self.columns, 3)
        if queries is keys:
            q, k, v = F.linear(self.layer.attn_norm(keys), weight, bias).chunk(3, dim=-1)
        else:
            wide = len(weight) // 3
            rest = None if bias is None else bias[wide:]
            k, v = F.linear(self.layer.attn_norm(keys), weight[wide:], rest).chunk(2, dim=-1)
            first = None if bias is None else bias[:wide]
            q = F.linear(self.layer.attn_norm(queries), weight[:wide], first)
        q, k = self._rotate(q, where.query_position), self._rotate(k, where.key_position)
        dropout = own.attention_dropout if own.training else 0.0
        attended, attention_scores = attend(
            q, k, v, where, AttentionOptions(self.heads, dropout, self.window, scores, key_bias)
        )
        projected = F.linear(attended, self.kept_part("out", own.Wo.weight, self.columns, 1), own.Wo.bias)
        return queries + apply_dropout(own.out_drop, projected), attention_scores

    def feed(self, x: Tensor) -> Tensor:
        """Return the states after the feed-forward half."""
        own = self.layer.mlp
        inner, gate = F.linear(self.layer.mlp_norm(x), *self.kept_rows("Wi", own.Wi, self.neurons, 2)).chunk(2, dim=-1)
        down = self.kept_part("down", own.Wo.weight, self.neurons, 1)
        y: Tensor = x + F.linear(apply_dropout(own.drop, own.act(inner) * gate), down, own.Wo.bias)
        return y

    def output_projections(self) -> tuple[nn.Linear, nn.Linear]:
        return self.layer.attn.Wo, self.layer.mlp.Wo

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the layer."""
        parts: Iterator[nn.Parameter] = self.layer.parameters()
        return parts

    def _rotate(self, x: Tensor, position: Tensor) -> Tensor:
        cos, sin = self.rotary(x.float(), position.reshape(1, -1), self.layer.attention_type)
        heads = x.float().reshape(-1, self.heads, x.shape[-1] // self.heads)  # [tokens, heads, width]
        left, right = heads.chunk(2, dim=-1)
        turned = heads * cos[0, :, None] + torch.cat((-right, left), -1) * sin[0, :, None]
        return turned.to(x.dtype).reshape(x.shape)


def encoder(model: Any) -> Encoder:
    """Return `ModernBertModel` for the packed loop; its final norm is applied before every exit."""
    base, config = model.base_model, model.config
    stack = [PreNormRotaryLayer(layer, base.rotary_emb, config) for layer in base.layers]

    def embed(packed: Packed) -> Tensor:
        embedded: Tensor = base.embeddings(input_ids=packed.tokens[ID][None])
        return embedded[0]

    return Encoder(embed, stack, base.final_norm, config.hidden_size, config.max_position_embeddings)


def head(model: Any, auto_class: str) -> Head | None:
    """Return the model's own head: the last exit."""
    if auto_class == "AutoModelForMaskedLM":
        return token_head(lambda x: model.decoder(model.head(x)), model.head, model.decoder)

    def apply(x: Tensor) -> Tensor:
        logits: Tensor = model.classifier(model.drop(model.head(x)))
        return logits

    if auto_class == "AutoModelForSequenceClassification":
        if model.config.classifier_pooling == "cls":
            return row_head(apply, model.head, model.classifier)
        macs = linear_macs(model.head, model.classifier)
        return Head(lambda packed: apply(packed.mean()), HeadCost(macs, 0))
    return token_head(apply, model.head, model.classifier)
