"""`offramp explain` as a function: what happened to one input, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offramp.evaluation.explanations import Explanation, explain_input
from offramp.evaluation.pages import explanation_page
from offramp.inference.predictor import Predictor
from offramp.utils.files import check_output_file


def explain(
    run: str | Path,
    texts: Sequence[str],
    *,
    budget: float | None = None,
    max_loss: float | None = None,
    risk: float | None = None,
    latency: str | float | None = None,
    max_disagreement: float | None = None,
    settings: Mapping[str, Any] | None = None,
    html: str | Path | None = None,
) -> Explanation:
    """Return which tokens left after each layer, the answer of every exit, and where the input stopped and why.

    `texts` is one text, or two for a task on pairs or questions. With `html` a page with a slider over all budgets is
    written there.
    """
    check_output_file(html, run)
    predictor = Predictor.load(run, "torch")
    chosen = predictor.settings(budget, settings, max_loss, risk, latency, max_disagreement)
    explanation = explain_input(predictor, Path(run).name, texts, chosen)
    if html is not None:
        explanation_page(explanation, str(html))
    return explanation
