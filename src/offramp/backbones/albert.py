"""ALBERT: one parameter block serves many layers; embeddings are projected once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from offramp.backbones import Encoder, Head, linear_macs, row_head, token_head
from offramp.backbones._bert_like import bert_embeddings, bert_tables, plain_token_head
from offramp.backbones._post_norm import PostNormLayer, Sublayers
from offramp.core.cost import HeadCost
from offramp.core.head_spec import LinearStep
from offramp.core.packed import Packed

MODEL_TYPES = ("albert",)


def _sublayers(layer: Any) -> Sublayers:
    attention = layer.attention
    return Sublayers(
        query=attention.query,
        key=attention.key,
        value=attention.value,
        attention_dropout=attention.attention_dropout,
        out=attention.dense,
        out_dropout=attention.output_dropout,
        attention_norm=attention.LayerNorm,
        up=layer.ffn,
        activation=layer.activation,
        down=layer.ffn_output,
        down_dropout=nn.Identity(),
        feed_norm=layer.full_layer_layer_norm,
    )


def encoder(model: Any) -> Encoder:
    """`AlbertModel` for the packed loop: layer i is a layer of group i·groups//layers."""
    base, config = model.base_model, model.config
    project = base.encoder.embedding_hidden_mapping_in
    groups = [
        [PostNormLayer(_sublayers(layer), config.num_attention_heads) for layer in group.albert_layers]
        for group in base.encoder.albert_layer_groups
    ]

    def embed(packed: Packed) -> Tensor:
        embedded: Tensor = project(bert_embeddings(base.embeddings, packed))
        return embedded

    per_group = config.num_hidden_layers / config.num_hidden_groups
    stack = [layer for i in range(config.num_hidden_layers) for layer in groups[int(i / per_group)]]
    price = HeadCost(0, linear_macs(project))
    tables = bert_tables(base.embeddings, projection=project)
    return Encoder(embed, stack, nn.Identity(), config.hidden_size, config.max_position_embeddings, price, tables)


def head(model: Any, auto_class: str) -> Head | None:
    """Return the model's own head: the last exit."""
    if auto_class == "AutoModelForSequenceClassification":
        base = model.albert
        return row_head(
            lambda x: model.classifier(model.dropout(base.pooler_activation(base.pooler(x)))),
            base.pooler,
            model.classifier,
            steps=(LinearStep(base.pooler, "tanh"), LinearStep(model.classifier)),
        )
    if auto_class == "AutoModelForMaskedLM":
        return token_head(model.predictions, model.predictions)
    return plain_token_head(model, auto_class)
