"""How deep words go when depths are planned: one sentence, and the histogram of all words, as text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from offramp.core.loop import State
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.methods.faster_dat.word_depths import WordDepths
from offramp.nn.batches import pack_rows
from offramp.nn.words import words_of
from offramp.utils.files import replacing

Row = Mapping[str, Any]
DIFFERENT, RUNNING = "#9db8d9", "#2f6db3"
BLOCK = 256  # rows looked up at once


@dataclass(frozen=True)
class Depths:
    """What is shown. A histogram's first entry is depth 1."""

    layers: int
    words: list[str]  # of the sentence
    depths: list[int]
    different: list[int]  # words of the training rows by depth
    running: list[int]  # occurrences, in the training rows or in the rows given

    @property
    def mean(self) -> float:
        """The mean depth of running words."""
        return sum(place * n for place, n in enumerate(self.running, 1)) / max(1, sum(self.running))

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "mean_depth": self.mean}


def depths(predictor: Predictor, texts: Sequence[str], settings: Any, rows: Sequence[Row] = ()) -> Depths:
    """Depths of a text's words under some settings, and of all words: those of `rows`, else of the training rows."""
    table = _table(predictor)
    cap = min(int(settings.cap) or table.layers, table.layers)
    planned, _ = table.at(table.penalty if settings.penalty < 0 else settings.penalty)
    planned = planned.clamp(max=cap).cpu()
    different, running = (_histogram(planned, weights, table.layers) for weights in (None, table.counts.cpu()))
    if rows:
        encoded = predictor.prepare(rows, "the rows")
        blocks = [encoded[start : start + BLOCK] for start in range(0, len(encoded), BLOCK)]
        running = _histogram(torch.cat([_look_up(predictor, b, settings) for b in blocks]), None, table.layers)
    words: list[str] = []
    own = torch.zeros(0, dtype=torch.int64)
    if texts:
        item = predictor.prepare([_row(predictor, texts)])[0]
        words, own = _spelled(predictor, item), _look_up(predictor, [item], settings)
    return Depths(table.layers, words, own.tolist(), different, running)


def _table(predictor: Predictor) -> WordDepths:
    if "depths" not in predictor.network.added:
        given = f"a run of {predictor.model.method.name!r}"
        raise OfframpError("depths planned by word", given, "give a run of faster_dat")
    return predictor.network.added["depths"]  # type: ignore[return-value]  # a ModuleDict


def _row(predictor: Predictor, texts: Sequence[str]) -> Row:
    names = predictor.task.input_columns
    if len(texts) != len(names):
        raise OfframpError(f"a text for each of: {', '.join(names)}", f"{len(texts)} texts", "give each in quotes")
    return {name: text.split() if name == "tokens" else text for name, text in zip(names, texts, strict=True)}


def _look_up(predictor: Predictor, encoded: Sequence[Encoded], settings: Any) -> Tensor:
    """The depth of every word, as the method's own policy writes it."""  # [words]
    packed = pack_rows(predictor.task, encoded).to(predictor.network.device)
    state = State(packed, packed, predictor.network, predictor.network.depth)
    with torch.inference_mode():
        predictor.model.method.policy(predictor.network, settings).on_embeddings(state)
    return state.packed.tokens["depth"][words_of(packed).first].cpu()


def _spelled(predictor: Predictor, item: Encoded) -> list[str]:
    """The words of an encoded text as people read them."""
    words: list[list[int]] = []
    for before, word, token in zip([-1, *item.words], item.words, item.ids, strict=False):
        if word >= 0 and word != before:
            words.append([])
        if word >= 0:
            words[-1].append(token)
    return [str(predictor.model.tokenizer.decode(pieces)).strip() for pieces in words]


def _histogram(depth: Tensor, weights: Tensor | None, layers: int) -> list[int]:
    return [int(n) for n in torch.bincount(depth, weights, minlength=layers + 1)[1:]]


def lines(shown: Depths) -> list[str]:
    """The same as text."""
    wide = max([len(word) for word in shown.words] + [5])
    told = [f"{word:<{wide}}  {depth:>2}  {'█' * depth}" for word, depth in zip(shown.words, shown.depths, strict=True)]
    told += [""] if told else []
    told.append("depth  different words  running words")
    whole = (max(1, sum(shown.different)), max(1, sum(shown.running)))
    for depth, counts in enumerate(zip(shown.different, shown.running, strict=True), 1):
        told.append(f"{depth:>5}" + "".join(f"  {n:>7} {n / all_:6.1%}" for n, all_ in zip(counts, whole, strict=True)))
    return [*told, f"mean depth of running words: {shown.mean:.2f} of {shown.layers} layers"]


def draw(shown: Depths, title: str, path: Path) -> None:
    """The picture as a PNG: the histogram, and below it the sentence if there is one."""
    rows = 2 if shown.words else 1
    figure = Figure(figsize=(max(7.2, 2.0 + 0.3 * len(shown.words)), 3.2 * rows), dpi=150, layout="constrained")
    _bars(figure.add_subplot(rows, 1, 1), shown, title)
    if shown.words:
        _sentence(figure.add_subplot(rows, 1, 2), shown)
    canvas = FigureCanvasAgg(figure)
    with replacing(path) as fresh, fresh.open("wb") as file:
        canvas.print_png(file)


def _bars(axes: Axes, shown: Depths, title: str) -> None:
    kinds = ((shown.different, DIFFERENT, "different words", -0.2), (shown.running, RUNNING, "running words", 0.2))
    for counts, colour, name, shift in kinds:
        places, whole = [depth + shift for depth in range(1, shown.layers + 1)], max(1, sum(counts))
        axes.bar(places, [n / whole for n in counts], width=0.4, color=colour, label=f"{name} ({sum(counts):,})")
    axes.set_title(f"{title}\nmean depth of running words: {shown.mean:.2f}", fontsize=10, loc="left")
    axes.set_xlabel("planned depth (layers)")
    axes.set_ylabel("share")
    axes.set_xticks(range(1, shown.layers + 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _sentence(axes: Axes, shown: Depths) -> None:
    axes.bar(range(len(shown.words)), shown.depths, width=0.7, color=RUNNING)
    axes.set_xticks(range(len(shown.words)))
    axes.set_xticklabels([word.replace("$", r"\$") for word in shown.words], rotation=60, ha="right", fontsize=9)
    axes.set_ylim(0, shown.layers)
    axes.set_xlim(-0.7, len(shown.words) - 0.3)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("depth (layers)")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
