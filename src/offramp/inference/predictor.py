"""Text in, predictions out: prepare, run, finish."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from offramp import engines, methods
from offramp.core.policy import Policy
from offramp.data.tokenization import Encoded
from offramp.engines import EngineOptions, Precision
from offramp.errors import OfframpError
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.batching import RunOutput, full_macs, per_input_row, run_encoded
from offramp.inference.budget import Budget
from offramp.inference.hub import local_folder
from offramp.inference.operating_points import EXACT, DisagreementPoint, OperatingPoints
from offramp.inference.run_folder import LoadedRun
from offramp.tasks import WindowPool
from offramp.utils.cache_folder import NOWHERE, cache_folder, keep_recent_folders
from offramp.utils.hardware import hardware

Row = Mapping[str, Any]
Long = Literal["truncate", "window"]
CHUNK = 64  # batches that are sorted by length together


def check_settings(model: LoadedRun, points: OperatingPoints) -> None:
    """Refuse operating points whose settings the method cannot use: a points.json that was edited or damaged."""
    method, defaults = model.method, asdict(model.method.settings())
    stored: list[Any] = [*points.points, *points.guarantees, *points.latencies, *points.disagreements]
    for settings in (one.settings for one in stored):
        try:
            for name, value in settings.items():
                if name in defaults:
                    _check_setting(name, value, defaults[name])
            method.policy(model.network, methods.configure(method.settings, settings, method.name))
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            given = f"a damaged points.json in {model.folder} ({error})".replace("\n", " ")
            fix = "restore it, or calibrate or train again"
            raise OfframpError("operating points", given, fix) from error


def _check_setting(name: str, value: Any, default: Any) -> None:
    """Refuse a value of another type than the default's."""
    if isinstance(default, tuple | list):
        usable = isinstance(value, list | tuple) and all(_is_number(one) for one in value)
    elif isinstance(default, bool | str):
        usable = isinstance(value, type(default))
    elif isinstance(default, int):
        usable = isinstance(value, int) and not isinstance(value, bool)
    elif isinstance(default, float):
        usable = _is_number(value)
    else:
        usable = True
    if not usable:
        raise TypeError(f"the setting {name} is {value!r:.60}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def graph_folder(run: str | Path, cache: str | Path | None = None) -> Path | None:
    """Return where the compiled graphs of a run are kept: a folder of its own for every set of weights, or None."""
    base = cache_folder(cache)
    return None if base is None else base / "graphs" / operating.weights_fingerprint(Path(run))


def check_batch_size(batch_size: Any) -> None:
    """Refuse a batch size that is not a whole number of rows."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise OfframpError("rows to answer together", f"batch_size={batch_size!r}", "give a whole number, 1 or more")


def check_window_pool(window_pool: Any) -> None:
    """Refuse an unknown way to join the windows of a row."""
    if window_pool not in get_args(WindowPool):
        given, fix = f"window_pool={window_pool!r}", f"use {' or '.join(get_args(WindowPool))}"
        raise OfframpError("how windows are joined", given, fix)


class Predictor:
    """A loaded model that predicts within a budget. Threads may share it."""

    def __init__(
        self,
        model: LoadedRun,
        points: OperatingPoints | None = None,
        engine: str = engines.AUTO,
        how: EngineOptions | None = None,
    ) -> None:
        self.model, self.points = model, points
        self.network, self.task = model.network, model.network.task
        self.how = how or EngineOptions()
        on_cuda = torch.cuda.is_available() and engine in (engines.AUTO, "torch")
        device = torch.device("cuda" if on_cuda else "cpu")
        self.engine_name, self.engine_reason = engines.explain_choice(engine, device, self.network.encoder, self.how)
        self.network.to(device)
        self.network.eval()
        self.engine = engines.make(self.engine_name, model.network.encoder, self.how)
        self._last_policy: tuple[Any, Policy] | None = None  # settings and their rule; replaced as a whole

    @classmethod
    def load(
        cls,
        folder: str | Path,
        engine: str = engines.AUTO,
        precision: Precision = "fp32",
        threads: int | None = None,
        revision: str | None = None,
        cache: str | Path | None = None,
    ) -> Predictor:
        """Open a run folder, or a name on the hub.

        Compiled graphs and packed weights are kept in `cache`, by default the user's cache folder; "none": nowhere.
        Nothing of that kind is read from the run folder or written to it.
        """
        engines.choose(engine, torch.device("cpu"))  # a wrong name is refused before anything is read
        path = local_folder(folder, revision)
        how = EngineOptions(precision, threads, graph_folder(path, cache), cache_folder(cache))
        if how.cache is not None:
            keep_recent_folders(how.cache)
        model = folders.load_run(path if path != Path(folder) else folder)
        points = operating.load_points(path) if (path / "points.json").is_file() else None
        if points is not None:
            check_settings(model, points)
        return cls(model, points, engine, how)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the run folder: weights and points are read again where it is unpickled."""
        if self.model.folder is None:
            raise OfframpError("to pickle a Predictor", "a model that lies in no run folder", "save it as a run first")
        how, cache = self.how, self.how.packed_weights or NOWHERE
        return Predictor.load, (self.model.folder, self.engine_name, how.precision, how.threads, None, cache)

    def settings(
        self,
        budget: float | Budget | None = None,
        given: Mapping[str, Any] | None = None,
        max_loss: float | None = None,
        risk: float | None = None,
        latency: str | float | None = None,
        max_disagreement: float | None = None,
    ) -> Any:
        """Return run-time settings: those `given`, else those of the operating point for a budget.

        The budget is one `Budget`, or one of the keyword arguments of `predict`.
        """
        limits = {"max_loss": max_loss, "max_disagreement": max_disagreement, "risk": risk, "latency": latency}
        if not given:
            return self.settings_for(Budget.parse(budget, **limits))  # type: ignore[arg-type]  # checked there
        if any(value is not None for value in (budget, *limits.values())):
            listed = [f"{name}={value}" for name, value in {"budget": budget, **limits}.items() if value is not None]
            raise OfframpError("settings", " and ".join([f"settings={dict(given)}", *listed]), "give only one of them")
        return methods.configure(self.model.method.settings, dict(given), self.model.method.name)

    def settings_for(self, budget: Budget) -> Any:
        """Return the run-time settings that a budget chooses among the operating points."""
        method, full = self.model.method, budget.kind == "share" and budget.value >= 1.0
        if self.points is None:
            if budget.kind != "default" and not full:
                given, fix = "a model without operating points", "run `offramp calibrate` on it first"
                raise OfframpError(str(budget), given, fix)
            return method.settings()
        return methods.configure(method.settings, self._point_settings(self.points, budget), method.name)

    def _point_settings(self, points: OperatingPoints, budget: Budget) -> dict[str, Any]:
        """Return the stored settings for a budget."""
        named, here = budget.kind != "default", (self.engine_name, self.how.precision)
        budget = budget if named else points.default_budget
        if budget.kind == "risk":
            return points.guarantee_for(budget.value, *here).settings
        if budget.kind == "disagreement":
            tested = points.disagreement_point_for(budget.value, here)
            if named and not tested.holds_on(*here):
                self._warn_of_other_numbers(budget, tested)
            return tested.settings
        if budget.kind != "latency":
            chosen = points.choose(budget)
            proven = budget.kind == "loss" and chosen != points.full_point and not points.within_loss(budget.value)[1]
            if named and proven and not points.holds_on(*here):
                self._warn_of_other_numbers(budget, points)
            return chosen.settings
        point, machine = points.latency_point_for(budget.value, *here), hardware()
        if point.hardware != machine:
            warnings.warn(
                f"{point.milliseconds:g}ms were measured on {point.hardware}; this is {machine}", stacklevel=4
            )
        elif point.threads != self.how.threads:
            then, now = (operating.threads_in_words(threads) for threads in (point.threads, self.how.threads))
            warnings.warn(f"{point.milliseconds:g}ms were measured on {then}; this runs on {now}", stacklevel=4)
        return point.settings

    def _warn_of_other_numbers(self, budget: Budget, found: DisagreementPoint | OperatingPoints) -> None:
        """Say that a promise was tested on other numerics than those that answer."""
        there, here = (
            f"{found.engine or 'torch'} {found.precision or EXACT}",
            f"{self.engine_name} {self.how.precision}",
        )
        command = f"offramp calibrate RUN --data FILE --engine {self.engine_name} --precision {self.how.precision}"
        warnings.warn(
            f"{budget} was tested on {there}; {here} decides a little differently, so nothing is proven there: "
            f"`{command}` finds settings for it",
            stacklevel=5,
        )

    def predict(
        self,
        texts: Sequence[Any],
        budget: float | Budget | None = None,
        batch_size: int = 32,
        max_loss: float | None = None,
        risk: float | None = None,
        latency: str | float | None = None,
        max_disagreement: float | None = None,
        long: Long = "truncate",
        window_pool: WindowPool = "mean",
    ) -> list[dict[str, Any]]:
        """Return predictions in input order.

        A text may be a string, a pair, a list of words, or a row with named columns. Inputs that are longer than the
        model are truncated, with a warning and the number of lost tokens in `truncated`; with `long="window"` they are
        read in overlapping windows, whose probabilities are averaged (`window_pool="max"`: the largest counts).

        One budget may be given: `budget`, a share of the full model's compute (1.0 is the full model) or a `Budget`;
        `max_loss`, how much of the metric may be lost; `risk`, how often a prediction may differ from the full model's,
        if `offramp calibrate --risk` proved it; `latency`, a time for a single input such as "5ms" (or seconds), if
        `offramp calibrate --latency` measured it on this machine; `max_disagreement`, how often a prediction may
        differ, where the run has points for it. Without a budget, the cheapest setting that lost at most half a point
        in calibration.
        """
        if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):
            raise OfframpError("a list of inputs", f"a single one: {texts!r:.60}", "put it in a list: predict([…])")
        if type(texts).__name__ == "DataFrame":  # of any library; pandas would give the names of its columns as texts
            given, fix = "a table (DataFrame)", "give one of its columns, or its rows as a list of dicts"
            raise OfframpError("a list of inputs", given, fix)
        rows = [self._row(text) for text in texts]
        settings = self.settings(budget, None, max_loss, risk, latency, max_disagreement)
        self.task.check_inputs(rows, "the input")
        predictions: list[dict[str, Any]] = []
        for chunk in self.chunks(rows, batch_size):
            encoded = self.prepare(chunk, long=long)
            predictions += self.finish(chunk, encoded, self.run(encoded, settings, batch_size), window_pool)
        truncated = sum("truncated" in prediction for prediction in predictions)
        if truncated:
            limit = f"{truncated} of {len(rows)} inputs were truncated to {self.model.max_length} tokens"
            warnings.warn(f'{limit}; long="window" reads them whole, where the task can', stacklevel=2)
        return predictions

    __call__ = predict

    def chunks(self, rows: Iterable[Row], batch_size: int) -> Iterator[list[Row]]:
        """Yield rows to predict together: they are sorted by length, and few if each output is a whole vocabulary."""
        rows, size = iter(rows), self.chunk_size(batch_size)
        while chunk := list(itertools.islice(rows, size)):
            yield chunk

    def chunk_size(self, batch_size: int) -> int:
        """Return how many rows are predicted together at most."""
        check_batch_size(batch_size)
        return batch_size * (1 if self.task.outputs == 0 and self.task.kind == "token" else CHUNK)

    def _row(self, text: Any) -> Row:
        """Return one input as a row with the task's column names."""
        names = self.task.input_columns
        if isinstance(text, Mapping):
            return text
        parts = [text] if len(names) == 1 else text
        if isinstance(parts, str) or not isinstance(parts, Sequence) or len(parts) != len(names):
            raise OfframpError(
                f"an input with {' and '.join(names)}", repr(text)[:80], "give one value for each, in order, or a dict"
            )
        return dict(zip(names, parts, strict=True))

    def prepare(self, rows: Sequence[Row], source: str = "the input", long: Long = "truncate") -> list[Encoded]:
        """Return the token ids of rows; rows that are too long are truncated or come in windows."""
        if long not in get_args(Long):
            raise OfframpError("what to do with long inputs", f"long={long!r}", f"use {' or '.join(get_args(Long))}")
        self.task.check_inputs(rows, source)
        encode = self.task.encode_windows if long == "window" else self.task.encode
        encoded = encode(self.model.tokenizer, rows, self.model.max_length)
        self.task.check_encoded(encoded, self.model.max_length, source)
        return encoded

    def run(
        self,
        encoded: Sequence[Encoded],
        settings: Any,
        batch_size: int = 32,
        expected_share: Callable[[int], float] | None = None,
    ) -> RunOutput:
        """Return the logits, exit layers and costs of encoded rows; `expected_share` as in `run_encoded`."""
        policy = self._policy(settings)
        return run_encoded(self.network, self.engine, policy, encoded, batch_size, expected_share)

    def _policy(self, settings: Any) -> Policy:
        """Return the policy of some settings; a pure rule is kept for the next call with the same settings."""
        last = self._last_policy
        if last is not None and last[0] is settings:
            return last[1]
        policy = self.model.method.policy(self.network, settings)
        if policy.rule() is not None:
            self._last_policy = (settings, policy)
        return policy

    def _check_finite(self, output: RunOutput) -> None:
        """Refuse results that are not numbers: a damaged model or engine has computed them."""
        if output.finite:
            return
        for logits in output.logits:
            if logits.dtype.kind == "f" and not np.isfinite(logits).all():
                where = f"{self.model.folder or 'the model'} on engine {self.engine_name} {self.how.precision}"
                fix = "use --engine torch --precision fp32; if that does not help, the weights are damaged"
                raise OfframpError("scores that are numbers", f"NaN or infinity from {where}", fix)

    def finish(
        self, rows: Sequence[Row], encoded: Sequence[Encoded], output: RunOutput, window_pool: WindowPool = "mean"
    ) -> list[dict[str, Any]]:
        """Return predictions with their cost; a row that was cut into windows has the sum of its windows."""
        check_window_pool(window_pool)
        self._check_finite(output)
        logits = output.logits
        if self.task.kind == "row" and len(encoded) != len(rows):
            logits = self._pooled(encoded, logits, len(rows), window_pool)
        predictions = self.task.predictions(rows, encoded, logits)
        self.task.add_details(predictions, rows, encoded, logits)
        spent = per_input_row(output, encoded, len(rows))
        for prediction, layer, kept, macs in zip(predictions, *(column.tolist() for column in spent), strict=True):
            prediction["exit_layer"] = int(layer) if layer == int(layer) else round(layer, 3)
            prediction["tokens_kept"] = round(kept, 3)
            prediction["macs"] = int(macs)
        for one in encoded:
            if one.cut:
                predictions[one.example]["truncated"] = one.cut
        return predictions

    def _pooled(
        self, encoded: Sequence[Encoded], logits: Sequence[np.ndarray], rows: int, pool: WindowPool
    ) -> list[np.ndarray]:
        """Return the logits of each row: those of its only window, or those of its windows joined."""
        windows: list[list[np.ndarray]] = [[] for _ in range(rows)]
        for one, own in zip(encoded, logits, strict=True):
            windows[one.example].append(own)
        return [own[0] if len(own) == 1 else self.task.pool_windows(np.stack(own), pool) for own in windows]

    def full_macs(self, encoded: Sequence[Encoded], output: RunOutput | None = None) -> float:
        """Return the MACs that the full model would spend on these rows together."""
        return float(full_macs(self.network, encoded, output).sum())

    @property
    def description(self) -> dict[str, Any]:
        """The contents of offramp.json and points.json."""
        return {**folders.run_description(self.model), "points": asdict(self.points) if self.points else None}
