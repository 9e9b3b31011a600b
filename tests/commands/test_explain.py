"""`explain`: one input layer by layer, and the page about it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from offramp.commands.explain import explain
from offramp.errors import OfframpError
from tests import factories


def test_explain_returns_the_explanation_and_writes_the_page(trained: Path, tmp_path: Path) -> None:
    explanation = explain(trained, ["a good film"], budget=1.0, html=tmp_path / "page.html")
    assert explanation.run == trained.name and explanation.inputs == {"text": "a good film"}
    assert "a good film" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["offramp.json", "model.safetensors"])
def test_explain_never_writes_over_the_run_that_it_reads(trained: Path, tmp_path: Path, page: str) -> None:
    own = Path(shutil.copytree(trained, tmp_path / "own"))
    before = factories.read_files(own)
    with pytest.raises(OfframpError, match="which is read"):
        explain(own, ["a good film"], html=own / page)
    assert factories.read_files(own) == before
