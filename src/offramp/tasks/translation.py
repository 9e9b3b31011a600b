"""Translation of sentences. Rows have `src` and `tgt`; plain lines of text are sources.

Nothing is truncated: a row whose sentence is longer than the model allows is refused, because half a sentence has no
translation. A decoded answer is an array [pieces, 2]: each piece and the decoder exit that chose it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from offramp.data.tokenization import Encoded
from offramp.errors import missing_package
from offramp.tasks import IGNORED_TARGET, Reduction, Row, Rows, Task, _loss, _texts

if TYPE_CHECKING:
    from typing_extensions import Self

    from offramp.data.tokenization import Tokenizer

SOURCE, TARGET, PLAIN = "src", "tgt", "text"


@dataclass(frozen=True)
class TranslationTask(Task):
    """The fields come from `with_tokenizer`; the tokenizer itself is not written to JSON."""

    vocabulary: int = 0  # pieces of the target side
    tokenizer: Tokenizer | None = field(default=None, compare=False, repr=False)

    name: ClassVar[str] = "translation"
    kind: ClassVar[Literal["row", "token", "sequence"]] = "sequence"
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    pipeline: ClassVar[str] = "translation"
    provides: ClassVar[frozenset[str]] = frozenset()
    target: ClassVar[str] = TARGET
    answer: ClassVar[str] = "text"
    truncates: ClassVar[bool] = False
    over_vocabulary: ClassVar[bool] = True
    metric: ClassVar[str] = "bleu"
    scale: ClassVar[float] = 100.0
    outputs: ClassVar[int] = 0

    @classmethod
    def columns_for(cls, rows: Rows) -> tuple[str, ...]:
        """Return the source column; plain lines of text have it in the column `text`."""
        return (PLAIN,) if rows and SOURCE not in rows[0] and PLAIN in rows[0] else (SOURCE,)

    @classmethod
    def from_rows(cls, rows: Rows, source: str) -> Self:
        _sacrebleu()  # training is scored after every epoch: what is missing is named before the first
        task = cls()
        task.check_rows(rows, source)
        return task

    def check_rows(self, rows: Rows, source: str) -> None:
        names = (*self.columns_for(rows), TARGET)
        for number, row in enumerate(rows, 1):
            lacking = [name for name in names if row.get(name) is None or not str(row[name]).strip()]
            if len(lacking) == 1:
                given = f"an unpaired sentence: {lacking[0]!r} is {'empty' if lacking[0] in row else 'missing'}"
                columns = f"; columns found: {', '.join(row)}" if lacking[0] not in row else ""
                fix = f"give each {SOURCE!r} its {TARGET!r} (another name: --column {lacking[0]}=NAME), or drop the row"
                raise _texts.row_error(source, number, given + columns, fix)
        _texts.check_texts(rows, names, source)

    def check_inputs(self, rows: Rows, source: str) -> None:
        _texts.check_texts(rows, self.columns_for(rows), source)

    def config(self) -> dict[str, Any]:
        return {}

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "vocabulary": self.vocabulary}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(content["vocabulary"])

    def with_tokenizer(self, tokenizer: Tokenizer) -> TranslationTask:
        return dataclasses.replace(self, vocabulary=len(tokenizer), tokenizer=tokenizer)

    def encode(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        """Return ids of sources, and of targets where rows have them, whole; `check_encoded` refuses long ones."""
        if not rows:
            return []
        (name,) = self.columns_for(rows)
        sources = _ids(tokenizer, [row[name] for row in rows], "text")
        labelled = all(row.get(TARGET) for row in rows)
        targets = _ids(tokenizer, [row[TARGET] for row in rows], "text_target") if labelled else [()] * len(rows)
        return [
            Encoded(list(source), [0] * len(source), number, [-1] * len(source), [], 0, target)
            for number, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]

    def check_encoded(self, encoded: Sequence[Encoded], max_length: int, source: str) -> None:
        for number, item in enumerate(encoded, 1):
            for side, ids in (("source", item.ids), ("target", item.target)):
                if len(ids) > max_length:
                    given = f"{self._beginning(ids)}: the {side} has {len(ids)} pieces, the model takes {max_length}"
                    raise _texts.row_error(source, number, given, "split the sentence, or remove the row")
            if self._all_unknown(item.target):
                given = f"{self._beginning(item.ids)}: its target has no piece that is in the model's vocabulary"
                raise _texts.row_error(source, number, given, "check the language, or use a model of that language")

    def inputs_and_targets(self, encoded: Encoded, row: Row, rng: random.Random | None) -> tuple[list[int], list[int]]:
        return encoded.ids, list(encoded.target)

    def stack_targets(self, targets: Sequence[list[int]]) -> Tensor:
        """Return targets as [rows, longest]; positions beyond a sentence's end are ignored."""
        padded = torch.full((len(targets), max(map(len, targets), default=0)), IGNORED_TARGET)
        for row, target in enumerate(targets):
            padded[row, : len(target)] = torch.tensor(target)
        return padded

    def loss(self, logits: Tensor, targets: Tensor, lengths: Tensor, reduction: Reduction = "mean") -> Tensor:
        return _loss.token_loss(logits, targets, lengths, reduction)

    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Return the text, its pieces and the exit of each, without special pieces such as the end of the sentence."""
        special = set(self._tokenizer.all_special_ids)
        answers = []
        for decoded in logits:
            shown = [(piece, block) for piece, block in decoded.tolist() if piece not in special]
            text = str(self._tokenizer.decode([piece for piece, _ in shown])).strip()
            pieces = self._tokenizer.convert_ids_to_tokens([piece for piece, _ in shown])
            answers.append({"text": text, "pieces": pieces, "exits": [block for _, block in shown]})
        return answers

    def pipeline_answer(
        self,
        row: Row,
        prediction: Row,
        encoded: Sequence[Encoded],
        logits: Sequence[np.ndarray],
        parameters: Mapping[str, Any],
    ) -> dict[str, Any]:
        return {"translation_text": prediction["text"]}

    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        return {"bleu": corpus_bleu([one["text"] for one in predictions], [row[TARGET] for row in rows])}

    def _beginning(self, ids: Sequence[int]) -> str:
        """Return the first words of a sentence, for error messages."""
        return repr(str(self._tokenizer.decode(list(ids[:12]), skip_special_tokens=True)).strip()[:40] + " …")

    def _all_unknown(self, target: Sequence[int]) -> bool:
        """Return whether the vocabulary has no piece of a target."""
        unknown = self._tokenizer.unk_token_id
        content = [piece for piece in target if piece == unknown or piece not in self._tokenizer.all_special_ids]
        return bool(content) and all(piece == unknown for piece in content)

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RuntimeError("a translation task must be given its tokenizer (with_tokenizer) first")
        return self.tokenizer


def _ids(tokenizer: Tokenizer, texts: list[str], side: str) -> list[tuple[int, ...]]:
    encoded = tokenizer(**{side: texts}, return_attention_mask=False, verbose=False)["input_ids"]
    return [tuple(ids) for ids in encoded]


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return corpus BLEU, 0–100, with one reference each (needs the extra `translation`).

    It is computed by sacrebleu, which fixes tokenisation so that scores can be compared.
    """
    return float(_sacrebleu().corpus_bleu(list(hypotheses), [list(references)]).score)


def _sacrebleu() -> Any:
    """Return the package sacrebleu, or raise an error that says how to install it."""
    try:
        import sacrebleu
    except ImportError as error:
        raise missing_package("translation", "sacrebleu") from error
    return sacrebleu
