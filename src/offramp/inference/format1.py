"""Names that run folders of format 1 store, mapped to the names of format 2.

Folders written before version 0.2 (format 1) store module keys, option names, task names and event kinds that the code
has since renamed. Every stored name that changed stands in a table here; everything else is the same in both formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from offramp.tasks import RENAMED

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
    "settle": "train_with_dropping",  # adapler
    "reach": "largest_scale",  # adapler
}
# task names in offramp.json and recipe.yaml: `tasks.RENAMED`
EVENT_KINDS = {"doubt": "exit_unit", "extra": "predictor"}  # kinds of events priced in latency.json


def tensors(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an offramp.safetensors under their format 2 names."""
    return {_rename_prefix(name, TENSOR_PREFIXES): tensor for name, tensor in stored.items()}


def description(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return an offramp.json of format 1 as one of format 2."""
    renamed = {**stored, "format": 2}
    if isinstance(stored.get("options"), dict):
        renamed["options"] = _rename_keys(stored["options"], OPTIONS)
    task = stored.get("task")
    if isinstance(task, dict) and isinstance(task.get("name"), str):
        renamed["task"] = {**task, "name": RENAMED.get(task["name"], task["name"])}
    return renamed


def recipe(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe.yaml of either format with the names of format 2."""
    renamed = dict(stored)
    if isinstance(stored.get("options"), dict):
        renamed["options"] = _rename_keys(stored["options"], OPTIONS)
    if isinstance(stored.get("task"), str):
        renamed["task"] = RENAMED.get(stored["task"], stored["task"])
    return renamed


def time_model(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return one entry of a latency.json of either format with the names of format 2."""
    return {**stored, "ms": {_rename_prefix(name, EVENT_KINDS): ms for name, ms in stored["ms"].items()}}


def _rename_prefix(name: str, table: Mapping[str, str]) -> str:
    """Return a dotted name whose first part is renamed."""
    prefix, dot, rest = name.partition(".")
    return table.get(prefix, prefix) + dot + rest


def _rename_keys(values: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    return {table.get(name, name): value for name, value in values.items()}
