"""Untrained models: an encoder of any family to be pretrained, or a translation model with a tokenizer of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import yaml
from safetensors.torch import save_file

from offramp import backbones
from offramp.data.tokenizer_training import train_bpe_tokenizer
from offramp.errors import OfframpError
from offramp.tasks import Task
from offramp.utils.files import atomic_replace, read_json
from offramp.utils.hf_logging import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AUTO_CLASS = "AutoModelForMaskedLM"
VOCABULARY = 4000  # pieces of a translation model's tokenizer, unless its configuration states a vocab_size


def create_model(
    family: str, out: Path, tokenizer: PreTrainedTokenizerBase, shape: Mapping[str, str], seed: int = 42
) -> PreTrainedModel:
    """Write a model with random weights and a tokenizer; `shape` holds entries of the family's config.json."""
    if out.exists():
        raise OfframpError(f"to write a new model to {out}", "something is there already", "choose another --out")
    config = _config(family, tokenizer, shape)
    torch.manual_seed(seed)
    try:
        model: PreTrainedModel = getattr(transformers, AUTO_CLASS).from_config(config)
    except (ValueError, RuntimeError) as error:
        raise _unfit_shape(family, shape, error) from error
    backbones.head(model, AUTO_CLASS)  # refuses a model that cannot be run or has no head to learn from
    with quiet_transformers(), atomic_replace(out) as folder:
        _save(model, folder)
        tokenizer.save_pretrained(folder)
    return model


def _save(model: PreTrainedModel, folder: Path) -> None:
    """Write configuration and weights; `save_pretrained` of a model writes in the first of several processes only, but
    each has a folder of its own."""
    model.config.architectures, model.config.dtype = [type(model).__name__], model.dtype
    model.config.save_pretrained(folder)
    state, owner = model.state_dict(), dict[int, str]()
    for name in sorted(state, key=lambda name: not name.startswith(f"{model.base_model_prefix}.")):
        owner.setdefault(state[name].data_ptr(), name)  # of tied weights the backbone's are written
    weights = {name: state[name].contiguous() for name in owner.values()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _config(family: str, tokenizer: PreTrainedTokenizerBase, shape: Mapping[str, str]) -> Any:
    """Return the configuration of a family with these entries."""
    backbones.find(family)
    defaults = transformers.AutoConfig.for_model(family).to_dict()
    fixed = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    for key, value in shape.items():
        if key not in defaults or key in fixed:
            why = "the tokenizer decides it" if key in fixed else "no such entry"
            fix = f"known entries: {', '.join(sorted(set(defaults) - set(fixed)))}"
            raise OfframpError(f"an entry of the config.json of {family}", f"{key}={value}: {why}", fix)
    given = {key: _parse_entry(key, text, defaults[key]) for key, text in shape.items()}
    try:
        return transformers.AutoConfig.for_model(family, **given, **fixed)
    except Exception as error:  # configurations of transformers check themselves, each with errors of its own
        raise _unfit_shape(family, shape, error) from error


def _parse_entry(key: str, text: str, default: Any) -> Any:
    """Return text as a value of the default's type."""
    try:
        if isinstance(default, int | float | str) and not isinstance(default, bool):
            return type(default)(text)
        value = yaml.safe_load(text)
        if not isinstance(default, bool) or isinstance(value, bool):
            return value
    except (ValueError, yaml.YAMLError):
        pass
    raise OfframpError(f"a value for {key}", f"{key}={text}", f"give a {type(default).__name__}, like {default}")


def _unfit_shape(family: str, shape: Mapping[str, str], error: Exception) -> OfframpError:
    reason = " ".join(str(error.__cause__ or error).split())
    asked = f"a new {family} model with {', '.join(f'{k}={v}' for k, v in shape.items()) or 'no settings'}"
    return OfframpError(asked, reason, "give entries of the family's config.json that fit together")


def is_model_configuration(source: str) -> bool:
    """Return whether a model is given as a configuration file, and so must be built."""
    return source.endswith(".json")


def build_translation_model(
    source: str, task: Task, rows: Sequence[Mapping[str, Any]]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model with random weights and a tokenizer learned from these rows.

    The tokenizer has at most as many pieces as the configuration's `vocab_size`.
    """
    if task.kind != "sequence":
        given = f"the configuration {source} for {task.name}"
        raise OfframpError("a pretrained model", given, "only translation models can be new; give a trained one")
    shape = _read_shape(source)
    texts = (text for row in rows for text in (row.get("src", row.get("text")), row["tgt"]))
    tokenizer = train_bpe_tokenizer(texts, int(shape.get("vocab_size", VOCABULARY)))
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    start = {"decoder_start_token_id": tokenizer.pad_token_id, "bos_token_id": None, "forced_eos_token_id": None}
    sizes = {"vocab_size": len(tokenizer), "decoder_vocab_size": len(tokenizer)}
    try:
        config = transformers.AutoConfig.for_model(**{**shape, **ids, **start, **sizes})
        return transformers.AutoModelForSeq2SeqLM.from_config(config), tokenizer
    except (ValueError, TypeError, KeyError) as error:
        lines = str(error).strip().splitlines()
        raise OfframpError(f"a model from {source}", lines[0] if lines else repr(error), "correct the file") from error


def _read_shape(source: str) -> dict[str, Any]:
    """Return the entries of a configuration file."""
    if not Path(source).is_file():
        raise OfframpError("a model configuration", f"{source!r}: no such file", "check the path")
    shape = read_json(Path(source))
    if not isinstance(shape, dict) or "model_type" not in shape:
        fix = 'write at least {"model_type": "marian", "d_model": 256, "decoder_layers": 6}'
        raise OfframpError("a model configuration", f"{source}, which names no model_type", fix)
    backbones.find(str(shape["model_type"]))
    return shape
