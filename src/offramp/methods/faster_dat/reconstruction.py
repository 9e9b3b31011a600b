"""How deep a word must go to be guessed by a masked language model (Liu et al. 2021).

A word is hidden whole; its loss after layer n is that of its pieces, its depth argmin of loss_n + λn (in print the sign
of λ is wrong). Many words of a row are hidden at once, `spacing` words apart; `spacing=0` hides one at a time, a pass
for every word, as the paper does.
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
from offramp.methods.faster_dat.word_depths import Extent, depth_table, mean_by_word, seen, some_occurrences
from offramp.nn.batches import Data
from offramp.nn.exit_oracles import best_exit
from offramp.nn.network import Network
from offramp.nn.words import Words, words_of

TOKENS = 4096  # computed at once
Note = Callable[[Tensor, Tensor, Tensor], None]  # rows, their lengths, how many of their tokens were asked for
PENALTIES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)  # λ at which depths are kept; between them, interpolated


class Passes(NamedTuple):
    """How words are hidden."""

    layers: int  # guessed after 1…layers
    spacing: int  # words from one mask to the next; 0: one mask a pass
    asked: Tensor | None = None  # [words] whose depth is wanted; without it, every word's


@torch.no_grad()
def estimate(model: MaskedModel, packed: Packed, passes: Passes, penalties: Tensor, note: Note | None = None) -> Tensor:
    """The depth of every word asked for at every λ: [words, penalties], whole numbers 1…layers; of others, 1."""
    words = words_of(packed)
    mine, turns = _turns(words, packed.count, passes)
    row = torch.repeat_interleave(torch.arange(packed.count, device=turns.device), turns)
    turn = torch.arange(len(row), device=row.device) - (turns.cumsum(0) - turns)[row]
    begin = torch.searchsorted(words.row, torch.arange(packed.count, device=row.device))
    made = torch.ones(len(words.key), len(penalties), device=row.device)
    for chunk in _chunks(packed.lengths[row.cpu()]):
        some = take_rows(packed, row[chunk].cpu())
        here = words_of(some)
        which = begin[row[chunk]][here.row] + _place_in_row(here, some.count)
        chosen = mine[which] == turn[chunk][here.row]
        losses = _word_losses(model, some, here, chosen, passes.layers)
        made[which[chosen]] = torch.stack([best_exit(-losses, float(p)) + 1.0 for p in penalties], dim=1)
        if note:
            asked = torch.bincount(here.row[chosen], weights=here.size[chosen].double(), minlength=some.count)
            note(row[chunk], some.lengths, asked.cpu())
    return made


def _turns(words: Words, rows: int, passes: Passes) -> tuple[Tensor, Tensor]:
    """In which pass of its row a word is hidden (−1: never), and how many passes each row takes: as few as keep any
    two words of a pass `spacing` apart."""  # [words], [rows]
    wanted = torch.ones_like(words.row, dtype=torch.bool) if passes.asked is None else passes.asked
    row, place = words.row[wanted], _place_in_row(words, rows)[wanted]
    many = torch.bincount(row, minlength=rows)
    number = torch.arange(len(row), device=row.device) - (many.cumsum(0) - many)[row]
    if passes.spacing:  # the most that stand within `spacing` of one another, anywhere in the row
        line = place + row * (len(words.row) + passes.spacing)
        near = torch.searchsorted(line, line + passes.spacing) - torch.arange(len(line), device=line.device)
        many = torch.zeros_like(many).scatter_reduce(0, row, near, "amax")
    turn = torch.full_like(words.row, -1)
    turn[wanted] = number % many[row]
    return turn, many


def count(s: State, layers: int, rows: Tensor, lengths: Tensor, asked: Tensor) -> None:
    """Writes what masked passes cost into the log."""
    origin = s.packed.rows[ORIGIN][rows]
    s.trace.append(Event("embed", 0, origin, lengths, lengths))
    for layer in range(1, layers + 1):
        s.trace.append(Event("attend", layer, origin, lengths, lengths))
        s.trace.append(Event("feed", layer, origin, lengths, lengths))
        s.trace.append(Event("predictor", layer, origin, asked, asked))


def _word_losses(model: MaskedModel, some: Packed, words: Words, chosen: Tensor, layers: int) -> Tensor:
    """The mean loss of each chosen word's pieces after every layer."""  # [layers, chosen]
    ids = some.tokens[ID]
    is_hidden = torch.cat((chosen, chosen.new_zeros(1)))[words.of_token]
    hidden = is_hidden.nonzero().squeeze(1)
    masked = torch.where(is_hidden, model.mask_id.to(ids.device), ids)
    losses = layer_losses(model, some.with_tokens(id=masked), hidden, ids[hidden], layers)
    number = chosen.long().cumsum(0) - 1
    total = losses.new_zeros(layers, int(chosen.sum())).index_add(1, number[words.of_token[hidden]], losses)
    return total / words.size[chosen]


def _place_in_row(words: Words, rows: int) -> Tensor:
    """Each word's number within its row."""
    per_row = torch.bincount(words.row, minlength=rows)
    return torch.arange(len(words.row), device=words.row.device) - (per_row.cumsum(0) - per_row)[words.row]


def _chunks(lengths: Tensor) -> list[Tensor]:
    """Passes of similar length together, about TOKENS tokens at once."""
    order = lengths.argsort(stable=True)
    number = (lengths[order].cumsum(0) - 1) // max(TOKENS, int(lengths.max()) if len(lengths) else 1)
    return list(order.split(torch.unique_consecutive(number, return_counts=True)[1].tolist()))


def take_rows(packed: Packed, rows: Tensor) -> Packed:
    """These rows, in this order, as often as they are named; token columns only."""
    lengths = packed.lengths[rows]
    start = torch.repeat_interleave(packed.starts[rows] - (lengths.cumsum(0) - lengths), lengths)
    index = (start + torch.arange(len(start))).to(packed.device)
    tokens = {name: column.index_select(0, index) for name, column in packed.tokens.items()}
    return Packed(torch.empty(0), lengths, {}, tokens)


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
    made = depth_table(found.packed.tokens[ID], found.vocabulary, depths, penalties, extent.unseen)
    return {**made, "own": own, "words": torch.bincount(found.words.row, minlength=len(data.encoded))}


def some_of(data: Data, most: int) -> Data:
    """Rows spread evenly over the data, at most so many; 0 means all."""
    every = len(data.encoded)
    chosen = torch.linspace(0, every - 1, min(most or every, every)).long().tolist()
    return Data(data.rows, [data.encoded[i] for i in chosen])
