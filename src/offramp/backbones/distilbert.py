"""DistilBERT: post-norm layers under other names, no token types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from offramp.backbones import Encoder, Head, row_head, token_head
from offramp.backbones._bert_like import bert_tables
from offramp.backbones._post_norm import PostNormLayer, Sublayers
from offramp.core.columns import ID, POSITION
from offramp.core.head_spec import LinearStep
from offramp.core.packed import Packed

MODEL_TYPES = ("distilbert",)


def _sublayers(block: Any) -> Sublayers:
    attention, feed = block.attention, block.ffn
    return Sublayers(
        query=attention.q_lin,
        key=attention.k_lin,
        value=attention.v_lin,
        attention_dropout=attention.dropout,
        out=attention.out_lin,
        out_dropout=nn.Identity(),
        attention_norm=block.sa_layer_norm,
        up=feed.lin1,
        activation=feed.activation,
        down=feed.lin2,
        down_dropout=feed.dropout,
        feed_norm=block.output_layer_norm,
    )


def encoder(model: Any) -> Encoder:
    """Return `DistilBertModel` for the packed loop."""
    base, config = model.base_model, model.config

    def embed(packed: Packed) -> Tensor:
        ids, positions = packed.tokens[ID][None], packed.tokens[POSITION][None]
        embedded: Tensor = base.embeddings(input_ids=ids, position_ids=positions)
        return embedded[0]

    stack = [PostNormLayer(_sublayers(block), config.n_heads) for block in base.transformer.layer]
    tables = bert_tables(base.embeddings)
    return Encoder(embed, stack, nn.Identity(), config.dim, config.max_position_embeddings, tables=tables)


def head(model: Any, auto_class: str) -> Head | None:
    """Return the model's own head: the last exit."""
    if auto_class == "AutoModelForSequenceClassification":
        first, last = model.pre_classifier, model.classifier
        steps = (LinearStep(first, "relu"), LinearStep(last))
        return row_head(lambda x: last(model.dropout(torch.relu(first(x)))), first, last, steps=steps)
    if auto_class == "AutoModelForTokenClassification":
        return token_head(lambda x: model.classifier(model.dropout(x)), model.classifier)
    if auto_class == "AutoModelForQuestionAnswering":
        return token_head(lambda x: model.qa_outputs(model.dropout(x)), model.qa_outputs)
    if auto_class == "AutoModelForMaskedLM":
        first, norm, last = model.vocab_transform, model.vocab_layer_norm, model.vocab_projector
        return token_head(lambda x: last(norm(model.activation(first(x)))), first, last)
    return None
