"""ALBERTa, a family of our own: norm first, shared hidden groups, relative positions scored by keys and queries.

Distances are those of original positions, which do not change when other tokens are dropped. Importing this file
registers the family with `transformers`, whose Auto classes then open its folders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from offramp.backbones import Encoder, Head, linear_macs, row_head, token_head
from offramp.backbones._alberta_model import (
    AlbertaBlock,
    AlbertaConfig,
    AlbertaForMaskedLM,
    AlbertaForQuestionAnswering,
    AlbertaForSequenceClassification,
    AlbertaForTokenClassification,
    AlbertaModel,
)
from offramp.backbones._prunable import PrunableLayer
from offramp.core.attention import AttentionOptions, AttentionScores, Layout, RelativePositions, attend
from offramp.core.columns import ID, POSITION, TYPE
from offramp.core.cost import HeadCost, LayerCost
from offramp.core.dropout import apply_dropout
from offramp.core.packed import Packed

MODEL_TYPES = ("alberta",)

transformers.AutoConfig.register("alberta", AlbertaConfig, exist_ok=True)
transformers.AutoModel.register(AlbertaConfig, AlbertaModel, exist_ok=True)
for _auto, _kind in (
    (transformers.AutoModelForMaskedLM, AlbertaForMaskedLM),
    (transformers.AutoModelForSequenceClassification, AlbertaForSequenceClassification),
    (transformers.AutoModelForTokenClassification, AlbertaForTokenClassification),
    (transformers.AutoModelForQuestionAnswering, AlbertaForQuestionAnswering),
):
    _auto.register(AlbertaConfig, _kind, exist_ok=True)


class PreNormRelativeLayer(PrunableLayer):
    """One layer in two halves; layers of a group share `block`."""

    def __init__(self, block: AlbertaBlock) -> None:
        super().__init__()
        self.block, self.heads = block, block.heads
        wide, up = block.out.in_features, block.up.out_features
        scored = (
            0 if block.distances is None else block.distances.num_embeddings
        )  # products of each token with every distance
        project = 2.0 * wide * wide + wide * scored
        self.cost = LayerCost(query=project, key=project, pair=2.0 * wide, feed=2.0 * wide * up)

    def attend(
        self, queries: Tensor, keys: Tensor, where: Layout, scores: bool = False, key_bias: Tensor | None = None
    ) -> tuple[Tensor, AttentionScores | None]:
        """Return the states after the attention half: norm, attend by content and distance, add."""
        own, normed = self.block, self.block.attention_norm(keys)
        weight, bias = self.kept_rows("qkv", own.qkv, self.columns, 3)
        if queries is keys:
            q, k, v = F.linear(normed, weight, bias).chunk(3, dim=-1)
        else:
            wide = len(weight) // 3
            k, v = F.linear(normed, weight[wide:], None if bias is None else bias[wide:]).chunk(2, dim=-1)
            q = F.linear(own.attention_norm(queries), weight[:wide], None if bias is None else bias[:wide])
        dropout = own.attention_dropout if own.training else 0.0
        relative = None
        if own.distances is not None:  # one table for all heads, for queries and for keys
            table = own.distances.weight[:, None]
            relative = RelativePositions(len(table) // 2, table, table)
        attended, attention_scores = attend(
            q, k, v, where, AttentionOptions(self.heads, dropout, None, scores, key_bias, relative)
        )
        projected = F.linear(attended, self.kept_part("out", own.out.weight, self.columns, 1), own.out.bias)
        return queries + apply_dropout(own.dropout, projected), attention_scores

    def feed(self, x: Tensor) -> Tensor:
        """Return the states after the feed-forward half."""
        own = self.block
        fed = own.activation(F.linear(own.feed_norm(x), *self.kept_rows("up", own.up, self.neurons, 1)))
        output = F.linear(fed, self.kept_part("down", own.down.weight, self.neurons, 1), own.down.bias)
        return x + apply_dropout(own.dropout, output)

    def output_projections(self) -> tuple[nn.Linear, nn.Linear]:
        return self.block.out, self.block.down

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the layer's group."""
        return self.block.parameters()


def encoder(model: Any) -> Encoder:
    """Return `AlbertaModel` for the packed loop; its final norm is applied before every exit."""
    base, config = model.base_model, model.config

    def embed(packed: Packed) -> Tensor:
        columns = (packed.tokens[name][None] for name in (ID, TYPE, POSITION))
        embedded: Tensor = base.embeddings(*columns)
        return embedded[0]

    shared = {id(block): PreNormRelativeLayer(block) for block in base.blocks}
    stack = [shared[id(block)] for block in base.stack]
    price = HeadCost(0, linear_macs(base.embeddings.project))
    return Encoder(embed, stack, base.final_norm, config.hidden_size, config.max_position_embeddings, price)


def head(model: Any, auto_class: str) -> Head | None:
    """Return the model's own head: the last exit."""
    if auto_class == "AutoModelForSequenceClassification":
        return row_head(model.logits_of, model.dense, model.classifier)
    if auto_class == "AutoModelForMaskedLM":
        return token_head(model.logits_of, model.transform, model.decoder)
    if auto_class == "AutoModelForTokenClassification":
        return token_head(lambda x: model.classifier(model.dropout(x)), model.classifier)
    if auto_class == "AutoModelForQuestionAnswering":
        return token_head(model.qa_outputs, model.qa_outputs)
    return None
