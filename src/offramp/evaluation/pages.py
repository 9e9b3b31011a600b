"""Self-contained pages: a template, its style and script, and the data as JSON, all in one file."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from offramp.evaluation.explanations import Explanation
from offramp.utils.files import write_text


def page(name: str, title: str, data: Any) -> str:
    """The page `pages/<name>.html` around `data`. Nothing is fetched: style, script and data stand in it."""
    folder = files("offramp.evaluation") / "templates"
    body, style, script = (
        (folder / part).read_text(encoding="utf-8") for part in (f"{name}.html", "style.css", f"{name}.js")
    )
    held = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")  # no text may end the script
    for mark, part in (("/*style*/", style), ("/*script*/", script), ("__title__", _safe(title)), ("__data__", held)):
        body = body.replace(mark, part)
    return body


def _safe(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def explanation_page(explanation: Explanation, path: str) -> None:
    """Write the page of an explanation."""
    title = f"{explanation.method}: where it stopped"
    write_text(Path(path), page("explain", title, explanation.to_json()))
