"""Masked language modelling: predict masked tokens. Predictions fill the mask tokens of a text.

15 % of the tokens are chosen, at least one: 80 % become the mask, 10 % a random token, 10 % stay (Devlin et al. 2019).
Without a generator the choice depends on the ids alone, so that evaluation is repeatable in any order of rows.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.tasks import IGNORED_TARGET, Reduction, Row, Rows, Task, _loss, _texts

if TYPE_CHECKING:
    from typing_extensions import Self

    from offramp.data.tokenization import Tokenizer

MASKED_SHARE = 0.15


@dataclass(frozen=True)
class MaskedLMTask(Task):
    """The fields come from `with_tokenizer`; the tokenizer itself is not written to JSON."""

    mask_id: int = -1
    vocabulary: int = 0
    special_ids: frozenset[int] = frozenset()
    tokenizer: Tokenizer | None = field(default=None, compare=False, repr=False)

    name: ClassVar[str] = "masked_lm"
    kind: ClassVar[Literal["row", "token"]] = "token"
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    pipeline: ClassVar[str] = "fill-mask"
    target: ClassVar[str] = ""
    answer: ClassVar[str] = "text"
    over_vocabulary: ClassVar[bool] = True
    serves_pipeline: ClassVar[bool] = False  # fill-mask lists tokens for each mask, this fills the text
    provides: ClassVar[frozenset[str]] = frozenset({"distribution"})
    higher_is_better: ClassVar[bool] = False
    scores_by_loss: ClassVar[bool] = True
    metric: ClassVar[str] = "perplexity"
    outputs: ClassVar[int] = 0

    @classmethod
    def columns_for(cls, rows: Rows) -> tuple[str, ...]:
        return _texts.SINGLE

    @classmethod
    def from_rows(cls, rows: Rows, source: str) -> Self:
        _texts.check_texts(rows, _texts.SINGLE, source)
        return cls()

    def check_rows(self, rows: Rows, source: str) -> None:
        _texts.check_texts(rows, _texts.SINGLE, source)

    def check_inputs(self, rows: Rows, source: str) -> None:
        _texts.check_texts(rows, _texts.SINGLE, source)

    def config(self) -> dict[str, Any]:
        return {}

    def to_json(self) -> dict[str, Any]:
        known = {"mask_id": self.mask_id, "vocabulary": self.vocabulary, "special_ids": sorted(self.special_ids)}
        return {"name": self.name, **known}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(content["mask_id"], content["vocabulary"], frozenset(content["special_ids"]))

    def with_tokenizer(self, tokenizer: Tokenizer) -> MaskedLMTask:
        if tokenizer.mask_token_id is None:
            raise OfframpError("masked language modelling", "a tokenizer without a mask token", "choose another model")
        return dataclasses.replace(
            self,
            mask_id=tokenizer.mask_token_id,
            vocabulary=len(tokenizer),
            special_ids=frozenset(tokenizer.all_special_ids),
            tokenizer=tokenizer,
        )

    def encode(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        return _texts.encode_columns(tokenizer, rows, _texts.SINGLE, max_length)

    def inputs_and_targets(self, encoded: Encoded, row: Row, rng: random.Random | None) -> tuple[list[int], list[int]]:
        """Return masked ids and their targets; special tokens are neither masked nor used as random tokens."""
        rng = rng or random.Random(repr(encoded.ids))
        ids, targets = list(encoded.ids), [IGNORED_TARGET] * len(encoded.ids)
        places = [place for place, token in enumerate(ids) if token not in self.special_ids]
        for place in rng.sample(places, min(len(places), max(1, round(MASKED_SHARE * len(places))))):
            targets[place] = ids[place]
            ids[place] = self._corrupt(ids[place], rng)
        return ids, targets

    def stack_targets(self, targets: Sequence[list[int]]) -> Tensor:
        return _loss.concatenate_targets(targets)

    def loss(self, logits: Tensor, targets: Tensor, lengths: Tensor, reduction: Reduction = "mean") -> Tensor:
        return _loss.token_loss(logits, targets, lengths, reduction)

    def distributions(
        self, logits: Tensor, lengths: Tensor, scored: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return _loss.token_distributions(logits, lengths, scored)

    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Return the text with its mask tokens filled in; masks that truncation removed stay masks."""
        return [
            {"text": self._fill(row["text"], item, scores)}
            for row, item, scores in zip(rows, encoded, logits, strict=True)
        ]

    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        raise OfframpError("metrics of predictions", "masked_lm is measured by its loss", "use metrics_from_losses")

    def metrics_from_losses(self, losses: Sequence[float]) -> dict[str, float]:
        mean = sum(losses) / max(1, len(losses))
        return {"perplexity": math.exp(min(mean, 700.0))}  # above 700, exp overflows a float

    def _corrupt(self, token: int, rng: random.Random) -> int:
        chance = rng.random()
        if chance < 0.8:
            return self.mask_id
        if chance >= 0.9:
            return token
        replacement = rng.randrange(self.vocabulary)
        while replacement in self.special_ids:
            replacement = rng.randrange(self.vocabulary)
        return replacement

    def _fill(self, text: str, encoded: Encoded, logits: np.ndarray) -> str:
        if self.tokenizer is None:
            raise RuntimeError("a masked_lm task must be given its tokenizer (with_tokenizer) before it predicts")
        masked = [place for place, token in enumerate(encoded.ids) if token == self.mask_id]
        scores = logits[masked]  # [masks, vocabulary], a copy
        scores[:, [token for token in self.special_ids if token < scores.shape[1]]] = -np.inf
        mask = str(self.tokenizer.mask_token)
        filled, *rest = text.split(mask)
        for number, after in enumerate(rest):
            piece = mask
            if number < len(masked):
                piece = str(self.tokenizer.decode([int(scores[number].argmax())])).strip()
            continues = piece.startswith("##") and len(piece) > 2  # WordPiece: a part of the word before it
            filled = (filled.rstrip() + piece[2:] if continues else filled + piece) + after
        return filled
