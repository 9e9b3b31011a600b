"""JSON content as a typed dataclass: every field is checked against its annotation, and the first mistake is named.

Numbers must be finite; true and false are no numbers. A field with a default may be absent.
"""

from __future__ import annotations

import math
import types
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class SchemaError(ValueError):
    """Content that does not fit its type; the text names the place and what is there."""


def from_json(kind: type[T], content: Any, place: str = "", ignore_unknown: bool = False) -> T:
    """Return a dataclass from a JSON object; `place` is where in the file it stands."""
    if not isinstance(content, Mapping):
        raise SchemaError(f"{place or 'the file'} is {content!r:.60}, not an object")
    hints = _hints(cast(Hashable, kind))
    unknown = [name for name in content if name not in hints]
    if unknown and not ignore_unknown:
        raise SchemaError(f"{_at(place, unknown[0])} is not known")
    values = {}
    for one in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if one.name in content:
            values[one.name] = checked(hints[one.name], content[one.name], _at(place, one.name))
        elif one.default is MISSING and one.default_factory is MISSING:
            raise SchemaError(f"{_at(place, one.name)} is missing")
    return kind(**values)


def checked(kind: Any, value: Any, place: str) -> Any:
    """Return a value as its type: numbers, texts, tuples (JSON has lists only), objects; refuse any other."""
    if kind is Any:
        return value
    if is_dataclass(kind):
        return from_json(kind, value, place)  # type: ignore[arg-type]  # a class, not an instance
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in parts:
            return None
        (only,) = [part for part in parts if part is not type(None)]
        return checked(only, value, place)
    if origin is tuple and isinstance(value, list):
        return tuple(checked(parts[0], one, f"{place}[{number}]") for number, one in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: checked(parts[1], one, _at(place, name)) for name, one in value.items()}
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and _finite(value):
        return float(value)
    if kind in (int, str, bool) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise SchemaError(f"{place} is {value!r:.60}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
