"""Length-Adaptive Transformer (Kim and Cho 2021): trained once with dropped tokens; lengths are searched for a budget.

What it does: between attention and feed-forward each layer keeps the tokens that received the most attention. Training
starts from a fine-tuned model and updates, in every step, the full model by the labels and shorter ones by the full
model's logits (in-place distillation): the shortest possible one and `sandwiches` random ones (LengthDrop: each layer
keeps between 1 − drop and all of its tokens), while layers are skipped at random (LayerDrop). Where every token has an
answer, dropped tokens return at the end (drop-and-restore) with the output of the last layer that they went through
whole. `offramp calibrate --search` finds lengths for a budget.

Modifications (ours, not the paper's or its code's):
- lengths are shares of a row's real length (drawn from the padded maximum, early drops would only remove padding);
- each row keeps its own tokens, in their order, ranked by attention before dropout;
- KL(full ‖ short), unless `kl=reverse`, which the code computes;
- a dropped token returns through an affine map of its own for every layer (`restore=affine`), at first the identity:
  states of early layers are larger than those that the shared head reads. Its cost is counted. `restore=state` returns
  the state after the attention half of the layer that dropped it, as runs of earlier versions do;
- the best epoch is chosen in the middle of the trained range, not at full length;
- on vocabulary tasks short models are trained by labels;
- beside the labels the full model learns the logits of the fine-tuned one that training began with
  (`distil=false`: labels alone), because it loses accuracy when it is trained on the same labels again;
- `cliffs` is the share of random lengths that are cliffs, which keep every token through the first layers and almost
  none after them: what searches find best where later layers read what earlier ones gathered. By default one half where
  every token has an answer, and none elsewhere.

Relations: PoWER-BERT with the same scores (the diagonal included) and one training for all budgets instead of one for
each. With the objective of an exit method (`length_adaptive+branchynet`) rows also exit early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.core.attention import AttentionScores
from offramp.core.columns import ORIGIN, Column
from offramp.core.cost import Event, HeadCost
from offramp.core.loop import State
from offramp.core.policy import Needs, Policy
from offramp.errors import OfframpError
from offramp.methods._base import LengthMethod
from offramp.methods._shared.lengths import LengthPolicy, LengthSettings
from offramp.nn.batches import Batch
from offramp.nn.keys import PREDICTORS, TRAINED_LENGTHS
from offramp.nn.lengths import TrainedLengths, cliffs, constant_drop
from offramp.nn.network import Network
from offramp.nn.setting_space import LengthSpace
from offramp.training.distillation import distillation_loss
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers, forward_with_dropping
from offramp.training.losses import exit_loss, last_exit_loss
from offramp.training.objectives import Objective, StageWithTeacher
from offramp.training.stage import Backward, Stage

LAYER_INPUT = Column("layer_input", torch.float32, None, "states before the layer, until tokens were dropped in it")


@dataclass(frozen=True)
class LengthAdaptiveOptions:
    """How the Length-Adaptive Transformer is trained."""

    drop: float = 0.2  # the largest share of its tokens that a layer drops
    layer_drop: float = 0.2  # probability that a layer is skipped
    sandwiches: int = 2  # random lengths in each step
    cliffs: float = -1.0  # probability that a random length is a cliff; −1: 0.5 for answers per token, else 0
    restore: Literal["affine", "state"] = "affine"  # how dropped tokens return where every token has an answer
    kl: Literal["forward", "reverse"] = "forward"
    distil: bool = True  # the full model learns the logits of the fine-tuned one beside the labels
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        if not (0.0 < self.drop < 1.0 and 0.0 <= self.layer_drop < 1.0 and self.sandwiches >= 0):
            given = f"drop={self.drop}, layer_drop={self.layer_drop}, sandwiches={self.sandwiches}"
            fix = "use e.g. drop=0.2, layer_drop=0.2, sandwiches=2"
            raise OfframpError("shares above 0 (of layers: 0 or more) and below 1, and a number", given, fix)
        if self.cliffs != -1.0 and not 0.0 <= self.cliffs <= 1.0:
            raise OfframpError(
                "a probability that a random length is a cliff", f"cliffs={self.cliffs}", "use 0 to 1, e.g. 0.5"
            )


class RestoringMap(nn.Module):
    """An affine map from the states below the layer that drops a token to those that heads read."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(hidden)), nn.Parameter(torch.zeros(hidden))
        self.cost = HeadCost(0, hidden * hidden)

    def forward(self, states: Tensor) -> Tensor:
        """Return the states with which tokens return."""  # [tokens, hidden]
        return F.linear(states, self.weight, self.bias)


class RestoringLengthPolicy(LengthPolicy):
    """Drops tokens as `LengthPolicy` does; they return with the mapped output of the layer below."""

    def __init__(self, network: Network, settings: LengthSettings) -> None:
        super().__init__(network, settings)
        self.maps = network.added[PREDICTORS]

    def needs(self, layer: int) -> Needs:
        needs = super().needs(layer)
        return needs._replace(before_layer=needs.after_attention)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        s.packed = s.packed.with_tokens(layer_input=s.packed.states)
        return None

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        keep, before = super().after_attention(layer, s, scores), s.packed.tokens.get(LAYER_INPUT)
        if before is None:
            return keep
        packed = s.packed.without_tokens(LAYER_INPUT)
        if keep is not None:
            dropped = (~keep).nonzero().squeeze(1)
            restored: Tensor = self.maps[str(layer)](before.index_select(0, dropped))  # type: ignore[index]  # a ModuleDict
            packed = packed.with_states(packed.states.index_copy(0, dropped, restored.to(packed.states.dtype)))
            counts = torch.bincount(packed.row_of_token[dropped], minlength=packed.count).cpu()
            s.trace.append(Event("predictor", layer, packed.rows[ORIGIN], counts, counts))
        s.packed = packed
        return keep


def length_policy(network: Network, settings: LengthSettings) -> LengthPolicy:
    """Return the policy of lengths; with maps to restore tokens by, where the network has them."""
    return (RestoringLengthPolicy if PREDICTORS in network.added else LengthPolicy)(network, settings)


@dataclass
class LengthDropStage(StageWithTeacher):
    """The sandwich rule: one update from the full length, the shortest and some random ones between."""

    options: LengthAdaptiveOptions = field(kw_only=True)
    objective: Objective | None = None

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def policy(self) -> Policy:
        """Return the policy that epochs are compared by: the middle of the trained range."""
        return length_policy(self.network, LengthSettings(constant_drop(self.network.depth, self.options.drop / 2)))

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        share, net, batch = 1.0 / (self.options.sandwiches + 2), self.network, self.with_teacher(batch)
        skipped = self.draw_skipped_layers()
        states = forward_all_layers(net.encoder, batch.packed, ForwardHooks(skip=lambda layer: layer in skipped))
        loss = (self.objective or last_exit_loss)(net, states, batch) * share
        with torch.no_grad():
            teacher = None if net.task.outputs == 0 else net(net.depth, states.after(net.depth))
        total = loss.detach()
        backward(loss)
        del states, loss  # each pass is freed before the next begins
        for number in range(self.options.sandwiches + 1):
            loss = self._short_loss(batch, teacher, shortest=number == 0) * share
            total = total + loss.detach()
            backward(loss)
        return {"loss": total}

    def _short_loss(self, batch: Batch, teacher: Tensor | None, shortest: bool) -> Tensor:
        net, skipped = self.network, self.draw_skipped_layers()
        lengths = self.draw_lengths(skipped, shortest)
        states = forward_with_dropping(net, batch.packed, length_policy(net, LengthSettings(lengths)), skipped)
        loss = self._distillation_loss(states, teacher, batch)
        return loss if self.objective is None else loss + self.objective(net, states, batch)

    def _distillation_loss(self, states: LayerStates, teacher: Tensor | None, batch: Batch) -> Tensor:
        net, last = self.network, states.after(self.network.depth)
        if teacher is None:  # a vocabulary at every token
            return exit_loss(net, net.depth, last, batch)
        logits = net(net.depth, last)
        if self.options.kl == "reverse":
            return distillation_loss(net, teacher, logits, batch.packed)
        return distillation_loss(net, logits, teacher, batch.packed)

    def draw_skipped_layers(self) -> frozenset[int]:
        """Return the layers that the next pass skips."""
        draws = (torch.rand(self.network.depth) < self.options.layer_drop).tolist()
        return frozenset(layer for layer, skip in enumerate(draws, start=1) if skip)

    def draw_lengths(self, skipped: frozenset[int], shortest: bool) -> tuple[float, ...]:
        """Return the share of tokens kept after each layer; a skipped layer drops nothing."""
        steep = [] if shortest else self._draw_cliffs(skipped)
        if steep:
            return steep[int(torch.randint(len(steep), ()))]
        drops = (torch.ones if shortest else torch.rand)(self.network.depth).tolist()
        kept = [1.0 if layer in skipped else 1.0 - self.options.drop * part for layer, part in enumerate(drops, 1)]
        return tuple(torch.tensor(kept, dtype=torch.float64).cumprod(0).tolist())

    def _draw_cliffs(self, skipped: frozenset[int]) -> list[tuple[float, ...]]:
        """Return nothing or, with probability `cliffs`, the cliffs whose edge is not in a skipped layer, where no token
        would be dropped."""
        share = self.options.cliffs if self.options.cliffs >= 0.0 else 0.5 * self.network.per_token
        if share == 0.0 or float(torch.rand(())) >= share:
            return []
        known = cliffs(constant_drop(self.network.depth, self.options.drop))
        return [lengths for lengths in known if lengths.count(1.0) + 1 not in skipped]


class LengthAdaptive(LengthMethod):
    """Each layer keeps a chosen share of tokens, those that received the most attention."""

    name = "length_adaptive"
    settings = LengthSettings
    options = LengthAdaptiveOptions
    space = LengthSpace("lengths")
    of_a_task = LengthMethod.of_a_task | {TRAINED_LENGTHS}
    earlier_options: Mapping[str, Any] = {"restore": "state"}

    def modules(self, network: Network, options: LengthAdaptiveOptions) -> nn.ModuleDict:
        """Return the shortest lengths that are trained and, where tokens return, a map for every layer."""
        restores = network.per_token and options.restore == "affine"
        shortest = constant_drop(network.depth, options.drop)
        added = nn.ModuleDict({TRAINED_LENGTHS: TrainedLengths(shortest, restores=restores)})
        if restores:
            hidden, layers = network.encoder.hidden, range(1, network.depth + 1)
            added[PREDICTORS] = nn.ModuleDict({str(layer): RestoringMap(hidden) for layer in layers})
        return added

    def policy(self, network: Network, settings: LengthSettings) -> Policy:
        return length_policy(network, settings)

    def stages(
        self, network: Network, options: LengthAdaptiveOptions, objective: Objective | None = None
    ) -> list[Stage]:
        """Return fine-tuning (which `--init` replaces), then LengthDrop, also by `objective` if it is given."""
        drop = LengthDropStage(
            network, "length drop", options.head_lr, options=options, objective=objective, distil=options.distil
        )
        return [Stage(network, "fine-tune", options.head_lr, fine_tuning=True), drop]
