"""DeBERTa v2 and v3: content and position are attended to separately; distances fall into logarithmic buckets.

Attention logits are the products of queries with keys, of queries with projected position vectors and of keys with
projected position vectors, each divided by √(terms · width). While no gradient is recorded, the projected position
vectors of a layer are computed once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from offramp.backbones import Encoder, Head, linear_macs, row_head, token_head
from offramp.backbones._bert_like import bert_sublayers, plain_token_head
from offramp.backbones._post_norm import PostNormLayer
from offramp.core.attention import RelativePositions
from offramp.core.columns import ID, POSITION, TYPE
from offramp.core.cost import HeadCost, LayerCost
from offramp.core.packed import Packed
from offramp.errors import OfframpError

MODEL_TYPES = ("deberta-v2",)


def encoder(model: Any) -> Encoder:
    """Return `DebertaV2Model` for the packed loop."""
    base, config = model.base_model, model.config
    if base.encoder.conv is not None:
        given = f"conv_kernel_size={config.conv_kernel_size}, a convolution over neighbouring tokens"
        fix = "use a DeBERTa without it: v3 checkpoints, or deberta-v2 ones with conv_kernel_size 0"
        raise OfframpError("a DeBERTa that Offramp can run packed", given, fix)

    def words(packed: Packed) -> Tensor:
        columns = {"input_ids": ID, "token_type_ids": TYPE, "position_ids": POSITION}
        embedded: Tensor = base.embeddings(**{name: packed.tokens[column][None] for name, column in columns.items()})
        return embedded[0]

    stack = [_layer(base.encoder, layer, config) for layer in base.encoder.layer]
    projection = base.embeddings.embed_proj
    price = HeadCost(0, 0 if projection is None else linear_macs(projection))
    return Encoder(words, stack, nn.Identity(), config.hidden_size, config.max_position_embeddings, price)


def _layer(stack: Any, layer: Any, config: Any) -> PostNormLayer:
    own = layer.attention.self
    if not own.relative_attention:
        return PostNormLayer(bert_sublayers(layer, "_proj"), config.num_attention_heads)
    positions = _Positions(stack, own, config.num_attention_heads)
    terms = 1 + len(positions.kinds)
    result = PostNormLayer(bert_sublayers(layer, "_proj"), config.num_attention_heads, positions, terms**-0.5)
    cost, extra = result.cost, float(own.all_head_size * 2 * own.pos_ebd_size)  # every token with every entry
    query, key = extra * ("c2p" in positions.kinds), extra * ("p2c" in positions.kinds)
    result.cost = LayerCost(cost.query + query, cost.key + key, cost.pair, cost.feed)
    return result


class _Positions:
    """The position vectors of one layer, projected to keys (multiplied with queries) and to queries (with keys)."""

    def __init__(self, stack: Any, attention: Any, heads: int) -> None:
        self.stack, self.attention, self.heads = stack, attention, heads
        self.kinds = [kind for kind in ("c2p", "p2c") if kind in attention.pos_att_type]
        reach, span = attention.max_relative_positions, attention.pos_ebd_size
        distances = torch.arange(-reach, reach + 1)
        buckets = distances if attention.position_buckets < 1 else _buckets(distances, attention)
        self.reach, self.entries = reach, (buckets + span).clamp(0, 2 * span - 1)
        self._cached: tuple[tuple[int, ...], RelativePositions] | None = None

    def __call__(self) -> RelativePositions:
        if torch.is_grad_enabled():
            return self._project()
        stamp = tuple(n for p in self._parameters() for n in (p.data_ptr(), p._version))
        if self._cached is None or self._cached[0] != stamp:
            with torch.inference_mode(False), torch.no_grad():
                self._cached = stamp, self._project()
        return self._cached[1]

    def _parameters(self) -> list[nn.Parameter]:
        norm = list(self.stack.LayerNorm.parameters()) if "layer_norm" in self.stack.norm_rel_ebd else []
        projections = [p for linear in self._projections().values() for p in linear.parameters()]
        return [self.stack.rel_embeddings.weight, *norm, *projections]

    def _projections(self) -> dict[str, nn.Linear]:
        own = self.attention
        if own.share_att_key:
            return {kind: {"c2p": own.key_proj, "p2c": own.query_proj}[kind] for kind in self.kinds}
        return {kind: getattr(own, {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}[kind]) for kind in self.kinds}

    def _project(self) -> RelativePositions:
        vectors = self.stack.get_rel_embedding()[: 2 * self.attention.pos_ebd_size]
        vectors = self.attention.pos_dropout(vectors)
        tables = {kind: linear(vectors).unflatten(-1, (self.heads, -1)) for kind, linear in self._projections().items()}
        width = self.attention.attention_head_size
        # queries arrive multiplied by 1/√terms already, keys do not
        c2p = tables["c2p"] / math.sqrt(width) if "c2p" in tables else None
        p2c = tables["p2c"] / math.sqrt(width * (1 + len(self.kinds))) if "p2c" in tables else None
        return RelativePositions(self.reach, c2p, p2c, entries=self.entries.to(vectors.device))


def _buckets(distances: Tensor, attention: Any) -> Tensor:
    buckets: Tensor = make_log_bucket_position(distances, attention.position_buckets, attention.max_relative_positions)
    return buckets.long()


def head(model: Any, auto_class: str) -> Head | None:
    """Return the model's own head: the last exit."""
    if auto_class == "AutoModelForSequenceClassification":
        pooler, last = model.pooler, model.classifier
        return row_head(lambda x: last(model.dropout(pooler(x[:, None]))), pooler, last)
    if auto_class == "AutoModelForMaskedLM":
        return _masked_lm_head(model)
    return plain_token_head(model, auto_class)


def _masked_lm_head(model: Any) -> Head:
    if model.legacy:
        return token_head(model.cls, model.cls)
    words = model.deberta.embeddings.word_embeddings
    own = linear_macs(model.lm_predictions) + words.num_embeddings * words.embedding_dim
    return Head(lambda packed: model.lm_predictions(packed.states, words), HeadCost(0, own))
