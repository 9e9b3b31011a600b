"""BERT, and every checkpoint of its shape (MiniLM, bge, e5 …)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from offramp.backbones import Encoder, Head, row_head, token_head
from offramp.backbones._bert_like import bert_embeddings, bert_layers, bert_tables, plain_token_head
from offramp.core.head_spec import LinearStep

MODEL_TYPES = ("bert",)


def encoder(model: Any) -> Encoder:
    """Return `BertModel` (or a model that holds one) for the packed loop."""
    base, config = model.base_model, model.config
    stack = bert_layers(base.encoder.layer, config.num_attention_heads)
    embed = partial(bert_embeddings, base.embeddings)
    tables = bert_tables(base.embeddings)
    return Encoder(embed, stack, nn.Identity(), config.hidden_size, config.max_position_embeddings, tables=tables)


def head(model: Any, auto_class: str) -> Head | None:
    """Return the model's own head: the last exit."""
    if auto_class == "AutoModelForSequenceClassification":
        pooler = model.bert.pooler
        return row_head(
            lambda x: model.classifier(model.dropout(pooler.activation(pooler.dense(x)))),
            pooler,
            model.classifier,
            steps=(LinearStep(pooler.dense, "tanh"), LinearStep(model.classifier)),
        )
    if auto_class == "AutoModelForMaskedLM":
        return token_head(model.cls, model.cls)
    return plain_token_head(model, auto_class)
