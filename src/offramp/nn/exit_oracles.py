"""Oracles that choose the exit from the right answer, and units that learn to predict it (Elbayad et al. 2020).

Tokens are packed, row after row; an exit is named by its index 0…E−1 among the exits that may be chosen. The oracle's
exit is argmax over n of value_n − λn, where a value is a log-likelihood (minus the loss) or correctness (1 right, 0
wrong), for single tokens smoothed over their neighbours with κ = exp(−|t − t′|² / σ), for rows summed. (The paper
prints C_t in the sum of smoothed correctness where it means C_t′.) Of equals the earliest exit is chosen. What no exit
gets right is labelled with the last exit: by the formula alone it would be the first, and as long as a model is wrong
on many tokens, units that learn this stop everything at once.

Three forms of the exit distribution q: multinomial (one softmax over exits, read early), geometric-like (at every exit
a sigmoid decides between stopping and going on: stick breaking), threshold (the exit's own confidence, nothing is
learned). Both learned forms are trained by cross-entropy against the oracle's exit.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.core.cost import HeadCost

NeverRight = Literal["last", "first"]
NEGLIGIBLE = 1e-6  # neighbours whose weight κ is below this are left out


def likelihood_oracle(losses: Tensor, lengths: Tensor, penalty: float, sigma: float = 0.0) -> Tensor:
    """Return the exit of each token by its loss at every exit: [exits, tokens] → exits [tokens]."""
    return best_exit(smooth_over_neighbours(-losses.float(), lengths, sigma), penalty)


def correctness_oracle(
    right: Tensor, lengths: Tensor, penalty: float, sigma: float = 0.0, never_right: NeverRight = "last"
) -> Tensor:
    """Return the exit of each token by whether every exit is right: [exits, tokens] → exits [tokens]."""
    exits = best_exit(smooth_over_neighbours(right.float(), lengths, sigma), penalty)
    return label_never_right(exits, right, never_right)


def label_never_right(exits: Tensor, right: Tensor, never_right: NeverRight = "last") -> Tensor:
    """Return exits [n] in which those of tokens or rows that no exit gets right (`right` [exits, n]) are the last.

    With `never_right="first"` they stay as the formula has them.
    """
    return exits if never_right == "first" else torch.where((right > 0).any(0), exits, right.shape[0] - 1)


def row_oracle(values: Tensor, lengths: Tensor, penalty: float) -> Tensor:
    """Return one exit per row by the sum over its tokens of −loss or correctness: [exits, tokens] → exits [rows]."""
    return best_exit(row_sums(values, lengths), penalty)


def row_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return sums over the tokens of each row: [exits, tokens] → [exits, rows]."""
    rows = torch.arange(lengths.shape[0], device=values.device)
    row_of_token = torch.repeat_interleave(rows, lengths.to(values.device), output_size=values.shape[1])
    return values.new_zeros(values.shape[0], lengths.shape[0]).index_add(1, row_of_token, values)


def best_exit(values: Tensor, penalty: float) -> Tensor:
    """Return argmax over exits of value − λ·index, the earliest of equals: [exits, n] → exits [n]."""
    exits = values.shape[0]
    index = torch.arange(exits, device=values.device)[:, None]
    penalised = values - penalty * index
    return torch.where(penalised == penalised.amax(0), index, exits).amin(0)


def smooth_over_neighbours(values: Tensor, lengths: Tensor, sigma: float) -> Tensor:
    """Add to every token's values those of its neighbours in the same row, weighted by κ: [exits, tokens] → the same.

    σ = 0 is no smoothing. Neighbours with a negligible κ are left out, so the cost is tokens × reach, not tokens².
    """
    if sigma <= 0.0:
        return values
    rows = torch.arange(lengths.shape[0], device=values.device)
    row_of_token = torch.repeat_interleave(rows, lengths.to(values.device), output_size=values.shape[1])
    reach = min(int(math.sqrt(-sigma * math.log(NEGLIGIBLE))), int(lengths.max()) - 1)
    total = values.clone()
    for step in range(1, reach + 1):
        kappa = math.exp(-(step**2) / sigma) * (row_of_token[step:] == row_of_token[:-step])
        total[:, step:] += kappa * values[:, :-step]
        total[:, :-step] += kappa * values[:, step:]
    return total


def multinomial_loss(logits: Tensor, oracle: Tensor) -> Tensor:
    """Return the cross-entropy of a softmax over exits against the oracle: [n, exits], exits [n] → mean."""
    return F.cross_entropy(logits.float(), oracle)


def geometric_loss(stops: Tensor, oracle: Tensor) -> Tensor:
    """Return the cross-entropy of the geometric-like form against the oracle: [n, exits − 1], exits [n] → mean."""
    return F.nll_loss(broken_stick(stops), oracle)


def broken_stick(stops: Tensor) -> Tensor:
    """Turn logits of stopping at every exit but the last into log q over all exits; the last gets the rest.

    q_n = χ_n · Π_{m<n} (1 − χ_m), in log space: [n, exits − 1] → [n, exits].
    """
    stop, go_on = F.logsigmoid(stops.float()), F.logsigmoid(-stops.float())
    reached = torch.cat((torch.zeros_like(go_on[:, :1]), go_on.cumsum(1)), dim=1)
    return reached + torch.cat((stop, torch.zeros_like(stop[:, :1])), dim=1)


class MultinomialExitUnit(nn.Module):
    """One softmax over exits, computed once from states: the first layer's for tokens, their mean for rows."""

    def __init__(self, hidden: int, exits: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden, exits)
        self.cost = HeadCost(0, hidden * exits)  # per token, or per row that is given as one

    def forward(self, states: Tensor) -> Tensor:
        """Return logits over exits: [n, hidden] → [n, exits]."""
        logits: Tensor = self.project(states)
        return logits


class GeometricExitUnit(nn.Module):
    """A unit that decides at each exit but the last whether to stop: one for all exits (the paper's) or one each."""

    def __init__(self, hidden: int, exits: int, shared: bool = True) -> None:
        super().__init__()
        self.shared = shared
        self.project = nn.Linear(hidden, 1 if shared else exits - 1)
        self.cost = HeadCost(0, hidden)  # per token or row, and per exit it is evaluated at

    def forward(self, index: int, states: Tensor) -> Tensor:
        """Return the logit of stopping at the exit of this index (0…E−2): [n, hidden] → [n]."""
        row = 0 if self.shared else index
        return F.linear(states, self.project.weight[row : row + 1], self.project.bias[row : row + 1]).squeeze(-1)
