"""RoBERTa and XLM-R. Positions start after the padding index."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from offramp.backbones import Encoder, Head
from offramp.backbones._bert_like import bert_embeddings, bert_layers, bert_tables, roberta_head

MODEL_TYPES = ("roberta", "xlm-roberta", "camembert")


def encoder(model: Any) -> Encoder:
    """Return `RobertaModel` and its variants for the packed loop."""
    base, config = model.base_model, model.config
    stack = bert_layers(base.encoder.layer, config.num_attention_heads)
    embed = partial(bert_embeddings, base.embeddings, first_position=base.embeddings.padding_idx + 1)
    longest = config.max_position_embeddings - base.embeddings.padding_idx - 1
    tables = bert_tables(base.embeddings, base.embeddings.padding_idx + 1)
    return Encoder(embed, stack, nn.Identity(), config.hidden_size, longest, tables=tables)


def head(model: Any, auto_class: str) -> Head | None:
    """Return the model's own head: the last exit."""
    return roberta_head(model, auto_class)
