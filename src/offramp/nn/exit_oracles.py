"""At which exit to stop: oracles that know the answer, and small heads that learn to do without (Elbayad et al. 2020).

Tokens lie packed, rows one after the other; an exit is named by its place 0…E−1 among the exits that may be chosen.
The oracle's exit is argmax over n of value_n − λn, where a value is a log-likelihood (minus the loss) or correctness
(1 right, 0 wrong), for single tokens smoothed over their neighbours with κ = exp(−|t − t′|² / σ), for rows summed.
(In print the smoothed correctness sums C_t; it is C_t′ that is meant.) Of equals the earliest exit wins.

Three forms of the exit distribution q: multinomial (one softmax over exits, read early), geometric-like (at every exit
a sigmoid says stop or go on: a Poisson binomial, broken stick by stick), threshold (the exit's own confidence, nothing
to learn). Both learned forms are taught by cross-entropy against the oracle's exit.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.core.cost import HeadCost

NEGLIGIBLE = 1e-6  # neighbours whose weight κ is below this are left out


def likelihood_oracle(losses: Tensor, lengths: Tensor, penalty: float, sigma: float = 0.0) -> Tensor:
    """The exit of each token by its loss at every exit: [exits, tokens] → places [tokens]."""
    return best_exit(smooth_over_neighbours(-losses.float(), lengths, sigma), penalty)


def correctness_oracle(right: Tensor, lengths: Tensor, penalty: float, sigma: float = 0.0) -> Tensor:
    """The exit of each token by whether every exit is right: [exits, tokens] → places [tokens]."""
    return best_exit(smooth_over_neighbours(right.float(), lengths, sigma), penalty)


def row_oracle(values: Tensor, lengths: Tensor, penalty: float) -> Tensor:
    """One exit a row by the sum over its tokens of −loss or correctness: [exits, tokens] → places [rows]."""
    return best_exit(row_sums(values, lengths), penalty)


def row_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums over the tokens of each row: [exits, tokens] → [exits, rows]."""
    rows = torch.arange(lengths.shape[0], device=values.device)
    owner = torch.repeat_interleave(rows, lengths.to(values.device), output_size=values.shape[1])
    return values.new_zeros(values.shape[0], lengths.shape[0]).index_add(1, owner, values)


def best_exit(values: Tensor, penalty: float) -> Tensor:
    """argmax over exits of value − λ·place, the earliest of equals: [exits, n] → places [n]."""
    exits = values.shape[0]
    place = torch.arange(exits, device=values.device)[:, None]
    worth = values - penalty * place
    return torch.where(worth == worth.amax(0), place, exits).amin(0)


def smooth_over_neighbours(values: Tensor, lengths: Tensor, sigma: float) -> Tensor:
    """Every token's values plus those of its neighbours in the same row, weighted by κ: [exits, tokens] → the same.

    σ = 0 is no smoothing. Neighbours so far that κ vanishes are left out, so the cost is tokens × reach, not tokens².
    """
    if sigma <= 0.0:
        return values
    rows = torch.arange(lengths.shape[0], device=values.device)
    owner = torch.repeat_interleave(rows, lengths.to(values.device), output_size=values.shape[1])
    reach = min(int(math.sqrt(-sigma * math.log(NEGLIGIBLE))), int(lengths.max()) - 1)
    total = values.clone()
    for step in range(1, reach + 1):
        near = math.exp(-(step**2) / sigma) * (owner[step:] == owner[:-step])
        total[:, step:] += near * values[:, :-step]
        total[:, :-step] += near * values[:, step:]
    return total


def multinomial_loss(logits: Tensor, oracle: Tensor) -> Tensor:
    """Cross-entropy of a softmax over exits against the oracle: [n, exits], places [n] → mean."""
    return F.cross_entropy(logits.float(), oracle)


def geometric_loss(stops: Tensor, oracle: Tensor) -> Tensor:
    """Cross-entropy of the geometric-like form against the oracle: [n, exits − 1], places [n] → mean."""
    return F.nll_loss(broken_stick(stops), oracle)


def broken_stick(stops: Tensor) -> Tensor:
    """Logits of stopping at every exit but the last → log q over all exits; the last takes what is left.

    q_n = χ_n · Π_{m<n} (1 − χ_m), in log space: [n, exits − 1] → [n, exits].
    """
    stop, go = F.logsigmoid(stops.float()), F.logsigmoid(-stops.float())
    reached = torch.cat((torch.zeros_like(go[:, :1]), go.cumsum(1)), dim=1)
    return reached + torch.cat((stop, torch.zeros_like(stop[:, :1])), dim=1)


def first_stop(stops: Tensor, thresholds: Tensor | float = 0.5) -> Tensor:
    """Where the geometric-like form stops: the first exit with χ > τ, else the last: [n, exits − 1] → places [n]."""
    said = stops.float().sigmoid() > thresholds
    place = torch.arange(stops.shape[1], device=stops.device)
    return torch.where(said, place, stops.shape[1]).amin(1)


class MultinomialExitUnit(nn.Module):
    """One softmax over exits, read off states once: the first layer's for tokens, a mean for whole rows."""

    def __init__(self, hidden: int, exits: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden, exits)
        self.cost = HeadCost(0, hidden * exits)  # per thing it reads: a token, or a row given as one

    def forward(self, states: Tensor) -> Tensor:
        """Logits over exits: [n, hidden] → [n, exits]."""
        logits: Tensor = self.project(states)
        return logits


class GeometricExitUnit(nn.Module):
    """A unit that says stop or go on at every exit but the last: one for all exits, as printed, or one each."""

    def __init__(self, hidden: int, exits: int, shared: bool = True) -> None:
        super().__init__()
        self.shared = shared
        self.project = nn.Linear(hidden, 1 if shared else exits - 1)
        self.cost = HeadCost(0, hidden)  # per thing it reads and exit it is asked at

    def forward(self, place: int, states: Tensor) -> Tensor:
        """Logit of stopping at the exit of that place (0…E−2): [n, hidden] → [n]."""
        row = 0 if self.shared else place
        return F.linear(states, self.project.weight[row : row + 1], self.project.bias[row : row + 1]).squeeze(-1)
