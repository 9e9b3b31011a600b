"""Text in, predictions out: prepare, run, finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from offramp import engines, methods
from offramp.errors import OfframpError
from offramp.model import folder as folders
from offramp.model import points as operating
from offramp.model.folder import Loaded
from offramp.model.points import Points
from offramp.model.runner import Outcome, full_macs, run_encoded
from offramp.text.tokenise import Encoded

Row = Mapping[str, Any]


class Predictor:
    """A loaded model that answers within a budget. Safe to share: it keeps no state between calls."""

    def __init__(self, model: Loaded, points: Points | None = None, engine: str = "torch") -> None:
        self.model, self.points = model, points
        self.network, self.task = model.network, model.network.task
        self.engine = engines.make(engine, model.network.encoder)
        self.engine_name = engine
        self.network.eval()

    @classmethod
    def load(cls, folder: str | Path, engine: str = "torch") -> Predictor:
        """Open a run folder."""
        model, path = folders.load(folder), Path(folder)
        points = operating.load(path) if (path / "points.json").is_file() else None
        return cls(model, points, engine)

    def settings(self, budget: float | None = None, given: Mapping[str, Any] | None = None) -> Any:
        """Run-time settings: those given, else those of the budget's operating point, else the loosest."""
        method = self.model.method
        if given:
            return methods.configure(method.settings, dict(given), method.name)
        if budget is not None:
            operating.check_budget(budget)
        if self.points is None:
            if budget is not None and budget < 1.0:
                raise OfframpError(
                    f"budget={budget}", "a model without operating points", "give dev rows to `offramp train`"
                )
            return method.settings()
        return methods.configure(method.settings, self.points.choose(budget).settings, method.name)

    def predict(
        self, texts: Sequence[Any], budget: float | None = None, batch_size: int = 32
    ) -> list[dict[str, Any]]:
        """Predictions in input order. A text may be a string, a pair, a list of words, or a row with named columns."""
        rows = [self._row(text) for text in texts]
        if not rows:
            return []
        encoded = self.prepare(rows)
        outcome = self.run(encoded, self.settings(budget), batch_size)
        return self.finish(rows, encoded, outcome)

    def _row(self, text: Any) -> Row:
        """One input as a row with the task's own column names."""
        names = self.task.input_columns
        if isinstance(text, Mapping):
            return text
        parts = [text] if len(names) == 1 else text
        if isinstance(parts, str) or not isinstance(parts, Sequence) or len(parts) != len(names):
            raise OfframpError(f"an input with {', '.join(names)}", repr(text)[:80], "give one value for each, in order")
        return dict(zip(names, parts, strict=True))

    def prepare(self, rows: Sequence[Row], source: str = "the input") -> list[Encoded]:
        """Rows → token ids."""
        self.task.check_inputs(rows, source)
        return self.task.encode(self.model.tokenizer, rows, self.model.max_length)

    def run(self, encoded: Sequence[Encoded], settings: Any, batch_size: int = 32) -> Outcome:
        """Token ids → logits, exits and costs."""
        policy = self.model.method.policy(self.network, settings)
        return run_encoded(self.network, self.engine, policy, encoded, batch_size)

    def finish(self, rows: Sequence[Row], encoded: Sequence[Encoded], outcome: Outcome) -> list[dict[str, Any]]:
        """Logits → predictions with what they cost; a row cut into windows adds its windows up."""
        answers = self.task.predictions(rows, encoded, outcome.logits)
        owner = np.array([e.example for e in encoded])
        windows = np.bincount(owner, minlength=len(rows))
        sums = [np.bincount(owner, weights=w, minlength=len(rows)) for w in
                (outcome.exit_layer, outcome.tokens_kept, outcome.macs)]  # fmt: skip
        for i, answer in enumerate(answers):
            mean_exit = sums[0][i] / windows[i]
            answer["exit_layer"] = int(mean_exit) if mean_exit == int(mean_exit) else round(float(mean_exit), 3)
            answer["tokens_kept"] = round(float(sums[1][i]), 3)
            answer["macs"] = int(sums[2][i])
        return answers

    def full_macs(self, encoded: Sequence[Encoded]) -> float:
        """What the full model would spend on these rows together."""
        return float(full_macs(self.network, encoded).sum())

    @property
    def about(self) -> dict[str, Any]:
        """The model in a few words."""
        return {**folders.describe(self.model), "points": asdict(self.points) if self.points else None}
