"""Tokenizers learned from texts, for models that are trained from scratch.

Byte-level BPE for translation, so that no text has unknown pieces; lower-case WordPiece, as BERT has it, for encoders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from offramp.errors import OfframpError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # of BPE
WORDPIECE_SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
SMALLEST_BPE = 300  # pieces: 256 bytes, the special pieces and a few merges
SMALLEST_WORDPIECE = 100  # pieces: letters and special pieces alone need as many


def train_bpe_tokenizer(texts: Iterable[str], size: int = 4000) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with at most `size` pieces; it ends every sentence with `</s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if size < SMALLEST_BPE:
        raise OfframpError("a vocabulary learned from the data", f"{size} pieces", f"ask for {SMALLEST_BPE} or more")
    backend = Tokenizer(models.BPE(unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, END, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    end = backend.token_to_id(END)
    backend.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, end)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def train_wordpiece_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerBase:
    """Return a lower-case WordPiece tokenizer with at most `size` pieces, the padding piece first.

    The same texts always give the same vocabulary. The trainer of `tokenizers` numbers the letters within words in a
    random order and breaks ties between merges by these numbers; so a first pass collects the letters, and a second one
    gets them in order.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if size < SMALLEST_WORDPIECE:
        raise OfframpError("a vocabulary", f"{size} pieces", f"ask for {SMALLEST_WORDPIECE} or more, e.g. 8000")
    texts, special = list(texts), list(WORDPIECE_SPECIAL.values())

    def backend_with(vocabulary: dict[str, int]) -> Tokenizer:
        backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return backend

    def learned(first: list[str], size: int) -> dict[str, int]:
        """Return a vocabulary that begins with these pieces."""
        backend = backend_with({})
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first, show_progress=False)
        backend.train_from_iterator(texts, trainer)
        return dict(backend.get_vocab())

    letters = sorted(piece for piece in learned(special, 0) if piece.startswith("##"))
    vocabulary = learned([*special, *letters], size)
    backend = backend_with(vocabulary)
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(mark, vocabulary[mark]) for mark in ("[CLS]", "[SEP]")],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **WORDPIECE_SPECIAL)
