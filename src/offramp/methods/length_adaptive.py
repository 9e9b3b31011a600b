"""Length-Adaptive Transformer (Kim and Cho 2021): trained once with dropped tokens; lengths are searched for a budget.

What it does: between attention and feed-forward each layer keeps the tokens that received the most attention. Training
starts from a fine-tuned model and updates, in every step, the full model by the labels and shorter ones by the full
model's logits (in-place distillation): the shortest possible one and `sandwiches` random ones (LengthDrop: each layer
keeps between 1 − drop and all of its tokens), while layers are skipped at random (LayerDrop). Where every token has an
answer, dropped tokens return at the end with their last state (drop-and-restore). `offramp calibrate --search` finds
lengths for a budget.

Modifications (ours, not the paper's or its code's):
- lengths are shares of a row's real length (drawn from the padded maximum, early drops would only remove padding);
- each row keeps its own tokens, in their order, ranked by attention before dropout;
- KL(full ‖ short), unless `kl=reverse`, which the code computes;
- the last state of a dropped token includes the attention half of its last layer;
- the best epoch is chosen in the middle of the trained range, not at full length;
- on vocabulary tasks short models are trained by labels;
- `cliffs=0.5` (0 by default) makes half of the random lengths cliffs, which keep every token through the first layers
  and almost none after them: what searches find best where later layers read what earlier ones gathered.

Relations: PoWER-BERT with the same scores (the diagonal included) and one training for all budgets instead of one for
each. With the objective of an exit method (`length_adaptive+branchynet`) rows also exit early.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods._base import LengthMethod
from offramp.methods._shared.lengths import (
    TRAINED_LENGTHS,
    LengthPolicy,
    LengthSettings,
    TrainedLengths,
    cliffs,
    constant_drop,
)
from offramp.nn.batches import Batch
from offramp.nn.network import Network
from offramp.nn.setting_space import LengthSpace
from offramp.training.distillation import distillation_loss
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers, forward_with_dropping
from offramp.training.losses import exit_loss, last_exit_loss
from offramp.training.objectives import Objective
from offramp.training.stage import Backward, Stage


@dataclass(frozen=True)
class LengthAdaptiveOptions:
    """How the Length-Adaptive Transformer is trained."""

    drop: float = 0.2  # the largest share of its tokens that a layer drops
    layer_drop: float = 0.2  # probability that a layer is skipped
    sandwiches: int = 2  # random lengths in each step
    cliffs: float = 0.0  # probability that a random length is a cliff: all tokens up to a layer, almost none after it
    kl: Literal["forward", "reverse"] = "forward"
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        if not (0.0 < self.drop < 1.0 and 0.0 <= self.layer_drop < 1.0 and self.sandwiches >= 0):
            given = f"drop={self.drop}, layer_drop={self.layer_drop}, sandwiches={self.sandwiches}"
            fix = "use e.g. drop=0.2, layer_drop=0.2, sandwiches=2"
            raise OfframpError("shares above 0 (of layers: 0 or more) and below 1, and a number", given, fix)
        if not 0.0 <= self.cliffs <= 1.0:
            raise OfframpError(
                "a probability that a random length is a cliff", f"cliffs={self.cliffs}", "use 0 to 1, e.g. 0.5"
            )


@dataclass
class LengthDropStage(Stage):
    """The sandwich rule: one update from the full length, the shortest and some random ones between."""

    options: LengthAdaptiveOptions = field(kw_only=True)
    objective: Objective | None = None

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def policy(self) -> Policy:
        """Return the policy that epochs are compared by: the middle of the trained range."""
        return LengthPolicy(self.network, LengthSettings(constant_drop(self.network.depth, self.options.drop / 2)))

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        share, net = 1.0 / (self.options.sandwiches + 2), self.network
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
        states = forward_with_dropping(net, batch.packed, LengthPolicy(net, LengthSettings(lengths)), skipped)
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
        if self.options.cliffs == 0.0 or float(torch.rand(())) >= self.options.cliffs:
            return []
        known = cliffs(constant_drop(self.network.depth, self.options.drop))
        return [lengths for lengths in known if lengths.count(1.0) + 1 not in skipped]


class LengthAdaptive(LengthMethod):
    """Each layer keeps a chosen share of tokens, those that received the most attention."""

    name = "length_adaptive"
    settings = LengthSettings
    options = LengthAdaptiveOptions
    space = LengthSpace("lengths")

    def modules(self, network: Network, options: LengthAdaptiveOptions) -> nn.ModuleDict:
        """Return the shortest lengths that are trained; no weights are added."""
        return nn.ModuleDict({TRAINED_LENGTHS: TrainedLengths(constant_drop(network.depth, options.drop))})

    def policy(self, network: Network, settings: LengthSettings) -> Policy:
        return LengthPolicy(network, settings)

    def stages(
        self, network: Network, options: LengthAdaptiveOptions, objective: Objective | None = None
    ) -> list[Stage]:
        """Return fine-tuning (which `--init` replaces), then LengthDrop, also by `objective` if it is given."""
        return [
            Stage(network, "fine-tune", options.head_lr, fine_tuning=True),
            LengthDropStage(network, "length drop", options.head_lr, options=options, objective=objective),
        ]
