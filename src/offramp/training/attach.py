"""Exit heads for a frozen model, in one pass over unlabelled texts.

`collect_states` sends every text once through the model and stores what exit heads read (pooled states of every layer,
or states of tokens) and the model's own logits: float16, in chunks on disk, so that memory stays bounded and an
interrupted pass continues. `fit_exit_heads` then trains all heads at once on the stored states, in seconds, to give the
model's own soft answers. Some rows (`is_validation`) train nothing: they choose each head's best epoch, and the caller
finds thresholds on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offramp.core.columns import SCORED
from offramp.core.packed import Packed
from offramp.data.tokenization import Encoded
from offramp.nn.bag_of_words import BagOfWordsExit, FittedBagOfWordsExit, fit_tables, logits_without_own_fold
from offramp.nn.batches import pack_rows
from offramp.nn.exit_heads import WIDTH, ExitHead, Pool, pool_states
from offramp.nn.keys import EXIT_UNIT
from offramp.nn.network import Network
from offramp.training.distillation import distillation_loss
from offramp.training.forward import forward_all_layers
from offramp.utils.files import atomic_replace
from offramp.utils.progress import report_progress

CHUNK_ROWS = 512  # rows of one file, at most
CHUNK_BYTES = 64 << 20  # of states in one file, at most
BATCH_TOKENS = 1024  # of one forward pass: its states fit into a processor's cache
MAX_TOKENS = 150_000  # tokens whose states are kept for heads that answer for every token
IN_MEMORY = 1 << 30  # bytes of stored states that are kept in memory while heads are trained
EPOCHS, PATIENCE = 25, 4  # at most; epochs without a better head
DROPOUT = 0.1  # of hidden units
STEPS = 4000  # of training, at most, but at least a few epochs
BATCH_ROWS, BATCH_ITEMS = 128, 4096  # of a training step, at most: rows; rows or tokens
LEARNING_RATE, WEIGHT_DECAY = 2e-3, 1e-2
VALIDATION = 10  # every tenth row trains nothing; of few rows more, so that about a hundred do


@dataclass(frozen=True)
class StoredStates:
    """What exit heads read of every text, in files of a folder."""

    folder: Path
    chunks: tuple[tuple[int, ...], ...]  # row indices of each file
    per_token: bool
    validation: frozenset[int] = frozenset()  # indices of rows that train nothing

    def load(self, number: int) -> dict[str, Tensor]:
        """Return one chunk: `features` [items, exits, width], `logits` [items, outputs], `lengths` [rows], `scored`."""
        if not self._fits:
            return load_file(self._path(number))
        if number not in self._cache:
            self._cache[number] = load_file(self._path(number))
        return self._cache[number]

    def _path(self, number: int) -> Path:
        return self.folder / f"states-{number:05d}.safetensors"

    @cached_property
    def _cache(self) -> dict[int, dict[str, Tensor]]:
        return {}

    @cached_property
    def _fits(self) -> bool:
        return sum(self._path(number).stat().st_size for number in range(len(self.chunks))) <= IN_MEMORY


def collect_states(network: Network, encoded: Sequence[Encoded], folder: Path, seed: int = 0) -> StoredStates:
    """Run every text once through the frozen model and store states and logits; finished chunks are not run again."""
    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(seed).permutation(len(encoded))
    if network.per_token:
        order = order[: _rows_within(order, encoded, MAX_TOKENS)]
    lengths = [len(one.ids) if network.per_token else 1 for one in encoded]
    item = 2 * len(network.exit_heads) * network.encoder.hidden * WIDTH[_pool(network)]  # bytes
    chunks = tuple(_groups(order.tolist(), lengths, CHUNK_ROWS, CHUNK_BYTES // item))
    validation = frozenset(i for i, one in enumerate(encoded) if is_validation(one.example, encoded[-1].example + 1))
    stored, done = StoredStates(folder, chunks, network.per_token, validation), 0
    network.eval()
    for number, indices in enumerate(chunks):
        path = stored._path(number)
        if not path.is_file():
            content = run_chunk(network, [encoded[i] for i in indices], done, len(order))
            with atomic_replace(path) as temporary:
                save_file(content, temporary)
        done += len(indices)
        report_progress(done, len(order))
    return stored


def is_validation(example: int, examples: int) -> bool:
    """Return whether a row, by its number, trains nothing: every tenth, of few rows every third."""
    return example % max(3, min(VALIDATION, examples // 100)) == 0


def _groups(rows: Sequence[int], lengths: Sequence[int], most: int, items: int) -> Iterator[tuple[int, ...]]:
    """Yield rows in their order, in groups of at most `most` rows and, unless a row alone has more, `items` items."""
    group: list[int] = []
    total = 0
    for row in rows:
        if group and (len(group) == most or total + lengths[row] > items):
            yield tuple(group)
            group, total = [], 0
        group.append(row)
        total += lengths[row]
    if group:
        yield tuple(group)


def _rows_within(order: np.ndarray, encoded: Sequence[Encoded], tokens: int) -> int:
    """Return how many rows in this order have at most so many tokens, at least a few hundred rows."""
    total = np.cumsum([len(encoded[i].ids) for i in order])
    return max(min(len(order), 200), int(np.searchsorted(total, tokens)))


def run_chunk(network: Network, encoded: Sequence[Encoded], done: int, total: int) -> dict[str, Tensor]:
    """Return features and logits of some rows, computed in batches of similar length; `done` of `total` rows are."""
    parts: dict[int, dict[str, Tensor]] = {}
    for indices in _batches([len(one.ids) for one in encoded]):
        packed = pack_rows(network.task, [encoded[i] for i in indices]).to(network.device)
        sizes = packed.lengths.tolist() if network.per_token else [1] * len(indices)
        features, logits = (part.cpu().split(sizes) for part in _run(network, packed))
        scored = packed.tokens.get(SCORED)
        marks = None if scored is None or not network.per_token else scored.cpu().split(sizes)
        for place, index in enumerate(indices):
            parts[index] = {"features": features[place], "logits": logits[place]}
            if marks is not None:
                parts[index]["scored"] = marks[place]
        report_progress(done + len(parts), total)
    names = parts[0].keys()
    content = {name: torch.cat([parts[i][name] for i in range(len(encoded))]).contiguous() for name in names}
    content["lengths"] = torch.tensor([len(one.ids) for one in encoded])
    return content


def _run(network: Network, packed: Packed) -> tuple[Tensor, Tensor]:
    """Return what the exit heads read [items, exits, width] in float16, and the model's logits [items, outputs]."""
    pool = _pool(network)
    with torch.no_grad():
        states = forward_all_layers(network.encoder, packed)
        features = []
        for layer in sorted(network.exit_heads):
            own = states.after(layer)
            own = own.with_states(network.encoder.final(own.states))
            features.append((own.states if pool is None else pool_states(own, pool)).half())
        return torch.stack(features, dim=1), network(network.depth, states.after(network.depth)).float()


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of rows to run together, by length."""
    batch: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and tokens + lengths[index] > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += lengths[index]
    yield batch


def fit_exit_heads(network: Network, stored: StoredStates, encoded: Sequence[Encoded], seed: int = 0) -> None:
    """Train all exit heads on stored states to give the model's own answers; keep each head's best epoch."""
    torch.manual_seed(seed)
    offsets = _fit_bag_of_words(network, stored, encoded)
    heads = {layer: _inner(head) for layer, head in sorted(network.exit_heads.items())}
    stacked = _StackedHeads(list(heads.values()))
    optimizer = torch.optim.AdamW(stacked.parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    best = dict.fromkeys(range(len(heads)), float("inf"))
    stale, rng = 0, np.random.default_rng(seed)
    epochs = _epochs(stored)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in _minibatches(stored, offsets, validation=False, rng=rng):
            loss = torch.stack(_losses(network, stacked, batch, training=True)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        losses = _validation_losses(network, stacked, stored, offsets)
        improved = [place for place, loss in enumerate(losses) if loss < best[place] - 1e-5]
        for place in improved:
            best[place] = losses[place]
            stacked.write_to_head(place)
        stale = 0 if improved else stale + 1
        if stale >= PATIENCE:
            break
    if EXIT_UNIT in network.added:
        _fit_deviation_unit(network, heads, stored, rng)
    network.eval()


class _StackedHeads:
    """The exit heads of all layers as one stack of matrices: a training step is a few large products."""

    def __init__(self, heads: Sequence[ExitHead]) -> None:
        self.steps = [[step for step in (head.hidden, head.project) if step is not None] for head in heads]
        for head in heads:
            head.norm.reset_parameters()  # what it scales and shifts, the next product can
        stages = list(zip(*self.steps, strict=True))
        self.weights = [torch.stack([step.weight.detach().T for step in stage]).requires_grad_() for stage in stages]
        self.biases = [torch.stack([step.bias.detach()[None] for step in stage]).requires_grad_() for stage in stages]

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    def logits(self, features: Tensor, training: bool) -> Tensor:
        """Return the logits of every head for its layer's features [items, exits, width]."""  # [exits, items, outputs]
        states = F.layer_norm(features, features.shape[-1:]).transpose(0, 1)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            states = F.dropout(F.gelu(states), DROPOUT, training) if number else states
            states = torch.baddbmm(bias, states, weight)
        return states

    def write_to_head(self, place: int) -> None:
        """Copy the present parameters of one head into it."""
        with torch.no_grad():
            for step, weight, bias in zip(self.steps[place], self.weights, self.biases, strict=True):
                step.weight.copy_(weight[place].T)
                step.bias.copy_(bias[place, 0])


def _epochs(stored: StoredStates) -> int:
    """Return how many epochs to train at most: fewer of many rows, so that training stays short."""
    steps = sum(len(chunk) for chunk in stored.chunks) // BATCH_ROWS + 1
    return min(EPOCHS, max(8, STEPS // steps))


@dataclass(frozen=True)
class _Minibatch:
    features: Tensor  # [items, exits, width]
    logits: Tensor  # [items, outputs], the full model's
    packed: Packed  # lengths and answered tokens, without states
    offsets: Tensor | None  # [items, outputs] logits of the bag of words at exit 0


def _minibatches(
    stored: StoredStates, offsets: Tensor | None, validation: bool, rng: np.random.Generator | None = None
) -> Iterator[_Minibatch]:
    """Yield rows of the training or the validation part, shuffled if there is a generator."""
    chunks = range(len(stored.chunks)) if rng is None else rng.permutation(len(stored.chunks)).tolist()
    for number in chunks:
        content, indices = stored.load(number), np.array(stored.chunks[number])
        rows = np.flatnonzero(np.isin(indices, list(stored.validation)) == validation)
        rows = rows if rng is None else rng.permutation(rows)
        lengths = content["lengths"]
        starts = lengths.cumsum(0) - lengths
        counts = lengths.tolist() if stored.per_token else [1] * len(indices)
        for group in _groups(rows.tolist(), counts, BATCH_ROWS, BATCH_ITEMS):
            chosen = torch.tensor(group)
            items = chosen
            if stored.per_token:
                items = _items_of(starts[chosen], lengths[chosen])
            tokens: dict[str, Tensor] = {SCORED: content["scored"][items]} if "scored" in content else {}
            packed = Packed(torch.empty(0), lengths[chosen], {}, tokens)
            own = None if offsets is None else offsets[torch.from_numpy(indices)[chosen]]
            yield _Minibatch(content["features"][items].float(), content["logits"][items], packed, own)


def _items_of(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the places of all tokens of some rows, row by row."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)


def _losses(network: Network, stacked: _StackedHeads, batch: _Minibatch, training: bool) -> list[Tensor]:
    """Return the loss of every exit against the full model's answers."""
    found = []
    for place, logits in enumerate(stacked.logits(batch.features, training)):
        own = logits if batch.offsets is None or place else logits + batch.offsets  # tables only at exit 0, the first
        found.append(distillation_loss(network, own, batch.logits, batch.packed))
    return found


def _validation_losses(
    network: Network, stacked: _StackedHeads, stored: StoredStates, offsets: Tensor | None
) -> list[float]:
    with torch.no_grad():
        losses = [
            torch.stack(_losses(network, stacked, batch, training=False))
            for batch in _minibatches(stored, offsets, validation=True)
        ]
    return torch.stack(losses).mean(0).tolist() if losses else [0.0] * len(stacked.steps)


def _fit_bag_of_words(network: Network, stored: StoredStates, encoded: Sequence[Encoded]) -> Tensor | None:
    """Solve for the tables of exit 0 on training rows; return every row's logits by tables fitted without it."""
    head = network.exit_heads.get(0)
    if not isinstance(head, FittedBagOfWordsExit):
        return None
    indices = [index for chunk in stored.chunks for index in chunk]
    probabilities = torch.cat([stored.load(n)["logits"].softmax(-1) for n in range(len(stored.chunks))])
    ids = [encoded[i].ids for i in indices]
    training = np.flatnonzero([i not in stored.validation for i in indices])
    tables = fit_tables(head.index, [ids[i] for i in training], probabilities.double().numpy()[training])
    head.set_tables(tables)
    offsets = torch.zeros(len(encoded), network.task.outputs)
    offsets[torch.tensor(indices)] = torch.from_numpy(logits_without_own_fold(head.index, tables, ids))
    return offsets


def _fit_deviation_unit(
    network: Network, heads: dict[int, ExitHead], stored: StoredStates, rng: np.random.Generator
) -> None:
    """Train the unit that estimates how far an exit's number is from the full model's."""
    unit = network.added[EXIT_UNIT]
    estimate = unit.estimate
    optimizer = torch.optim.AdamW(unit.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for head in heads.values():
        head.eval()
    for _ in range(max(1, _epochs(stored) // 3)):
        for batch in _minibatches(stored, None, validation=False, rng=rng):
            losses = []
            for place, layer in enumerate(heads):
                with torch.no_grad():
                    value = heads[layer].project_features(batch.features[:, place])
                    deviation = (value - batch.logits).abs().squeeze(-1)
                pooled = batch.features[:, place, : unit.width]
                losses.append(F.smooth_l1_loss(estimate(layer, pooled), deviation))  # type: ignore[operator]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()


def _pool(network: Network) -> Pool | None:
    """Return what all exit heads read of a layer's states; None: every token."""
    return _inner(next(iter(network.exit_heads.values()))).pool


def _inner(head: nn.Module) -> ExitHead:
    """Return the head that reads states, inside one that also reads words."""
    inner = head.inner if isinstance(head, FittedBagOfWordsExit | BagOfWordsExit) else head
    assert isinstance(inner, ExitHead), "attached exits are plain heads"
    return inner
