"""Two configurations as one flat dataclass: what a pair of methods shows to `--set`, points.json and offramp.json.

Fields keep their names. Where both parts have a field of one name, either the value is shared (options, such as a
learning rate; the second part's default counts) or both fields get their method's name in front (settings: two
thresholds are two knobs). A field with the metadata `SINGLE_METHOD_ONLY` is left out and keeps its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

SINGLE_METHOD_ONLY: Mapping[str, bool] = {"alone": True}  # metadata of a field that pairs do not have
FieldNames = dict[str, str]  # name in a part → name in the merged dataclass


@dataclass(frozen=True)
class MergedDataclass:
    """A frozen dataclass built from two, and the way back."""

    kind: type[Any]
    parts: tuple[type[Any], type[Any]]
    names: tuple[FieldNames, FieldNames]

    def split(self, merged: Any) -> tuple[Any, Any]:
        """Return the two parts of a value; each part checks its own values."""
        first, second = (
            part(**{own: getattr(merged, name) for own, name in names.items()})
            for part, names in zip(self.parts, self.names, strict=True)
        )
        return first, second

    def join(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
        """Return values of the two parts under the names of the merged dataclass."""
        both = zip(self.names, (first, second), strict=True)
        return {names[own]: value for names, values in both for own, value in values.items()}

    def part(self, which: int, merged: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the merged values that belong to one part, under its own names."""
        return {own: merged[name] for own, name in self.names[which].items() if name in merged}


def merge_dataclasses(
    name: str, first: tuple[str, type[Any]], second: tuple[str, type[Any]], shared: bool
) -> MergedDataclass:
    """Merge two labelled dataclasses; fields of the same name are shared, or get the label in front."""
    kinds = (first[1], second[1])
    clash = {f.name for f in fields(kinds[0])} & {f.name for f in fields(kinds[1])}

    def merged_names(label: str, kind: type[Any]) -> FieldNames:
        kept = [f.name for f in fields(kind) if not f.metadata.get("alone")]
        return {own: f"{label}_{own}" if own in clash and not shared else own for own in kept}

    names = (merged_names(*first), merged_names(*second))
    merged_fields = {}
    for kind, known in zip(kinds, names, strict=True):
        hints = get_type_hints(kind)
        own = [f for f in fields(kind) if f.name in known]
        merged_fields.update({known[f.name]: (known[f.name], hints[f.name], field(default=f.default)) for f in own})

    def check_parts(value: Any) -> None:
        merged.split(value)

    kind = make_dataclass(name, list(merged_fields.values()), frozen=True, namespace={"__post_init__": check_parts})
    merged = MergedDataclass(kind, kinds, names)
    return merged
