"""Tables of word depths made from training rows: by what words tell of labels, or by how hard they are to guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offramp.methods._shared.guessed import Passes, estimate
from offramp.methods._shared.masked import MaskedModel, training_loss
from offramp.nn.batches import Batch, Data
from offramp.nn.mutual_information import LEAST, depths_by_information, labels_of, mutual_information, seen
from offramp.nn.network import Network
from offramp.nn.words import mean_by_word, some_occurrences, table
from offramp.tasks import Task
from offramp.training.stage import Backward, Groups, Stage

PENALTIES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)  # λ at which depths are kept; between them, interpolated


class Extent(NamedTuple):
    """What a table covers."""

    layers: int  # the largest depth
    least_count: int = 1  # words that occur less often count as unseen
    unseen: int = 0  # the depth of unseen words; 0: the median of the seen ones


def by_information(
    task: Task, data: Data, extent: Extent, smoothing: float, telling_deep: bool = False, least: float = LEAST
) -> dict[str, Tensor]:
    """The table of `WordDepths`: the more a word tells of the labels, the less deep it goes, or the other way round."""
    found = seen(task, data, extent.least_count)
    told = mutual_information(found.vocabulary.which, found.words.row, labels_of(task, data), smoothing)
    depths = torch.from_numpy(depths_by_information(told, extent.layers, least)).float()[:, None]
    depths = extent.layers + 1 - depths if telling_deep else depths
    return table(found.packed.tokens["id"], found.vocabulary, depths, torch.zeros(1), extent.unseen)


class Guessing(NamedTuple):
    """How depths are estimated by guessing words."""

    spacing: int  # words from one mask to the next; 0: one mask a pass
    penalty: float  # λ
    most: int = 0  # occurrences of a word that are looked at; 0: all


def by_reconstruction(
    network: Network, masked: MaskedModel, data: Data, extent: Extent, how: Guessing
) -> dict[str, Tensor]:
    """The table of `WordDepths`: the layers it takes to guess a word, exact at its penalty. Besides, the depths of
    every single word in `own` (1 of those not looked at) and how many each row has in `words`."""
    network.eval()
    found, penalties = seen(network.task, data, extent.least_count), torch.tensor(sorted({*PENALTIES, how.penalty}))
    asked = some_occurrences(found.vocabulary, how.most)
    passes = Passes(extent.layers, how.spacing, asked.to(network.device) if how.most else None)
    own = estimate(masked, found.packed.to(network.device), passes, penalties).cpu()
    depths = mean_by_word(found.vocabulary, own, asked)
    made = table(found.packed.tokens["id"], found.vocabulary, depths, penalties, extent.unseen)
    return {**made, "own": own, "words": torch.bincount(found.words.row, minlength=len(data.encoded))}


def some_of(data: Data, most: int) -> Data:
    """Rows spread evenly over the data, at most so many; 0 means all."""
    every = len(data.encoded)
    chosen = torch.linspace(0, every - 1, min(most or every, every)).long().tolist()
    return Data(data.rows, [data.encoded[i] for i in chosen])


@dataclass
class GuessWords(Stage):
    """The masked model learns to guess hidden words after every layer. The network itself stays as it is."""

    masked: MaskedModel = field(kw_only=True)
    layers: int = field(kw_only=True)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.network.named_parameters() if name.startswith("added.masked.")]

    def optimisers(self, lr: float) -> list[Groups]:
        base = {id(p) for p in self.masked.model.base_model.parameters()}
        body, head = ([p for _, p in self.trainable() if (id(p) in base) is inside] for inside in (True, False))
        rate = max(lr, self.head_lr) if self.masked.made_head else lr
        return [[{"params": body, "lr": lr}, *([{"params": head, "lr": rate}] if head else [])]]

    def mode(self) -> None:
        self.network.train(backbone=False, added=True)

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = training_loss(self.masked, batch.packed, self.layers)
        backward(loss)
        return {"loss": loss.detach()}

    def select(self, history: Sequence[dict[str, float]]) -> int:
        return len(history) - 1  # dev scores are the untouched network's
