"""Settings and options from text or JSON values."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import fields
from functools import lru_cache
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from offramp.errors import OfframpError


def configure(kind: type[Any], values: dict[str, Any], what: str) -> Any:
    """Return a settings or options dataclass from `key=value` pairs given as text or as JSON values."""
    defaults, hints = _defaults_and_types(cast(Hashable, kind))
    converted = {}
    for key, value in values.items():
        if key not in hints:
            listed = ", ".join(hints) or "none"
            raise OfframpError(f"a setting of {what}", f"{key}={value}", f"known settings: {listed}")
        converted[key] = _convert(value, getattr(defaults, key), f"{what} setting {key}")
        choices = get_args(hints[key]) if get_origin(hints[key]) is Literal else ()
        if choices and converted[key] not in choices:
            raise OfframpError(f"{what} setting {key}", repr(value), f"use one of: {', '.join(map(str, choices))}")
    try:
        return kind(**converted)
    except TypeError as error:  # a value of another type, from a file that was edited by hand
        listed = ", ".join(f"{key}={value!r}" for key, value in converted.items())
        types = ", ".join(f"{key}: {_describe_type(getattr(defaults, key))}" for key in converted)
        raise OfframpError(f"settings of {what}", listed, f"give values of these kinds: {types}") from error


@lru_cache(maxsize=64)  # called for every single prediction
def _defaults_and_types(kind: Any) -> tuple[Any, dict[str, Any]]:
    """Return the defaults of a dataclass and the types of its fields."""
    hints = get_type_hints(kind)
    return kind(), {f.name: hints[f.name] for f in fields(kind)}


def _describe_type(default: Any) -> str:
    is_list = isinstance(default, tuple)
    return "list of numbers, like 0.1,0.2" if is_list else f"{type(default).__name__}, like {default}"


def _convert(value: Any, default: Any, what: str) -> Any:
    if isinstance(default, tuple) and isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(value)  # JSON has lists only
    if not isinstance(value, str) or isinstance(default, str):
        return value
    try:
        if isinstance(default, tuple):
            return tuple(float(part) for part in value.split(",") if part.strip())
        if isinstance(default, bool):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]
        return type(default)(value)
    except (ValueError, KeyError) as error:
        raise OfframpError(what, repr(value), f"give a {_describe_type(default)}") from error
