"""Names that run folders of format 1 use, mapped to the names of format 2.

Folders written before version 0.2 (format 1) store module keys, option names and task names that the code has since
renamed. Every stored name that changed stands in a table here; everything else is the same in both formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

TENSOR_PREFIXES = {  # the first part of a tensor's name in offramp.safetensors
    "ramps": "exit_heads",
    "last": "final_head",
    "doubt": "exit_unit",
    "extra": "predictors",
    "halt": "halting_unit",
}
OPTIONS = {  # option names in offramp.json and recipe.yaml
    "ramp0": "exit0",
    "lexical": "bag_of_words",
    "lexicon": "bag_of_words_training",
    "lexical_depth": "bag_of_words_depth",
}
TASKS = {"span": "question_answering"}  # task names in offramp.json


def tensor_name(name: str) -> str:
    """Return the format 2 name of a stored tensor."""
    prefix, dot, rest = name.partition(".")
    return TENSOR_PREFIXES.get(prefix, prefix) + dot + rest


def tensors(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return stored tensors under their format 2 names."""
    return {tensor_name(name): tensor for name, tensor in stored.items()}


def description(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return an offramp.json of format 1 as one of format 2."""
    options = {OPTIONS.get(name, name): value for name, value in spec["options"].items()}
    task = spec.get("task")
    if isinstance(task, Mapping) and task.get("name") in TASKS:
        task = {**task, "name": TASKS[task["name"]]}
    return {**spec, "format": 2, "task": task, "options": options}
