"""PoWER-BERT (Goyal et al. 2020): learns how many tokens each layer needs, then keeps the most significant ones.

What it does: between attention and feed-forward a layer keeps a fixed number of tokens, those with the highest
significance (attention received from the others). Three stages: fine-tuning; search, in which the token of rank k is
scaled by a weight r_k in 0…1 and Σ penalty·layer·‖r‖₁ reduces the weights, after which a layer's count is the sum of
its weights; training with fixed counts and tokens really dropped. A row shorter than a count keeps all its tokens.

Modifications (ours, not the paper's or its code's):
- tokens are really dropped at any batch size;
- padding never takes part, so that ranks which no training row reaches start at 0;
- weights have a learning rate of their own and no weight decay;
- the last stage also learns the logits of the fine-tuned model (`distillation`; 0 is as published);
- counts are stored with the model;
- a run-time `scale` shrinks all counts, so that one training gives a short curve (the paper's curve is one training for
  each penalty; share the first stage with --init).

Relations: the Length-Adaptive Transformer drops by the same scores but is trained once for all lengths. `counts=…`
skips the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from offramp.core.attention import AttentionScores
from offramp.core.columns import ORIGIN
from offramp.core.loop import State
from offramp.core.policy import Needs, Policy
from offramp.errors import OfframpError
from offramp.methods._base import LengthMethod
from offramp.methods._shared.lengths import best_tokens, check_depth, token_ranks
from offramp.nn.batches import Batch, Data
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.training.distillation import teacher_logits
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers
from offramp.training.losses import last_exit_loss
from offramp.training.objectives import DroppingStage, Objective
from offramp.training.stage import Backward, ParameterGroups, Stage

RETENTION = "retention"  # key of the method's module in Network.added


@dataclass(frozen=True)
class PoWERBERTSettings:
    """The share of its trained count that every layer keeps."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.scale <= 1.0:
            given = f"scale={self.scale}"
            raise OfframpError("a share of the trained counts", given, "use a number above 0 and at most 1, e.g. 0.8")


@dataclass(frozen=True)
class PoWERBERTOptions:
    """How counts are found: the larger the penalty, the fewer tokens are kept."""

    penalty: float = 1e-3
    soft_lr: float = 1e-2  # learning rate of the rank weights
    distillation: float = 1.0  # weight, with fixed counts, of the loss against the model before the search
    counts: tuple[float, ...] = ()  # tokens that each layer keeps; given, they are not searched
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        if not self.distillation >= 0.0:
            raise OfframpError("a weight of distillation", f"distillation={self.distillation}", "use 0 or more")
        if not (0.0 <= self.penalty < float("inf") and 0.0 < self.soft_lr < 1.0):
            given = f"penalty={self.penalty}, soft_lr={self.soft_lr}"
            raise OfframpError("a penalty and a learning rate", given, "use e.g. penalty=0.001, soft_lr=0.005")
        if any(not n >= 1 or n % 1 != 0 for n in self.counts) or list(self.counts) != sorted(self.counts, reverse=True):
            given = ",".join(f"{n:g}" for n in self.counts)
            fix = "give whole numbers of 1 or more, none larger than the one before, e.g. 60,40,20"
            raise OfframpError("counts of tokens that fall with depth", given, fix)


class Retention(nn.Module):
    """Weights by layer and rank (for training), and the counts that follow from them (for run time)."""

    counts: Tensor  # [layers] int64

    def __init__(self, depth: int, longest: int, counts: tuple[float, ...]) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(depth, longest))
        self.register_buffer("counts", torch.tensor(counts).long() if counts else torch.full((depth,), longest))

    @torch.no_grad()
    def clip(self) -> None:
        """Clip weights to 0…1 after an update."""
        self.weights.clamp_(0.0, 1.0)

    @torch.no_grad()
    def update_counts(self) -> None:
        """Set each layer's count to the sum of its weights, never growing with depth."""
        sums = self.weights.clamp(0.0, 1.0).double().sum(1).add(1e-6).floor().long().clamp(min=1)
        self.counts.copy_(sums.cummin(0).values)


def retention(network: Network) -> Retention:
    """Return the weights and counts of a network."""
    found = network.added[RETENTION]
    assert isinstance(found, Retention)
    return found


class PoWERBERTPolicy(Policy):
    """Keeps the first token and the most significant others."""

    def __init__(self, network: Network, settings: PoWERBERTSettings) -> None:
        kept = retention(network)
        self.scale, self.counts = settings.scale, [kept.weights.shape[1], *kept.counts.tolist()]

    def needs(self, layer: int) -> Needs:
        drops = layer > 0 and (self.counts[layer] < self.counts[layer - 1] or (layer == 1 and self.scale < 1.0))
        return Needs(after_attention=drops, scores=drops)

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        if scores is None or not self.needs(layer).scores:
            return None
        original = s.base.lengths[s.packed.rows[ORIGIN].cpu()]
        full = original.clamp(max=self.counts[layer])
        kept = torch.ceil(full.double() * self.scale - 1e-9).long().clamp(min=1)
        return best_tokens(s.packed, scores.columns - scores.diagonal, kept, first=True)


@dataclass
class RankSearchStage(Stage):
    """Scales tokens by weights of their ranks, and penalises the weights."""

    options: PoWERBERTOptions = field(kw_only=True)
    objective: Objective = last_exit_loss
    longest: int | None = None  # tokens of the longest training row

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def optimisers(self, lr: float) -> list[ParameterGroups]:
        own = retention(self.network).weights
        (groups,) = super().optimisers(lr)
        rest = [{**group, "params": [p for p in group["params"] if p is not own]} for group in groups]
        weights = {"params": [own], "lr": self.options.soft_lr, "weight_decay": 0.0}
        return [[*(group for group in rest if group["params"]), weights]]

    def prepare(self, data: Data, folder: Path) -> None:
        self.longest = max(len(e.ids) for e in data.encoded)
        if self.options.distillation > 0.0:
            teacher_logits(self.network, data, folder)  # for the stage after this one
        with torch.no_grad():
            retention(self.network).weights[:, self.longest :] = 0.0

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        ranks, net = retention(self.network), self.network
        ranks.clip()
        hooks = ForwardHooks(scores=lambda _: True, after_attention=partial(scale_by_rank, ranks))
        loss = self.objective(net, forward_all_layers(net.encoder, batch.packed, hooks), batch)
        layers = torch.arange(1, net.depth + 1, device=ranks.weights.device)
        sums = ranks.weights[:, : self.longest].sum(1)  # ranks that no row has would only increase gradient clipping
        backward(loss + self.options.penalty * (sums * layers).sum())
        return {"loss": loss.detach()}

    def policy(self) -> Policy:
        """Return the policy of the counts at this point of the search."""
        retention(self.network).update_counts()
        return PoWERBERTPolicy(self.network, PoWERBERTSettings())

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        """Return the last epoch, in which the penalty has had its full effect."""
        return len(history) - 1


def scale_by_rank(ranks: Retention, layer: int, states: LayerStates, x: Tensor) -> Tensor:
    """Return states that are multiplied by the weights of their tokens' ranks."""  # [tokens, hidden]
    scores = states.scores[layer]
    rank = token_ranks(states.packed, scores.columns - scores.diagonal, first=False)
    return x * ranks.weights[layer - 1][rank].to(x.dtype)[:, None]


class FixedCountsStage(DroppingStage):
    """Fine-tuning with tokens dropped to the counts."""

    frozen_prefixes = ("added.retention.",)

    def policy(self) -> Policy:
        return PoWERBERTPolicy(self.network, PoWERBERTSettings())


class PoWERBERT(LengthMethod):
    """Each layer keeps a learned number of tokens."""

    name = "power_bert"
    settings = PoWERBERTSettings
    options = PoWERBERTOptions
    space = ThresholdSpace("scale", full_value=1.0, unit="share", replay=False, grid=(0.3, 0.45, 0.6, 0.75, 0.9))
    needs = frozenset({"one answer a row"})
    of_a_task = LengthMethod.of_a_task | {RETENTION}
    hf_equal = False

    def modules(self, network: Network, options: PoWERBERTOptions) -> nn.ModuleDict:
        check_depth("counts", options.counts, network.depth, "leave counts out: training finds them")
        return nn.ModuleDict({RETENTION: Retention(network.depth, network.encoder.positions, options.counts)})

    def policy(self, network: Network, settings: PoWERBERTSettings) -> Policy:
        return PoWERBERTPolicy(network, settings)

    def stages(self, network: Network, options: PoWERBERTOptions, objective: Objective | None = None) -> list[Stage]:
        """Return fine-tuning (which `--init` replaces), the search (unless counts are given) and the final training."""
        loss, rate = objective or last_exit_loss, options.head_lr
        search = (
            [RankSearchStage(network, "search", rate, options=options, objective=loss)] if not options.counts else []
        )
        return [
            Stage(network, "fine-tune", rate, fine_tuning=True),
            *search,
            FixedCountsStage(network, "re-train", rate, objective=loss, distillation=options.distillation),
        ]

    def about(self, network: Network) -> dict[str, list[int]]:
        """Return how many tokens each layer keeps."""
        return {"counts": retention(network).counts.tolist()}
