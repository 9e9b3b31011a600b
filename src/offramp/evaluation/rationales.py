"""Do the tokens that a model keeps agree with those that people marked? Rows with `tokens`, `rationale` and `label`.

Word pieces are summed to words. Average precision looks at the soft scores; the false-positive rate at which words
stand above the uniform level 1/n, n the row's words and special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offramp.data.readers import read, require
from offramp.data.tokenization import Encoded, encode_words
from offramp.errors import OfframpError
from offramp.evaluation import importance
from offramp.inference.run_folder import LoadedRun
from offramp.nn.batches import Batch, Data, build_batch
from offramp.training.forward import forward_all_layers

Row = Mapping[str, Any]
Scores = NDArray[np.float64]
ENDINGS = (".jsonl.gz", ".jsonl")


def rows_in(folder: str, split: str, limit: int | None) -> list[dict[str, Any]]:
    """The rows of a split, checked."""
    found = [path for ending in ENDINGS if (path := Path(folder) / f"{split}{ending}").is_file()]
    if not found:
        given = f"no {split}.jsonl or {split}.jsonl.gz in {folder}"
        raise OfframpError("rows with human rationales", given, "give a folder with train and dev splits")
    rows = read(str(found[0]), limit=limit)
    require(rows, ["tokens", "rationale", "label"], str(found[0]))
    for number, row in enumerate(rows, 1):
        if len(row["tokens"]) != len(row["rationale"]) or not set(row["rationale"]) <= {0, 1}:
            given = f"row {number} of {found[0].name} with {len(row['tokens'])} tokens"
            raise OfframpError("a 0 or 1 for every token", given, "correct its rationale")
    return rows


def average_precision(scores: Scores, truth: NDArray[np.int64]) -> float:
    """The mean precision over the recall steps of a ranking by score; equal scores are one step."""
    order = np.argsort(-scores, kind="stable")
    ranked, right = scores[order], np.cumsum(truth[order])
    last = np.append(np.nonzero(np.diff(ranked))[0], len(ranked) - 1)  # the end of each group of equals
    precision, recall = right[last] / (last + 1), right[last] / truth.sum()
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def false_positive_rate(scores: Scores, truth: NDArray[np.int64], level: float) -> float:
    """The share of words without a mark that stand above a level; none of them, none wrong."""
    wrong = truth == 0
    return float((scores[wrong] > level).mean()) if wrong.any() else 0.0


@dataclass(frozen=True)
class Marked:
    """A row as the model reads it, with what people marked of it."""

    encoded: Encoded
    truth: NDArray[np.int64]  # [words that fit into the model]
    label: Any
    tokens: list[str]  # all its words

    @property
    def units(self) -> int:
        """Words and special tokens."""
        return len(self.truth) + sum(word < 0 for word in self.encoded.words)

    def words(self, tokens: Scores) -> Scores:
        """Scores of tokens summed to words."""  # [tokens] → [words]
        made = np.zeros(len(self.truth))
        for word, score in zip(self.encoded.words, tokens, strict=True):
            if word >= 0:
                made[word] += score
        return made


def marked(model: LoadedRun, rows: Sequence[Row]) -> list[Marked]:
    """Rows cut to the model's length; those of which no marked word is left are left out."""
    encoded = encode_words(model.tokenizer, [row["tokens"] for row in rows], model.max_length)
    made = []
    for one, row in zip(encoded, rows, strict=True):
        fits = max(one.words, default=-1) + 1
        truth = np.array(row["rationale"][:fits], dtype=np.int64)
        if truth.any():
            made.append(Marked(one, truth, row["label"], row["tokens"]))
    return made


def as_batch(model: LoadedRun, row: Marked) -> Batch:
    """One row with its gold label."""
    task = model.network.task
    one = Encoded(row.encoded.ids, row.encoded.types, 0, row.encoded.words, [], 0)
    return build_batch(task, Data([{"label": row.label}], [one]), [0], None).to(model.network.device)


def answered(model: LoadedRun, row: Marked) -> Marked:
    """The row with the label that the model gives it."""
    network, one = model.network, as_batch(model, row)
    with torch.no_grad():
        logits = (
            network(network.depth, forward_all_layers(network.encoder, one.packed).after(network.depth))
            .float()
            .cpu()
            .numpy()
        )
    (said,) = network.task.predictions([{"label": row.label}], [row.encoded], list(logits))
    return replace(row, label=said["label"])


def techniques(full: LoadedRun, adapler: LoadedRun, row: Marked, scale: float) -> dict[str, Scores]:
    """Shares of tokens by technique."""  # each [layers, tokens]
    attention = importance.attentions(full.network, row.encoded.ids)
    made = {
        "saliency": importance.salient(full.network, as_batch(full, row)),
        "attention": attention.mean(1),
        "attention rollout": importance.rollout(attention).mean(1),
        "contribution predictors": importance.predicted(adapler, as_batch(adapler, row), scale),
    }
    return {name: shares.double().cpu().numpy() for name, shares in made.items()}


def agreement(
    full: LoadedRun, adapler: LoadedRun, rows: Sequence[Marked], scale: float
) -> dict[str, dict[str, list[float]]]:
    """Mean average precision and false-positive rate per technique and layer."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for row in rows:
        for name, layers in techniques(full, adapler, row, scale).items():
            words = [row.words(tokens) for tokens in layers]
            own = found.setdefault(name, {"average_precision": [], "false_positive_rate": []})
            own["average_precision"].append([average_precision(w, row.truth) for w in words])
            own["false_positive_rate"].append([false_positive_rate(w, row.truth, 1 / row.units) for w in words])
    return {
        name: {metric: [round(float(v), 6) for v in np.mean(values, axis=0)] for metric, values in own.items()}
        for name, own in found.items()
    }


def chosen(full: LoadedRun, row: Marked, strategy: str, told: bool) -> list[int]:
    """The words a strategy keeps, as many as people marked, in their order. `told`: whether the label may be looked at;
    where not, saliency is that of what the model answers."""
    if strategy == "human":
        return [int(word) for word in np.nonzero(row.truth)[0]]
    if strategy == "saliency":
        scores = importance.salient(full.network, as_batch(full, row if told else answered(full, row)))[0]
    else:
        flow = importance.rollout(importance.attentions(full.network, row.encoded.ids))[-1]
        scores = flow[0] if strategy == "attention from [CLS]" else flow.mean(0)
    words = row.words(scores.double().cpu().numpy())
    return sorted(int(word) for word in np.argsort(-words, kind="stable")[: int(row.truth.sum())])
