"""ALBERTa as a Hugging Face model: norm first, hidden groups that share parameters, absolute and relative positions.

This is the padded forward pass of the model and its heads, as in `transformers`; `alberta.py` runs the same parameters
packed. The method `alberta`, which decides depths, is independent of it and serves any backbone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)


@strict
class AlbertaConfig(PreTrainedConfig):
    """Sizes as in ALBERT-base, but three groups; layer i belongs to group i·groups//layers."""

    model_type = "alberta"

    vocab_size: int = 30522
    embedding_size: int = 128
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_hidden_groups: int = 3
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: int | float = 0.1
    attention_probs_dropout_prob: int | float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    absolute_positions: bool = True
    relative_positions: bool = True
    relative_reach: int = 64  # distances beyond this share a vector
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-6
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True

    def validate_shape(self) -> None:
        """Raise if heads do not divide the width, or if a group has no layer."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"{self.num_attention_heads} heads do not divide hidden_size={self.hidden_size}")
        if not 1 <= self.num_hidden_groups <= self.num_hidden_layers:
            given = f"num_hidden_groups={self.num_hidden_groups}, num_hidden_layers={self.num_hidden_layers}"
            raise ValueError(f"{given}: every group needs a layer")


class AlbertaEmbeddings(nn.Module):
    """Embeddings of words, types and (unless left out) positions, projected to the width of the layers."""

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__()
        size = config.embedding_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.position_embeddings: nn.Embedding | None = None
        if config.absolute_positions:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.project = nn.Linear(size, config.hidden_size)

    def forward(self, words: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings [rows, n, hidden] of ids [rows, n], or of vectors already looked up [rows, n, size]."""
        x = words if words.is_floating_point() else self.word_embeddings(words)
        x = x + self.token_type_embeddings(types)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        embedded: Tensor = self.project(self.dropout(self.norm(x)))
        return embedded


class AlbertaBlock(nn.Module):
    """The layer of one hidden group, on padded rows; several layers of the model share its parameters."""

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__()
        wide, heads = config.hidden_size, config.num_attention_heads
        self.heads, self.reach, self.attention_dropout = (
            heads,
            config.relative_reach,
            config.attention_probs_dropout_prob,
        )
        self.attention_norm = nn.LayerNorm(wide, eps=config.layer_norm_eps)
        self.qkv, self.out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.distances: nn.Embedding | None = None
        if config.relative_positions:
            self.distances = nn.Embedding(2 * config.relative_reach + 1, wide // heads)
        self.feed_norm = nn.LayerNorm(wide, eps=config.layer_norm_eps)
        self.up, self.down = nn.Linear(wide, config.intermediate_size), nn.Linear(config.intermediate_size, wide)
        self.activation, self.dropout = ACT2FN[config.hidden_act], nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, real: Tensor, positions: Tensor) -> Tensor:
        """Return the states [rows, n, hidden] after the layer; `real` [rows, n] is False for padding."""
        rows, n, wide = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(rows, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5  # [rows, heads, queries, keys]
        if self.distances is not None:
            apart = (positions[:, :, None] - positions[:, None, :]).clamp(-self.reach, self.reach) + self.reach
            vectors = self.distances(apart)  # [rows, queries, keys, head width]
            scores = scores + torch.einsum("bhqd,bqkd->bhqk", q, vectors) + torch.einsum("bhkd,bqkd->bhqk", k, vectors)
        weights = scores.masked_fill(~real[:, None, None, :], torch.finfo(scores.dtype).min).softmax(-1)
        mixed = F.dropout(weights, self.attention_dropout, self.training) @ v
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, n, wide)))
        return x + self.dropout(self.down(self.activation(self.up(self.feed_norm(x)))))


class AlbertaPreTrainedModel(PreTrainedModel):
    """The class attributes that transformers needs."""

    config: AlbertaConfig
    config_class = AlbertaConfig
    base_model_prefix = "alberta"


class AlbertaModel(AlbertaPreTrainedModel):
    """Embeddings, layers and a final norm."""

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.embeddings = AlbertaEmbeddings(config)
        self.blocks = nn.ModuleList(AlbertaBlock(config) for _ in range(config.num_hidden_groups))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @property
    def stack(self) -> list[AlbertaBlock]:
        """The block of each layer."""
        layers, groups = self.config.num_hidden_layers, self.config.num_hidden_groups
        return [self.blocks[i * groups // layers] for i in range(layers)]  # type: ignore[misc]  # a ModuleList

    def get_input_embeddings(self) -> nn.Module:
        """Return the word embeddings."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the word embeddings."""
        self.embeddings.word_embeddings = value  # type: ignore[assignment]  # an Embedding

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return the states of padded rows after all layers."""
        words = input_ids if inputs_embeds is None else inputs_embeds
        if words is None:
            raise ValueError("give input_ids or inputs_embeds")
        shape, device = words.shape[:2], words.device
        types = torch.zeros(shape, dtype=torch.long, device=device) if token_type_ids is None else token_type_ids
        positions = torch.arange(shape[1], device=device) if position_ids is None else position_ids
        positions = positions.expand(shape)
        real = torch.ones(shape, device=device) if attention_mask is None else attention_mask
        states = [self.embeddings(words, types, positions)]
        for block in self.stack:
            states.append(block(states[-1], real.bool(), positions))
        kept = tuple(states) if kwargs.get("output_hidden_states") else None
        return BaseModelOutput(last_hidden_state=self.final_norm(states[-1]), hidden_states=kept)


class AlbertaForMaskedLM(AlbertaPreTrainedModel):
    """Masked language model whose output embeddings are the word embeddings."""

    _tied_weights_keys = {"decoder.weight": "alberta.embeddings.word_embeddings.weight"}  # noqa: RUF012  # as in transformers

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.alberta = AlbertaModel(config)
        self.transform = nn.Linear(config.hidden_size, config.embedding_size)  # a name that no other head uses
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output embeddings."""
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the output embeddings."""
        self.decoder = new_embeddings

    def logits_of(self, states: Tensor) -> Tensor:
        """Return logits over the vocabulary."""
        logits: Tensor = self.decoder(self.norm(self.activation(self.transform(states))))
        return logits

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> MaskedLMOutput:
        """Return logits, and the loss if there are labels, as every `…ForMaskedLM` does."""
        out = self.alberta(input_ids, **kwargs)
        logits: Any = self.logits_of(out.last_hidden_state)  # Any: transformers' outputs are typed as FloatTensor
        loss: Any = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class AlbertaForSequenceClassification(AlbertaPreTrainedModel):
    """Classification or regression from the first token."""

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.alberta = AlbertaModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]  # an int
        self.post_init()

    def logits_of(self, first: Tensor) -> Tensor:
        """Return logits from the states of first tokens."""
        logits: Tensor = self.classifier(self.dropout(torch.tanh(self.dense(first))))
        return logits

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> SequenceClassifierOutput:
        """Return logits and loss as every `…ForSequenceClassification` does; one label means regression."""
        out = self.alberta(input_ids, **kwargs)
        logits: Any = self.logits_of(out.last_hidden_state[:, 0])
        loss: Any = None
        if labels is not None:
            one = self.config.num_labels == 1
            loss = F.mse_loss(logits.squeeze(-1), labels.float()) if one else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class AlbertaForTokenClassification(AlbertaPreTrainedModel):
    """One tag for every token."""

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.alberta = AlbertaModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]  # an int
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> TokenClassifierOutput:
        """Return logits and loss as every `…ForTokenClassification` does."""
        out = self.alberta(input_ids, **kwargs)
        logits = self.classifier(self.dropout(out.last_hidden_state))
        loss: Any = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class AlbertaForQuestionAnswering(AlbertaPreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.alberta = AlbertaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Return logits and loss as every `…ForQuestionAnswering` does."""
        out = self.alberta(input_ids, **kwargs)
        start, end = self.qa_outputs(out.last_hidden_state).unbind(-1)
        loss: Any = None
        if start_positions is not None and end_positions is not None:
            loss = (F.cross_entropy(start, start_positions) + F.cross_entropy(end, end_positions)) / 2
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=out.hidden_states
        )
