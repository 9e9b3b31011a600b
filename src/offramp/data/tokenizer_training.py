"""A tokenizer learned from the data, for models that are new: byte-level BPE, so that nothing is ever unknown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from offramp.errors import OfframpError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
LEAST = 300  # 256 bytes, the special pieces, some room


def learn_pieces(texts: Iterable[str], size: int = 4000) -> PreTrainedTokenizerFast:
    """At most `size` pieces, shared by both languages; a sentence ends with `</s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if size < LEAST:
        raise OfframpError("a vocabulary learned from the data", f"{size} pieces", f"ask for {LEAST} or more")
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
