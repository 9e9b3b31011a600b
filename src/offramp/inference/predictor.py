"""Text in, predictions out: prepare, run, finish."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from offramp import engines, methods
from offramp.data.tokenization import Encoded
from offramp.engines import How, Precision
from offramp.errors import OfframpError
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.batching import RunOutput, full_macs, per_input_row, run_encoded
from offramp.inference.operating_points import OperatingPoints
from offramp.inference.run_folder import LoadedRun
from offramp.utils.hardware import hardware

Row = Mapping[str, Any]
CHUNK = 64  # batches sorted by length together


def check_size(batch_size: Any) -> None:
    """Refuse what is no number of rows."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise OfframpError("rows to answer together", f"batch_size={batch_size!r}", "give a whole number, 1 or more")


class Predictor:
    """A loaded model that answers within a budget. Safe to share: it keeps no state between calls."""

    def __init__(
        self,
        model: LoadedRun,
        points: OperatingPoints | None = None,
        engine: str = engines.AUTO,
        how: How | None = None,
    ) -> None:
        self.model, self.points = model, points
        self.network, self.task = model.network, model.network.task
        self.how = how or How()
        device = torch.device("cuda" if torch.cuda.is_available() and engine != "openvino" else "cpu")
        self.engine_name = engines.choose(engine, device)
        self.network.to(device)
        self.network.eval()
        self.engine = engines.make(self.engine_name, model.network.encoder, self.how)

    @classmethod
    def load(
        cls, folder: str | Path, engine: str = engines.AUTO, precision: Precision = "fp32", threads: int | None = None
    ) -> Predictor:
        """Open a run folder; what is compiled for it is kept inside, under `.cache`."""
        path, how = Path(folder), How(precision, threads, Path(folder) / ".cache")
        engines.choose(engine, torch.device("cpu"))  # a wrong name is answered before anything is read
        model = folders.load_run(folder)
        points = operating.load_points(path) if (path / "points.json").is_file() else None
        return cls(model, points, engine, how)

    def settings(
        self,
        budget: float | None = None,
        given: Mapping[str, Any] | None = None,
        max_loss: float | None = None,
        risk: float | None = None,
        latency: float | None = None,
    ) -> Any:
        """Run-time settings: those given, else those of the operating point for a budget, a loss, a risk or a time."""
        method = self.model.method
        asked = {"budget": budget, "settings": given or None, "max_loss": max_loss, "risk": risk, "latency": latency}
        named = [f"{name}={value}" for name, value in asked.items() if value is not None]
        if len(named) > 1:
            raise OfframpError("settings", " and ".join(named), "give only one of them")
        if given:
            return methods.configure(method.settings, dict(given), method.name)
        if budget is not None:
            operating.check_budget(budget)
        if self.points is None:
            if named and budget != 1.0:
                raise OfframpError(named[0], "a model without operating points", "run `offramp calibrate` on it first")
            return method.settings()
        if risk is not None:
            if self.how.precision != "fp32":  # other numbers, other answers: nothing was shown of them
                why = f"precision {self.how.precision}, and what was proven was proven in fp32"
                raise OfframpError(f"a guaranteed risk of {risk:g}", why, "use fp32, or ask for a budget")
            return methods.configure(method.settings, self.points.proven(risk).settings, method.name)
        if latency is not None:
            return methods.configure(method.settings, self._in_time(self.points, latency), method.name)
        loss = operating.TOLERANCE if max_loss is None else max_loss
        return methods.configure(method.settings, self.points.choose(budget, loss).settings, method.name)

    def _in_time(self, points: OperatingPoints, seconds: Any) -> dict[str, Any]:
        """Settings for a latency, with a warning where its milliseconds were not measured."""
        if isinstance(seconds, str) or not seconds > 0.0:
            raise OfframpError("a time for one answer", f"latency={seconds!r}", "give seconds above 0, e.g. 0.005")
        found, here = points.within(seconds, self.engine_name, self.how.precision), hardware()
        if found.hardware != here:
            warnings.warn(f"{found.milliseconds:g}ms were measured on {found.hardware}; this is {here}", stacklevel=3)
        elif found.threads != self.how.threads:
            then, now = (operating.threads_in_words(threads) for threads in (found.threads, self.how.threads))
            warnings.warn(f"{found.milliseconds:g}ms were measured on {then}; this runs on {now}", stacklevel=3)
        return found.settings

    def predict(
        self,
        texts: Sequence[Any],
        budget: float | None = None,
        batch_size: int = 32,
        max_loss: float | None = None,
        risk: float | None = None,
        latency: float | None = None,
    ) -> list[dict[str, Any]]:
        """Predictions in input order. A text may be a string, a pair, a list of words, or a row with named columns.

        What may be spent: `budget`, a share of the full model's compute; or `max_loss`, how much of the metric may be
        lost; or `risk`, how often the answer may differ from the full model's, if `offramp calibrate --risk` proved it;
        or `latency`, seconds for a single input, if `offramp calibrate --latency` measured that on this machine.
        Without any of them the cheapest setting that lost at most half a point in calibration; 1.0 is the full model.
        """
        if isinstance(texts, str | Mapping):
            raise OfframpError("a list of inputs", f"a single one: {texts!r:.60}", "put it in a list: predict([…])")
        rows, settings = [self._row(text) for text in texts], self.settings(budget, None, max_loss, risk, latency)
        self.task.check_inputs(rows, "the input")
        answers: list[dict[str, Any]] = []
        for chunk in self.chunks(rows, batch_size):
            encoded = self.prepare(chunk)
            answers += self.finish(chunk, encoded, self.run(encoded, settings, batch_size))
        return answers

    def chunks(self, rows: Iterable[Row], batch_size: int) -> Iterator[list[Row]]:
        """Rows to answer together: sorted by length among themselves, and few where each answer is a vocabulary.

        Until they are answered, Python's collector leaves alone what is there already: a look through all the objects
        of the libraries takes a quarter of a second, every few thousand rows. What was set aside before stays so."""
        check_size(batch_size)
        rows, size = iter(rows), batch_size * (1 if self.task.outputs == 0 and self.task.kind == "token" else CHUNK)
        ours = gc.get_freeze_count() == 0
        if ours:
            gc.freeze()
        try:
            while chunk := list(itertools.islice(rows, size)):
                yield chunk
        finally:
            if ours:
                gc.unfreeze()

    def _row(self, text: Any) -> Row:
        """One input as a row with the task's own column names."""
        names = self.task.input_columns
        if isinstance(text, Mapping):
            return text
        parts = [text] if len(names) == 1 else text
        if isinstance(parts, str) or not isinstance(parts, Sequence) or len(parts) != len(names):
            raise OfframpError(
                f"an input with {' and '.join(names)}", repr(text)[:80], "give one value for each, in order, or a dict"
            )
        return dict(zip(names, parts, strict=True))

    def prepare(self, rows: Sequence[Row], source: str = "the input") -> list[Encoded]:
        """Rows → token ids."""
        self.task.check_inputs(rows, source)
        encoded = self.task.encode(self.model.tokenizer, rows, self.model.max_length)
        self.task.check_encoded(encoded, self.model.max_length, source)
        return encoded

    def run(self, encoded: Sequence[Encoded], settings: Any, batch_size: int = 32) -> RunOutput:
        """Token ids → logits, exits and costs."""
        policy = self.model.method.policy(self.network, settings)
        return run_encoded(self.network, self.engine, policy, encoded, batch_size)

    def finish(self, rows: Sequence[Row], encoded: Sequence[Encoded], outcome: RunOutput) -> list[dict[str, Any]]:
        """Logits → predictions with what they cost; a row cut into windows adds its windows up."""
        answers = self.task.predictions(rows, encoded, outcome.logits)
        spent = per_input_row(outcome, encoded, len(rows))
        for answer, layer, kept, macs in zip(answers, *(column.tolist() for column in spent), strict=True):
            answer["exit_layer"] = int(layer) if layer == int(layer) else round(layer, 3)
            answer["tokens_kept"] = round(kept, 3)
            answer["macs"] = int(macs)
        return answers

    def full_macs(self, encoded: Sequence[Encoded], outcome: RunOutput | None = None) -> float:
        """What the full model would spend on these rows together."""
        return float(full_macs(self.network, encoded, outcome).sum())

    @property
    def description(self) -> dict[str, Any]:
        """The model in a few words."""
        return {**folders.run_description(self.model), "points": asdict(self.points) if self.points else None}
