"""ALBERTa's heads, as `transformers` calls them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from offramp.backbones._alberta_model import AlbertaConfig, AlbertaModel, AlbertaPreTrainedModel


class AlbertaForMaskedLM(AlbertaPreTrainedModel):
    """Guesses words with the words' own vectors."""

    _tied_weights_keys = {"decoder.weight": "alberta.embeddings.word_embeddings.weight"}  # noqa: RUF012  # as theirs

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.alberta = AlbertaModel(config)
        self.transform = nn.Linear(config.hidden_size, config.embedding_size)  # no name of another head's part
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The words again."""
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Other words."""
        self.decoder = new_embeddings

    def answer(self, states: Tensor) -> Tensor:
        """Logits over the vocabulary."""
        logits: Tensor = self.decoder(self.norm(self.activation(self.transform(states))))
        return logits

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> MaskedLMOutput:
        """As every `…ForMaskedLM`."""
        out = self.alberta(input_ids, **kwargs)
        logits: Any = self.answer(out.last_hidden_state)  # Any: transformers' outputs ask for FloatTensor
        loss: Any = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class AlbertaForSequenceClassification(AlbertaPreTrainedModel):
    """Classes, or one number, from the first token."""

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.alberta = AlbertaModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]  # an int
        self.post_init()

    def answer(self, first: Tensor) -> Tensor:
        """Logits from states of first tokens."""
        logits: Tensor = self.classifier(self.dropout(torch.tanh(self.dense(first))))
        return logits

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> SequenceClassifierOutput:
        """As every `…ForSequenceClassification`; one label means regression."""
        out = self.alberta(input_ids, **kwargs)
        logits: Any = self.answer(out.last_hidden_state[:, 0])
        loss: Any = None
        if labels is not None:
            one = self.config.num_labels == 1
            loss = F.mse_loss(logits.squeeze(-1), labels.float()) if one else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class AlbertaForTokenClassification(AlbertaPreTrainedModel):
    """A tag for every token."""

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.alberta = AlbertaModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]  # an int
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> TokenClassifierOutput:
        """As every `…ForTokenClassification`."""
        out = self.alberta(input_ids, **kwargs)
        logits = self.classifier(self.dropout(out.last_hidden_state))
        loss: Any = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class AlbertaForQuestionAnswering(AlbertaPreTrainedModel):
    """Where an answer starts and ends."""

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
        """As every `…ForQuestionAnswering`."""
        out = self.alberta(input_ids, **kwargs)
        start, end = self.qa_outputs(out.last_hidden_state).unbind(-1)
        loss: Any = None
        if start_positions is not None and end_positions is not None:
            loss = (F.cross_entropy(start, start_positions) + F.cross_entropy(end, end_positions)) / 2
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=out.hidden_states
        )
