"""`offramp new` as a function: an untrained model of any family we run, to be pretrained by `--task masked_lm`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import yaml

from offramp import backbones
from offramp.errors import OfframpError
from offramp.inference.run_folder import quiet_transformers
from offramp.utils.files import atomic_replace

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AUTO_CLASS = "AutoModelForMaskedLM"


def create_model(
    family: str, out: Path, tokenizer: PreTrainedTokenizerBase, shape: Mapping[str, str], seed: int = 42
) -> PreTrainedModel:
    """Random weights of a shape (entries of the family's config.json), with a tokenizer beside them."""
    if out.exists():
        raise OfframpError(f"to write a new model to {out}", "something is there already", "choose another --out")
    config = _config(family, tokenizer, shape)
    torch.manual_seed(seed)
    try:
        model: PreTrainedModel = getattr(transformers, AUTO_CLASS).from_config(config)
    except (ValueError, RuntimeError) as error:
        raise _odd(family, shape, error) from error
    backbones.head(model, AUTO_CLASS)  # it can be run and has something to learn from
    with quiet_transformers(), atomic_replace(out) as fresh:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    return model


def _config(family: str, tokenizer: PreTrainedTokenizerBase, shape: Mapping[str, str]) -> Any:
    backbones.find(family)
    known = transformers.AutoConfig.for_model(family).to_dict()
    fixed = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    for key, value in shape.items():
        if key not in known or key in fixed:
            why = "the tokenizer decides it" if key in fixed else "no such entry"
            fix = f"known entries: {', '.join(sorted(set(known) - set(fixed)))}"
            raise OfframpError(f"an entry of the config.json of {family}", f"{key}={value}: {why}", fix)
    given = {key: _value(key, text, known[key]) for key, text in shape.items()}
    try:
        return transformers.AutoConfig.for_model(family, **given, **fixed)
    except Exception as error:  # configurations of transformers check themselves, each with errors of its own
        raise _odd(family, shape, error) from error


def _value(key: str, text: str, default: Any) -> Any:
    """Text as a value of the kind that stands there by default."""
    try:
        if isinstance(default, int | float | str) and not isinstance(default, bool):
            return type(default)(text)
        value = yaml.safe_load(text)
        if not isinstance(default, bool) or isinstance(value, bool):
            return value
    except (ValueError, yaml.YAMLError):
        pass
    raise OfframpError(f"a value for {key}", f"{key}={text}", f"give a {type(default).__name__}, like {default}")


def _odd(family: str, shape: Mapping[str, str], error: Exception) -> OfframpError:
    said = " ".join(str(error.__cause__ or error).split())
    asked = f"a new {family} model with {', '.join(f'{k}={v}' for k, v in shape.items()) or 'no settings'}"
    return OfframpError(asked, said, "give entries of the family's config.json that fit together")
