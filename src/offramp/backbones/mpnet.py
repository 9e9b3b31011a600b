"""MPNet: BERT's layers with one table of relative position biases for all layers; positions start after the padding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offramp.backbones import Encoder, Head
from offramp.backbones._bert_like import bert_tables, roberta_head
from offramp.backbones._post_norm import PostNormLayer, Sublayers
from offramp.core.attention import RelativePositions
from offramp.core.columns import ID, POSITION
from offramp.core.packed import Packed

MODEL_TYPES = ("mpnet",)
REACH = 128  # distances beyond this one share a bucket


def encoder(model: Any) -> Encoder:
    """Return `MPNetModel` for the packed loop."""
    base, config = model.base_model, model.config
    first_position = base.embeddings.padding_idx + 1
    # Hugging Face numbers distances as key minus query, the packed loop as query minus key
    buckets = base.encoder.relative_position_bucket(-torch.arange(-REACH, REACH + 1))

    def words(packed: Packed) -> Tensor:
        ids, positions = packed.tokens[ID][None], packed.tokens[POSITION][None] + first_position
        embedded: Tensor = base.embeddings(input_ids=ids, position_ids=positions)
        return embedded[0]

    table = base.encoder.relative_attention_bias
    stack = [PostNormLayer(_sublayers(layer), config.num_attention_heads, partial(_relative, table, buckets))
             for layer in base.encoder.layer]  # fmt: skip
    longest = config.max_position_embeddings - first_position
    tables = bert_tables(base.embeddings, first_position)
    return Encoder(words, stack, nn.Identity(), config.hidden_size, longest, tables=tables)


def _relative(table: nn.Embedding, buckets: Tensor) -> RelativePositions:
    return RelativePositions(REACH, bias=table.weight, entries=buckets.to(table.weight.device))


def _sublayers(layer: Any) -> Sublayers:
    own = layer.attention
    return Sublayers(
        query=own.attn.q,
        key=own.attn.k,
        value=own.attn.v,
        attention_dropout=own.attn.dropout,
        out=own.attn.o,
        out_dropout=own.dropout,
        attention_norm=own.LayerNorm,
        up=layer.intermediate.dense,
        activation=layer.intermediate.intermediate_act_fn,
        down=layer.output.dense,
        down_dropout=layer.output.dropout,
        feed_norm=layer.output.LayerNorm,
    )


def head(model: Any, auto_class: str) -> Head | None:
    """Return the model's own head: the last exit."""
    return roberta_head(model, auto_class)
