"""A translation model that is new: built from a configuration, with a tokenizer learned from the training rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from offramp import backbones
from offramp.data.tokenizer_training import train_bpe_tokenizer
from offramp.errors import OfframpError
from offramp.tasks import Task
from offramp.utils.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PIECES = 4000


def is_model_configuration(source: str) -> bool:
    """Whether a model is given as a configuration file, and so must be made."""
    return source.endswith(".json")


def build_translation_model(
    source: str, task: Task, rows: Sequence[Mapping[str, Any]]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with random weights and the tokenizer of these rows, of at most the file's `vocab_size` pieces."""
    if task.kind != "sequence":
        given = f"the configuration {source} for {task.name}"
        raise OfframpError("a pretrained model", given, "new models are made for translation only; give a trained one")
    shape = _shape(source)
    texts = (text for row in rows for text in (row.get("src", row.get("text")), row["tgt"]))
    tokenizer = train_bpe_tokenizer(texts, int(shape.get("vocab_size", PIECES)))
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    start = {"decoder_start_token_id": tokenizer.pad_token_id, "bos_token_id": None, "forced_eos_token_id": None}
    sizes = {"vocab_size": len(tokenizer), "decoder_vocab_size": len(tokenizer)}
    try:
        config = transformers.AutoConfig.for_model(**{**shape, **ids, **start, **sizes})
        return transformers.AutoModelForSeq2SeqLM.from_config(config), tokenizer
    except (ValueError, TypeError, KeyError) as error:
        lines = str(error).strip().splitlines()
        raise OfframpError(f"a model from {source}", lines[0] if lines else repr(error), "correct the file") from error


def _shape(source: str) -> dict[str, Any]:
    if not Path(source).is_file():
        raise OfframpError("a model configuration", f"{source!r}: no such file", "check the path")
    shape = read_json(Path(source))
    if not isinstance(shape, dict) or "model_type" not in shape:
        fix = 'write at least {"model_type": "marian", "d_model": 256, "decoder_layers": 6}'
        raise OfframpError("a model configuration", f"{source}, which names no model_type", fix)
    backbones.find(str(shape["model_type"]))
    return shape
