"""Command lines: the one that produced a result, without the folders of one machine, and values written key=value."""

from __future__ import annotations

import sys
from collections.abc import Iterable
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
    """Return the last two parts of an absolute path, and a relative path as it is."""
    return "/".join(Path(path).parts[-2:]) if path.startswith(("/", "~")) else path


def model_name_of(source: str) -> str:
    """Return a model's name without the folders of this machine; hub names and relative paths stay as they are.

    A folder that is called "model" is named by the folder around it. One word is no name on the hub that a stranger
    could own, so that nothing is ever downloaded under the name of a folder.
    """
    if not source.startswith(("/", "~")):
        return source
    parts = Path(source).parts
    return parts[-2] if parts[-1] == "model" and len(parts) > 2 else parts[-1]


def key_values(given: Iterable[str] | None, flag: str) -> dict[str, str]:
    """Return `key=value` items as a dictionary."""
    found = {}
    for item in given or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise OfframpError(f"{flag} key=value", repr(item), f"write it as {flag} name=value")
        found[key] = value
    return found


def _short_argument(word: str) -> str:
    option, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
    return option + equals + short_path(value)


def _short_value(value: Any) -> str:
    return repr(short_path(str(value)) if isinstance(value, str | Path) else value)
