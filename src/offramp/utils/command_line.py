"""Command lines: the one that produced a result, without the folders of one machine, and values written key=value."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from offramp.errors import OfframpError


def command_line(program: str = "offramp") -> str:
    """Return the command as it was typed; of absolute paths the last two parts stay."""
    return " ".join([program, *map(_short_argument, sys.argv[1:])])


def python_call(function: str, *arguments: Any, **keywords: Any) -> str:
    """Return a call as Python text, `offramp.evaluate('runs/a', data='dev.jsonl')`, without arguments that are None."""
    listed = [_short_value(value) for value in arguments]
    listed += [f"{name}={_short_value(value)}" for name, value in keywords.items() if value is not None]
    return f"offramp.{function}({', '.join(listed)})"


def short_path(path: str) -> str:
    """Return the last two parts of an absolute path; a relative path and a name on a hub as they are."""
    return last_two_parts(path) if path.startswith(("/", "~")) else path


def last_two_parts(path: str | Path) -> str:
    """Return the last two parts of any path."""
    return "/".join(Path(path).parts[-2:])


def model_name(source: str) -> str:
    """Return a model's folder or hub name in one word; a folder that is called "model" is named by the one around it.

    One word is no name on the hub that a stranger could own, so that nothing is ever downloaded under the name of a
    folder.
    """
    parts = Path(source).parts
    return parts[-2] if parts[-1] == "model" and parts[-2:-1] not in ((), ("/",), ("~",)) else parts[-1]


def model_name_of(source: str) -> str:
    """Return the `model_name` of an absolute path; hub names and relative paths stay as they are."""
    return model_name(source) if source.startswith(("/", "~")) else source


def key_values(given: Iterable[str] | None, flag: str) -> dict[str, str]:
    """Return `key=value` items as a dictionary."""
    found = {}
    for item in given or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise OfframpError(f"{flag} key=value", repr(item), f"write it as {flag} name=value")
        found[key] = value
    return found


def check_given_with(option: str, present: bool, others: Mapping[str, Any]) -> None:
    """Refuse options that mean nothing without another one: values by option, None or False where it was not given."""
    found = {name: value for name, value in others.items() if value is not None and value is not False}
    if found and not present:
        given = " ".join(name if value is True else f"{name} {value}" for name, value in found.items())
        fix = f"add {option}, or leave {'them' if len(found) > 1 else 'it'} out"
        raise OfframpError("options that go together", f"{given} without {option}", fix)


def _short_argument(word: str) -> str:
    option, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
    return option + equals + short_path(value)


def _short_value(value: Any) -> str:
    return repr(short_path(str(value)) if isinstance(value, str | Path) else value)
