"""Published hyperparameters, one YAML file each, `<method>/<data set>.yaml`; the folders are the list.

A recipe holds values for options of `offramp train`; options on the command line win over it. The numbers are those of
the papers or their code, found for BERT-base and their data: a starting point elsewhere. `epochs` counts each stage of
a method; where a paper gives its stages different lengths, a comment in the recipe gives them. TR-BERT's RACE has no
recipe, because there is no task of multiple choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from typing import Any

import yaml

from offramp.errors import OfframpError


@dataclass(frozen=True)
class Recipe:
    """Values for options of `offramp train`; the defaults are those of the command."""

    method: str
    task: str = "classification"
    epochs: int = 3
    batch_size: int = 32
    lr: float = 5e-5
    warmup: float = 0.1
    weight_decay: float = 0.01
    max_length: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def override(self, fields: Mapping[str, Any], options: Mapping[str, Any]) -> Recipe:
        """Return the recipe with other values for some fields and some options of the method.

        The method may become a pair that the recipe's method is part of. A pair has one `head_lr` for both methods, and
        the paper's does not suit what the other method adds: the default stays unless an option gives another.
        """
        method = str(fields.get("method", self.method))
        if self.method not in method.split("+"):
            fix = "leave --method out, or choose a recipe of that method"
            raise OfframpError(f"the method {method!r}", f"a recipe of {self.method!r}", fix)
        kept = {name: value for name, value in self.options.items() if "+" not in method or name != "head_lr"}
        return replace(self, **fields, options={**kept, **options})


def recipe_names() -> list[str]:
    """Return the names of all recipes."""
    folders = (folder for folder in files(__name__).iterdir() if folder.is_dir())
    found = [(f.name, file.name) for f in folders for file in f.iterdir() if file.name.endswith(".yaml")]
    return sorted(f"{method}/{file.removesuffix('.yaml')}" for method, file in found)


def load_recipe(name: str) -> Recipe:
    """Return a recipe by name; an unknown name is refused with the known ones."""
    if name not in recipe_names():
        method = name.split("/")[0]
        fix = ", ".join(n for n in recipe_names() if n.split("/")[0] == method) or ", ".join(recipe_names())
        raise OfframpError("a recipe", repr(name), f"use one of: {fix}")
    method, data = name.split("/")
    return parse_recipe(files(__name__).joinpath(method, f"{data}.yaml").read_text(encoding="utf-8"), method)


def parse_recipe(text: str, method: str) -> Recipe:
    """Return a recipe from the text of its file, for the method of its folder."""
    content = yaml.safe_load(text) or {}
    known = {f.name for f in fields(Recipe)} - {"method"}
    unknown = set(content) - known
    if unknown:
        given, fix = f"unknown entries: {', '.join(sorted(unknown))}", f"known: {', '.join(sorted(known))}"
        raise OfframpError("a recipe", given, fix)
    return Recipe(method, **content)
