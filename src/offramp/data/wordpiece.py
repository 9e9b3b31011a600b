"""A tokenizer of one's own: lower-case WordPiece learned from texts, for models that start from nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from offramp.errors import OfframpError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
LEAST = 100  # pieces; the letters alone need as many


def learn(texts: Iterable[str], size: int) -> PreTrainedTokenizerBase:
    """BERT's kind of tokenizer with at most `size` pieces, the padding piece first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if size < LEAST:
        raise OfframpError("a vocabulary", f"{size} pieces", f"ask for {LEAST} or more, e.g. 8000")
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = list(SPECIAL.values())
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(mark, backend.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **SPECIAL)
