"""Tiny tokenizers made on the spot, one of each kind that behaves differently."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = "the a film is good bad not very who saw it what in paris lives and or man woman EU rejects call . , ? : -"
PIECES = "##s ##ing ##ly un ##able play ##ed"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


@cache
def wordpiece() -> Any:
    """Like BERT: lower case, token types, [CLS] a [SEP] b [SEP]; unknown words fall into letters."""
    letters = [*LETTERS, *("##" + letter for letter in LETTERS)]
    vocabulary = [*SPECIAL.values(), *dict.fromkeys([*WORDS.lower().split(), *PIECES.split(), *letters])]
    ids = {word: index for index, word in enumerate(vocabulary)}
    backend = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **SPECIAL)


@cache
def bytelevel() -> Any:
    """Like RoBERTa: byte-level BPE that minds spaces, no token types, <s> a </s></s> b </s>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS, " " + WORDS] * 3, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = {"bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=inputs, eos_token="</s>", sep_token="</s>", **names
    )
