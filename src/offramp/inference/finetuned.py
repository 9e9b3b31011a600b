"""Fine-tuned Hugging Face models as they are: which task their head is for, and their files, unchanged.

A model comes from a folder, from a name on the hub (with a revision; `HF_*` variables and the offline cache are
respected), or from an Offramp run, whose folder plain transformers opens too. Labels keep the order of the model's own
`id2label`. Weights must be safetensors; code that a model brings along is never run.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from offramp import backbones, methods, tasks
from offramp.errors import OfframpError
from offramp.inference.hub import FILES, download
from offramp.inference.run_folder import (
    LoadedRun,
    check_tokenizer_size,
    load_backbone_and_missing,
    load_tokenizer,
    read_description,
    task_from_description,
)
from offramp.tasks import Row, Task
from offramp.utils.files import read_json
from offramp.utils.run_paths import is_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ATTACHED = "attached"  # the method of runs that `attach` writes
OWN_FILES = {"offramp.json", "offramp.safetensors", "points.json", "search.json", "latency.json"}
GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForSeq2SeqLM", "MTModel")


@dataclass(frozen=True)
class FineTunedModel:
    """A fine-tuned model: its folder, configuration and task."""

    folder: Path
    source: str  # what the user named
    config: Mapping[str, Any]
    task: Task

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return the model, with its own head, and its tokenizer."""
        tokenizer = load_tokenizer(str(self.folder))
        hf, missing = load_backbone_and_missing(str(self.folder), self.task)
        if missing:
            given = f"{self.source}, whose weights lack {', '.join(sorted(missing)[:3])}"
            raise OfframpError("a fine-tuned model with its head", given, "give the folder of the fine-tuned model")
        check_tokenizer_size(tokenizer, hf, self.source)
        return hf, tokenizer

    def copy_to(self, folder: Path) -> None:
        """Copy the model's own files, byte for byte."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted({path for pattern in FILES for path in self.folder.glob(pattern)}):
            if path.name not in OWN_FILES:
                shutil.copyfile(path, folder / path.name)


def find_model(source: str, texts: Sequence[str] = ("text",), revision: str | None = None) -> FineTunedModel:
    """Return the fine-tuned model that a folder or a hub name holds; refuse models that cannot be served."""
    folder = _folder(source, revision)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    if not isinstance(config, dict):
        raise OfframpError("a fine-tuned model", f"{source}, without a config.json", "give the model's folder")
    if "auto_map" in config and config.get("model_type") not in transformers.CONFIG_MAPPING:
        given = f"{source}, which brings its own code (auto_map in config.json)"
        raise OfframpError("a model of a known family", given, "Offramp never runs code from a model's folder")
    _check_weights(folder, source)
    _check_label_names(config, source)
    own = task_from_description(read_description(folder)) if is_run(folder) else None
    task = task_of_model(config, source, tuple(texts), own)
    backbones.find(config.get("model_type", "unknown"))
    if own is not None:
        task = _task_of_run(folder, source, own, task, tuple(texts))
    return FineTunedModel(folder, source, config, task)


def _task_of_run(folder: Path, source: str, own: Task, read: Task, texts: tuple[str, ...]) -> Task:
    """Return the task of an Offramp run, which knows labels as they were given, if it fits the head."""
    description = read_description(folder)
    if not methods.get(description["method"]).hf_equal:
        given = f"{source}, a run of {description['method']!r}, whose full model was never trained"
        raise OfframpError("a fine-tuned model", given, "give a run of another method, e.g. full")
    fits = (own.auto_class, own.outputs) == (read.auto_class, read.outputs)
    pair_given = len(texts) > 1 and texts != own.input_columns
    return own if fits and not pair_given else read


def with_known_labels(run: LoadedRun, rows: Sequence[Row]) -> list[Row]:
    """Return labelled rows with the names that a run has for their labels.

    Where exits were attached to a model, numbers may stand for its outputs, as in the labelled rows of `attach`.
    """
    if run.method.name != ATTACHED:
        return list(rows)
    return [run.network.task.with_known_label(row) for row in rows]


def trained_head(source: str) -> str | None:
    """Return the class of a model that is fine-tuned for a task already, by its configuration; None for others."""
    try:
        config, _ = transformers.PreTrainedConfig.get_config_dict(source)
    except (OSError, ValueError):
        return None
    architecture = str((config.get("architectures") or [""])[0])
    return architecture if tasks.has_new_head(config) else None


def _folder(source: str, revision: str | None) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            given = f"--revision {revision} for the folder {source}"
            raise OfframpError("a revision of a model", given, "leave --revision out, or give a name on the hub")
        return path
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or path.is_file():
        given = f"{source!r}, which is {'a file' if path.is_file() else 'no folder'}"
        raise OfframpError("a fine-tuned model", given, "give a folder with config.json, or a name on the hub")
    return download(source, revision)


def _check_weights(folder: Path, source: str) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickled = [path.name for path in folder.glob("*.bin")] + [path.name for path in folder.glob("*.pt")]
    if pickled:
        given = f"{source} with pickled weights only ({pickled[0]}), which can run code when they are opened"
        fix = "convert them where you trust them: AutoModel….from_pretrained(…).save_pretrained(…) writes safetensors"
        raise OfframpError("weights in safetensors", given, fix)
    raise OfframpError("the weights of a model", f"{source} without model.safetensors", "give the whole folder")


def _check_label_names(config: Mapping[str, Any], source: str) -> None:
    """Refuse a model with one name for two of its outputs: an answer would not tell which is meant."""
    named = config.get("id2label")
    counts = Counter(str(name) for name in named.values()) if isinstance(named, Mapping) else Counter[str]()
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        given = f"{source}, whose config.json has the label {twice[0]!r} twice (id2label)"
        raise OfframpError("a name for each label", given, "correct id2label and label2id there")


def task_of_model(
    config: Mapping[str, Any], source: str, texts: tuple[str, ...] = ("text",), own: Task | None = None
) -> Task:
    """Return the task that a model's head is for; labels in the order of its own `id2label`.

    `own` is the task that a run folder names; it counts where no task recognises the model.
    """
    architecture = str((config.get("architectures") or ["unknown"])[0])
    if architecture.endswith(GENERATIVE):
        given = f"{source}, a generative model ({architecture})"
        raise OfframpError("a model that classifies, tags, scores or finds answers", given, "see docs/choosing.md")
    task = tasks.for_model(config, texts)
    if task is None and own is not None and own.has_head(config) and not own.over_vocabulary:
        task = own
    if task is None:
        given = f"{source}, whose class {architecture} has no head for a task"
        fix = "give a fine-tuned model; to fine-tune this one, run `offramp train --model` on labelled rows"
        raise OfframpError("a fine-tuned model", given, fix)
    return task
