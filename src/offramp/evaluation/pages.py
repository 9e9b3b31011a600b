"""Self-contained HTML pages: a template with its style, script and data in one file."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from offramp.evaluation.explanations import Explanation
from offramp.utils.files import write_text


def page(name: str, title: str, data: Any) -> str:
    """Return the page of `templates/<name>.html` around `data`; it loads nothing from elsewhere."""
    folder = files("offramp.evaluation") / "templates"
    body, style, script = (
        (folder / part).read_text(encoding="utf-8") for part in (f"{name}.html", "style.css", f"{name}.js")
    )
    content = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")  # no text ends the script
    parts = {
        "/*style*/": style,
        "/*script*/": script,
        "__title__": html.escape(title, quote=False),
        "__data__": content,
    }
    for mark, part in parts.items():
        body = body.replace(mark, part)
    return body


def explanation_page(explanation: Explanation, path: str) -> None:
    """Write the page of an explanation."""
    title = f"{explanation.method}: where it stopped"
    write_text(Path(path), page("explain", title, explanation.to_json()))
