"""Rows of a data set of the `datasets` library, named NAME[/CONFIG][:SPLIT], for example `glue/sst2:validation`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offramp.errors import OfframpError, missing_package

NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*){0,2}(:\w[\w%\[\]:+-]*)?")


def looks_like_name(source: str) -> bool:
    """Return whether a source has the form of a data set's name and is not plainly a mistyped path."""
    if NAME.fullmatch(source) is None:
        return False
    path = Path(source)
    in_a_folder = path.parent != Path(".") and path.parent.is_dir()
    return ":" in source or not (path.suffix or in_a_folder)


def dataset_rows(source: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set (needs the extra `data`); label indices stay numbers, tag indices become names."""
    try:
        from datasets import ClassLabel, List
    except ImportError as error:
        raise missing_package("data", "datasets") from error
    data = _load(source)
    tags = {
        name: kind.feature
        for name, kind in (data.features or {}).items()
        if isinstance(kind, List) and isinstance(kind.feature, ClassLabel)
    }
    for row in data:
        yield {**row, **{name: [label.int2str(tag) for tag in row[name]] for name, label in tags.items()}}


def _load(source: str) -> Any:
    """Load A/B as data set A with configuration B, or, if there is none, as data set B of owner A."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    path, _, split = source.partition(":")
    name, _, config = path.rpartition("/") if "/" in path else (path, "", "")
    try:
        try:
            return load_dataset(name, config or None, split=split or "train")
        except DatasetNotFoundError:
            if not config:
                raise
            return load_dataset(path, split=split or "train")
    except Exception as error:  # datasets raises a dozen unrelated classes; none of them is a bug of ours
        raise OfframpError(
            asked=f"the data set {source!r} (no file of that name exists)",
            given=f"an error of the datasets library: {error}",
            fix="check the name, the split (NAME/CONFIG:SPLIT) and the network, or give a file instead",
        ) from error
