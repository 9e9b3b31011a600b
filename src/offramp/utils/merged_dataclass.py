"""Two configurations as one flat one: what a pair of methods shows to `--set`, to points.json and to offramp.json.

Fields keep their names. Where both parts use one, either the value is shared (options, such as a learning rate: the
second part's default stands) or both fields get their method's name in front (settings: two thresholds are two knobs).
A field that says it is for a method `ALONE` is no part of the whole and keeps its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

SINGLE_METHOD_ONLY: Mapping[str, bool] = {"alone": True}  # metadata of such a field
Names = dict[str, str]  # a part's field → the whole's


@dataclass(frozen=True)
class MergedDataclass:
    """A frozen dataclass made of two, and the way back."""

    kind: type[Any]
    parts: tuple[type[Any], type[Any]]
    names: tuple[Names, Names]

    def split(self, whole: Any) -> tuple[Any, Any]:
        """The two parts of a value; each checks itself."""
        first, second = (
            part(**{own: getattr(whole, name) for own, name in names.items()})
            for part, names in zip(self.parts, self.names, strict=True)
        )
        return first, second

    def join(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
        """What was said of each part, said of the whole."""
        given = zip(self.names, (first, second), strict=True)
        return {names[own]: value for names, values in given for own, value in values.items()}

    def part(self, which: int, whole: Mapping[str, Any]) -> dict[str, Any]:
        """What was said of the whole, as far as it concerns one part."""
        return {own: whole[name] for own, name in self.names[which].items() if name in whole}


def merge_dataclasses(
    name: str, first: tuple[str, type[Any]], second: tuple[str, type[Any]], shared: bool
) -> MergedDataclass:
    """One dataclass for two labelled ones; equal names are shared, or get the label in front."""
    kinds = (first[1], second[1])
    clash = {f.name for f in fields(kinds[0])} & {f.name for f in fields(kinds[1])}

    def named(label: str, kind: type[Any]) -> Names:
        kept = [f.name for f in fields(kind) if not f.metadata.get("alone")]
        return {own: f"{label}_{own}" if own in clash and not shared else own for own in kept}

    names = (named(*first), named(*second))
    made = {}
    for kind, known in zip(kinds, names, strict=True):
        hints = get_type_hints(kind)
        own = [f for f in fields(kind) if f.name in known]
        made.update({known[f.name]: (known[f.name], hints[f.name], field(default=f.default)) for f in own})

    def check(whole: Any) -> None:
        merged.split(whole)

    made_kind = make_dataclass(name, list(made.values()), frozen=True, namespace={"__post_init__": check})
    merged = MergedDataclass(made_kind, kinds, names)
    return merged
