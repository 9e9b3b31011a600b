"""What BERT and related families share: layer attributes, embeddings, plain heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from offramp.backbones import EmbeddingTables, Head, row_head, token_head
from offramp.backbones._post_norm import PostNormLayer, Sublayers
from offramp.core.columns import ID, POSITION, TYPE
from offramp.core.head_spec import LinearStep
from offramp.core.packed import Packed


def bert_layers(stack: Any, heads: int) -> list[PostNormLayer]:
    """Return the layers of a `…Encoder.layer` list."""
    return [PostNormLayer(bert_sublayers(layer), heads) for layer in stack]


def bert_sublayers(layer: Any, suffix: str = "") -> Sublayers:
    """Return the modules of a layer; names of its query, key and value projections may end in a suffix."""
    own, out = layer.attention.self, layer.attention.output
    return Sublayers(
        query=getattr(own, f"query{suffix}"),
        key=getattr(own, f"key{suffix}"),
        value=getattr(own, f"value{suffix}"),
        attention_dropout=own.dropout,
        out=out.dense,
        out_dropout=out.dropout,
        attention_norm=out.LayerNorm,
        up=layer.intermediate.dense,
        activation=layer.intermediate.intermediate_act_fn,
        down=layer.output.dense,
        down_dropout=layer.output.dropout,
        feed_norm=layer.output.LayerNorm,
    )


def bert_embeddings(embeddings: Any, packed: Packed, first_position: int = 0) -> Tensor:
    """Return the sum of word, type and position embeddings of packed tokens: [tokens, hidden]."""
    embedded: Tensor = embeddings(
        input_ids=packed.tokens[ID][None],
        token_type_ids=packed.tokens[TYPE][None],
        position_ids=packed.tokens[POSITION][None] + first_position,
    )
    return embedded[0]


def bert_tables(embeddings: Any, first_position: int = 0, projection: nn.Linear | None = None) -> EmbeddingTables:
    """Return the tables of BERT's embeddings; families without token types have no such table."""
    types = getattr(embeddings, "token_type_embeddings", None)
    words, positions, norm = embeddings.word_embeddings, embeddings.position_embeddings, embeddings.LayerNorm
    return EmbeddingTables(words, positions, types, norm, first_position, projection)


def plain_token_head(model: Any, auto_class: str) -> Head | None:
    """Return the head for tagging or question answering, which is one linear layer in all these families."""
    if auto_class == "AutoModelForTokenClassification":
        return token_head(lambda x: model.classifier(model.dropout(x)), model.classifier)
    if auto_class == "AutoModelForQuestionAnswering":
        return token_head(model.qa_outputs, model.qa_outputs)
    return None


def roberta_head(model: Any, auto_class: str) -> Head | None:
    """Return the model's own head in families whose classifier is RoBERTa's: dense, tanh, projection."""
    if auto_class == "AutoModelForSequenceClassification":
        own = model.classifier
        steps = (LinearStep(own.dense, "tanh"), LinearStep(own.out_proj))
        return row_head(lambda x: own(x[:, None]), own, steps=steps)
    if auto_class == "AutoModelForMaskedLM":
        return token_head(model.lm_head, model.lm_head)
    return plain_token_head(model, auto_class)
