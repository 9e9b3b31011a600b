"""Depths of words by how soon a masked language model predicts them (Liu et al. 2021).

All pieces of a word are masked; its loss after layer n is the mean loss of its pieces, and its depth is argmin of
loss_n + λn (in the paper the sign of λ is misprinted). One pass masks several words of a row, `spacing` words apart;
`spacing=0` masks one word per pass, as the paper does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from offramp.core.columns import ID, ORIGIN
from offramp.core.cost import Event
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.methods.faster_dat.masked_model import MaskedModel, layer_losses
from offramp.methods.faster_dat.word_depths import TableScope, depth_table, mean_by_word, row_words, select_occurrences
from offramp.nn.batches import Data
from offramp.nn.exit_oracles import best_exit
from offramp.nn.network import Network
from offramp.nn.words import Words, words_of

TOKENS_AT_ONCE = 4096
RecordCost = Callable[[Tensor, Tensor, Tensor], None]  # rows, their lengths, how many of their tokens were masked
PENALTIES = (
    0.0,
    0.05,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
)  # λ for which depths are stored; between them depths are interpolated


class MaskedPasses(NamedTuple):
    """How words are masked."""

    layers: int  # words are predicted after layers 1…layers
    spacing: int  # words from one mask to the next; 0: one mask per pass
    selected: Tensor | None = None  # [words] bool, whose depth is estimated; None: every word's


@torch.no_grad()
def estimate_depths(
    model: MaskedModel, packed: Packed, passes: MaskedPasses, penalties: Tensor, record: RecordCost | None = None
) -> Tensor:
    """Return the depth of every selected word at every λ, whole numbers 1…layers; 1 for other words."""
    # [words, penalties]
    words = words_of(packed)
    pass_of_word, passes_of_row = _assign_passes(words, packed.count, passes)
    row = torch.repeat_interleave(torch.arange(packed.count, device=passes_of_row.device), passes_of_row)
    number = torch.arange(len(row), device=row.device) - (passes_of_row.cumsum(0) - passes_of_row)[row]
    first_word = torch.searchsorted(words.row, torch.arange(packed.count, device=row.device))
    depths = torch.ones(len(words.key), len(penalties), device=row.device)
    for chunk in _chunks(packed.lengths[row.cpu()]):
        chunk_rows = take_rows(packed, row[chunk].cpu())
        chunk_words = words_of(chunk_rows)
        index = first_word[row[chunk]][chunk_words.row] + _number_in_row(chunk_words, chunk_rows.count)
        masked = pass_of_word[index] == number[chunk][chunk_words.row]
        losses = _word_losses(model, chunk_rows, chunk_words, masked, passes.layers)
        depths[index[masked]] = torch.stack([best_exit(-losses, float(p)) + 1.0 for p in penalties], dim=1)
        if record:
            pieces = chunk_words.size[masked].double()
            counts = torch.bincount(chunk_words.row[masked], weights=pieces, minlength=chunk_rows.count)
            record(row[chunk], chunk_rows.lengths, counts.cpu())
    return depths


def _assign_passes(words: Words, rows: int, passes: MaskedPasses) -> tuple[Tensor, Tensor]:
    """Return in which pass of its row each word is masked (−1: in none), and how many passes each row needs: as few as
    keep any two words of a pass `spacing` apart."""  # [words], [rows]
    selected = torch.ones_like(words.row, dtype=torch.bool) if passes.selected is None else passes.selected
    row, position = words.row[selected], _number_in_row(words, rows)[selected]
    counts = torch.bincount(row, minlength=rows)
    number = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    if passes.spacing:  # the largest number of words within `spacing` of one another, anywhere in the row
        line = position + row * (len(words.row) + passes.spacing)
        near = torch.searchsorted(line, line + passes.spacing) - torch.arange(len(line), device=line.device)
        counts = torch.zeros_like(counts).scatter_reduce(0, row, near, "amax")
    pass_of_word = torch.full_like(words.row, -1)
    pass_of_word[selected] = number % counts[row]
    return pass_of_word, counts


def record_cost(s: State, layers: int, rows: Tensor, lengths: Tensor, masked: Tensor) -> None:
    """Add the events of masked passes to the trace."""
    origin = s.packed.rows[ORIGIN][rows]
    s.trace.append(Event("embed", 0, origin, lengths, lengths))
    for layer in range(1, layers + 1):
        s.trace.append(Event("attend", layer, origin, lengths, lengths))
        s.trace.append(Event("feed", layer, origin, lengths, lengths))
        s.trace.append(Event("predictor", layer, origin, masked, masked))


def _word_losses(model: MaskedModel, packed: Packed, words: Words, masked: Tensor, layers: int) -> Tensor:
    """Return the mean loss of each masked word's pieces after every layer."""  # [layers, masked words]
    ids = packed.tokens[ID]
    is_masked = torch.cat((masked, masked.new_zeros(1)))[words.of_token]
    tokens = is_masked.nonzero().squeeze(1)
    inputs = torch.where(is_masked, model.mask_id.to(ids.device), ids)
    losses = layer_losses(model, packed.with_tokens(id=inputs), tokens, ids[tokens], layers)
    number = masked.long().cumsum(0) - 1
    total = losses.new_zeros(layers, int(masked.sum())).index_add(1, number[words.of_token[tokens]], losses)
    return total / words.size[masked]


def _number_in_row(words: Words, rows: int) -> Tensor:
    """Return each word's number within its row."""  # [words]
    per_row = torch.bincount(words.row, minlength=rows)
    return torch.arange(len(words.row), device=words.row.device) - (per_row.cumsum(0) - per_row)[words.row]


def _chunks(lengths: Tensor) -> list[Tensor]:
    """Return passes of similar length together, in chunks of about TOKENS_AT_ONCE tokens."""
    order = lengths.argsort(stable=True)
    number = (lengths[order].cumsum(0) - 1) // max(TOKENS_AT_ONCE, int(lengths.max()) if len(lengths) else 1)
    return list(order.split(torch.unique_consecutive(number, return_counts=True)[1].tolist()))


def take_rows(packed: Packed, rows: Tensor) -> Packed:
    """Return these rows in this order, each as often as it is given, with token columns only."""
    lengths = packed.lengths[rows]
    start = torch.repeat_interleave(packed.starts[rows] - (lengths.cumsum(0) - lengths), lengths)
    index = (start + torch.arange(len(start))).to(packed.device)
    tokens = {name: column.index_select(0, index) for name, column in packed.tokens.items()}
    return Packed(torch.empty(0), lengths, {}, tokens)


class ReconstructionOptions(NamedTuple):
    """How depths are estimated by reconstruction."""

    spacing: int  # words from one mask to the next; 0: one mask per pass
    penalty: float  # λ
    occurrences: int = 0  # of each word that are used; 0: all


def depths_by_reconstruction(
    network: Network, masked: MaskedModel, data: Data, scope: TableScope, options: ReconstructionOptions
) -> dict[str, Tensor]:
    """Return the table of `WordDepths`: the number of layers after which a word is predicted, exact at the given λ.

    Besides, the depth of every occurrence in `own` (1 for those that are not used) and the number of words of each row
    in `words`.
    """
    network.eval()
    found, penalties = row_words(network.task, data, scope.least_count), sorted({*PENALTIES, options.penalty})
    used = select_occurrences(found.vocabulary, options.occurrences)
    passes = MaskedPasses(scope.layers, options.spacing, used.to(network.device) if options.occurrences else None)
    own = estimate_depths(masked, found.packed.to(network.device), passes, torch.tensor(penalties)).cpu()
    depths = mean_by_word(found.vocabulary, own, used)
    table = depth_table(found.packed.tokens[ID], found.vocabulary, depths, torch.tensor(penalties), scope.unseen)
    return {**table, "own": own, "words": torch.bincount(found.words.row, minlength=len(data.encoded))}


def select_rows(data: Data, most: int) -> Data:
    """Return at most this many rows, spread evenly over the data; 0 means all."""
    total = len(data.encoded)
    selected = torch.linspace(0, total - 1, min(most or total, total)).long().tolist()
    return Data(data.rows, [data.encoded[i] for i in selected])
