"""`explain`: one input layer by layer, and the page about it."""

from __future__ import annotations

from pathlib import Path

from offramp.commands.explain import explain


def test_explain_returns_the_explanation_and_writes_the_page(trained: Path, tmp_path: Path) -> None:
    explanation = explain(trained, ["a good film"], budget=1.0, html=tmp_path / "page.html")
    assert explanation.run == trained.name and explanation.inputs == {"text": "a good film"}
    assert "a good film" in (tmp_path / "page.html").read_text(encoding="utf-8")
