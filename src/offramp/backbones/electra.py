"""ELECTRA: BERT's layers, embeddings that may be narrower and then projected."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from offramp.backbones import Encoder, Head, linear_macs, row_head, token_head
from offramp.backbones._bert_like import bert_embeddings, bert_layers, bert_tables, plain_token_head
from offramp.core.cost import HeadCost
from offramp.core.head_spec import LinearStep
from offramp.core.packed import Packed

MODEL_TYPES = ("electra",)


def encoder(model: Any) -> Encoder:
    """Return `ElectraModel` for the packed loop."""
    base, config = model.base_model, model.config
    narrow = config.embedding_size != config.hidden_size
    project: nn.Module = base.embeddings_project if narrow else nn.Identity()

    def embed(packed: Packed) -> Tensor:
        embedded: Tensor = project(bert_embeddings(base.embeddings, packed))
        return embedded

    stack = bert_layers(base.encoder.layer, config.num_attention_heads)
    price = HeadCost(0, linear_macs(project))
    tables = bert_tables(base.embeddings, projection=base.embeddings_project if narrow else None)
    return Encoder(embed, stack, nn.Identity(), config.hidden_size, config.max_position_embeddings, price, tables)


def head(model: Any, auto_class: str) -> Head | None:
    """Return the model's own head: the last exit."""
    if auto_class == "AutoModelForSequenceClassification":
        own = model.classifier
        steps = (LinearStep(own.dense, "gelu"), LinearStep(own.out_proj))
        return row_head(lambda x: own(x[:, None]), own, steps=steps)
    if auto_class == "AutoModelForMaskedLM":
        first, last = model.generator_predictions, model.generator_lm_head
        return token_head(lambda x: last(first(x)), first, last)
    return plain_token_head(model, auto_class)
