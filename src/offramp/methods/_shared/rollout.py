"""Random choices of tokens and what was learned from their rewards (TR-BERT's policy gradient)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.nn import row_ops as rows
from offramp.nn.network import Network
from offramp.training.forward import Soft, Trace

GONE = -10_000.0


def points(depth: int) -> tuple[int, ...]:
    """The layers before which tokens leave: the second, and the first of the upper half."""
    return tuple(sorted({min(2, depth), depth // 2 + 1}))


def tiled(packed: Packed, count: int) -> Packed:
    """The same rows several times over, one block after the other."""
    columns = {name: t.repeat(count, *[1] * (t.dim() - 1)) for name, t in packed.tokens.items()}
    columns["origin"] = torch.arange(packed.total * count, device=packed.device)
    numbered = {"origin": torch.arange(packed.count * count, device=packed.device)}
    return Packed(torch.empty(0), packed.lengths.repeat(count), numbered, columns)


@dataclass
class Rollout(Policy):
    """Draws who stays and remembers it. For training only, one object a pass: run-time policies keep no memory."""

    network: Network
    worth: Tensor | None = None  # [tokens of the batch, points] a heuristic
    guided: int = 0  # so many first rows follow the heuristic instead of chance
    surprise: list[Tensor] = field(default_factory=list)  # per point [rows], mean −log p of what was decided
    stayed: list[Tensor] = field(default_factory=list)  # per point, which tokens of the batch

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        places = points(s.depth)
        if layer not in places:
            return None
        packed, first = s.packed, rows.first(s.packed)
        with torch.enable_grad():  # the model may be frozen, its selectors are not
            logits = self.network.predictor(layer, packed)
        chance = logits.detach().sigmoid()
        keep = torch.rand_like(chance) < chance
        if self.guided and self.worth is not None:
            keep = self._guide(keep, chance, packed, places.index(layer))
        keep = keep | first
        with torch.enable_grad():
            each = F.binary_cross_entropy_with_logits(logits, keep.float(), reduction="none").masked_fill(first, 0.0)
            count = (packed.lengths.to(each.device) - 1).clamp(min=1)
            self.surprise.append(rows.total(each, packed) / count)  # no row leaves, so rows keep their order
        self.stayed.append(packed.tokens["origin"][keep])
        return keep

    def _guide(self, keep: Tensor, chance: Tensor, packed: Packed, place: int) -> Tensor:
        """The first rows keep as many tokens as the policy expects, but those the heuristic ranks highest."""
        assert self.worth is not None
        wanted = rows.total(chance, packed).round()[packed.row_of_token]
        best = rows.ranks(self.worth[packed.tokens["origin"], place], packed) < wanted
        return torch.where(packed.row_of_token < self.guided, best, keep)

    def kept(self, packed: Packed) -> Tensor:
        """The share of each row's tokens that stayed, averaged over the points."""  # [rows]
        whole = packed.lengths.to(packed.device)
        counts = [torch.bincount(packed.row_of_token[stayed], minlength=packed.count) for stayed in self.stayed]
        return torch.stack([count / whole for count in counts]).mean(0)

    def loss(self, losses: Tensor, alpha: float, many: Packed, blocks: int) -> Tensor:
        """Choices that did better than the mean of their row's become likelier. `losses` [blocks × rows]."""
        reward = (-losses - alpha * self.kept(many)).view(blocks, -1)
        advantage = (reward - reward.mean(0)).reshape(-1).detach()
        return (advantage * torch.stack(self.surprise).mean(0)).mean()


def hard(rolled: Rollout, packed: Packed, network: Network) -> Soft:
    """The last block's choices as masks of a differentiable pass over the rows themselves."""
    places, offset = points(network.depth), int(rolled.stayed[0].max()) // packed.total * packed.total
    there = torch.ones(packed.total, device=packed.device)
    present: dict[int, Tensor] = {}
    for layer in range(1, network.depth + 1):
        if layer in places:
            own = rolled.stayed[places.index(layer)] - offset
            there = torch.zeros_like(there).index_fill(0, own[own >= 0], 1.0)
        present[layer] = there

    def gate(layer: int, made: Trace) -> Tensor | None:
        made.present[layer] = present[layer]
        return present[layer] if network.per_token else None

    return Soft(gate=gate, key_bias=lambda layer, _: (1.0 - present[layer]) * GONE)
