"""Length-Adaptive Transformer (Kim and Cho 2021): train once with dropped tokens, then any budget by search.

What it does: between attention and feed-forward each layer keeps the tokens that received the most attention. Training
takes a fine-tuned model and updates, in every step, the full model on the labels and shorter ones on what the full one
says (in-place distillation): the shortest possible and `sandwiches` random ones (LengthDrop: each layer keeps between
1 − drop and all of what it got), layers being skipped at random (LayerDrop). Where answers are per token, dropped
tokens come back at the end with their last state (drop-and-restore). `offramp search` finds lengths for a budget.
Modifications from the paper and its code: lengths are shares of a row's real length (drawn from the padded maximum,
early drops eat padding only); each row keeps its own tokens; kept tokens stay in order; tokens rank by attention before
dropout; KL(full ‖ short) unless `kl=reverse`, which the code computes; a dropped token's last state includes the
attention half of its last layer; the best epoch is chosen in the middle of the range, not at full length; vocabulary
tasks teach short models by labels.
Extension, off by default: `cliffs=0.5` makes half of the random lengths cliffs, which keep every token through the
first layers and next to none beyond: what searches find best where later layers read what earlier ones gathered.
Relations: PoWER-BERT with the same scores (its own diagonal left in) and one training for all budgets instead of one
for each; takes an exit method's objective (`length_adaptive+branchynet`), so that rows leave early too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods._base import LengthMethod
from offramp.methods._shared.lengths import LengthPolicy, LengthSettings, Trained, cliffs, constant
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
    """How it is trained."""

    drop: float = 0.2  # the most that a layer drops of what it got
    layer_drop: float = 0.2  # how often a layer is skipped
    sandwiches: int = 2  # random lengths in each step
    cliffs: float = 0.0  # how often a random length is a cliff: all tokens up to a layer, next to none after it
    kl: Literal["forward", "reverse"] = "forward"
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        fine = 0.0 < self.drop < 1.0 and 0.0 <= self.layer_drop < 1.0 and self.sandwiches >= 0
        if not fine:
            given = f"drop={self.drop}, layer_drop={self.layer_drop}, sandwiches={self.sandwiches}"
            fix = "use e.g. drop=0.2, layer_drop=0.2, sandwiches=2"
            raise OfframpError("shares above 0 (of layers: 0 or more) and below 1, and a number", given, fix)
        if not 0.0 <= self.cliffs <= 1.0:
            raise OfframpError("how often a random length is a cliff", f"cliffs={self.cliffs}", "use 0 to 1, e.g. 0.5")


@dataclass
class LengthDrop(Stage):
    """The sandwich rule: full, shortest and some in between, one update."""

    options: LengthAdaptiveOptions = field(kw_only=True)
    objective: Objective | None = None

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def policy(self) -> Policy:
        """Epochs are compared in the middle of what is trained."""
        return LengthPolicy(self.network, LengthSettings(constant(self.network.depth, self.options.drop / 2)))

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        share, net = 1.0 / (self.options.sandwiches + 2), self.network
        out = self._skipped()
        made = forward_all_layers(net.encoder, batch.packed, ForwardHooks(skip=lambda layer: layer in out))
        loss = (self.objective or last_exit_loss)(net, made, batch) * share
        with torch.no_grad():
            taught = None if net.task.outputs == 0 else net(net.depth, made.after(net.depth))
        total = loss.detach()
        backward(loss)
        del made, loss  # each pass is freed before the next begins
        for number in range(self.options.sandwiches + 1):
            loss = self._short(batch, taught, smallest=number == 0) * share
            total = total + loss.detach()
            backward(loss)
        return {"loss": total}

    def _short(self, batch: Batch, taught: Tensor | None, smallest: bool) -> Tensor:
        net, out = self.network, self._skipped()
        lengths = self._lengths(out, smallest)
        made = forward_with_dropping(net, batch.packed, LengthPolicy(net, LengthSettings(lengths)), out)
        loss = self._distil(made, taught, batch)
        return loss if self.objective is None else loss + self.objective(net, made, batch)

    def _distil(self, made: LayerStates, taught: Tensor | None, batch: Batch) -> Tensor:
        net, last = self.network, made.after(self.network.depth)
        if taught is None:  # a vocabulary at every token
            return exit_loss(net, net.depth, last, batch)
        said = net(net.depth, last)
        if self.options.kl == "reverse":
            return distillation_loss(net, taught, said, batch.packed)
        return distillation_loss(net, said, taught, batch.packed)

    def _skipped(self) -> frozenset[int]:
        out = (torch.rand(self.network.depth) < self.options.layer_drop).tolist()
        return frozenset(layer for layer, skip in enumerate(out, start=1) if skip)

    def _lengths(self, out: frozenset[int], smallest: bool) -> tuple[float, ...]:
        """The share kept after each layer; a skipped layer drops nothing."""
        steep = [] if smallest else self._cliffs(out)
        if steep:
            return steep[int(torch.randint(len(steep), ()))]
        drops = torch.ones(self.network.depth) if smallest else torch.rand(self.network.depth)
        kept = [1.0 if layer in out else 1.0 - self.options.drop * part for layer, part in enumerate(drops.tolist(), 1)]
        return tuple(torch.tensor(kept, dtype=torch.float64).cumprod(0).tolist())

    def _cliffs(self, out: frozenset[int]) -> list[tuple[float, ...]]:
        """Now and then, cliffs whose edge is not in a skipped layer, which would leave all tokens where they are."""
        if self.options.cliffs == 0.0 or float(torch.rand(())) >= self.options.cliffs:
            return []
        known = cliffs(constant(self.network.depth, self.options.drop))
        return [lengths for lengths in known if lengths.count(1.0) + 1 not in out]


class LengthAdaptive(LengthMethod):
    """Each layer keeps a chosen share of tokens, those that received the most attention."""

    name = "length_adaptive"
    settings = LengthSettings
    options = LengthAdaptiveOptions
    space = LengthSpace("lengths")

    def modules(self, network: Network, options: LengthAdaptiveOptions) -> nn.ModuleDict:
        """No weights: only the shortest lengths it is trained for."""
        return nn.ModuleDict({"lengths": Trained(constant(network.depth, options.drop))})

    def policy(self, network: Network, settings: LengthSettings) -> Policy:
        return LengthPolicy(network, settings)

    def stages(
        self, network: Network, options: LengthAdaptiveOptions, objective: Objective | None = None
    ) -> list[Stage]:
        """Two: fine-tune (which `--init` replaces), then length drop, by an exit method's objective if there is one."""
        return [
            Stage(network, "fine-tune", options.head_lr, fine_tuning=True),
            LengthDrop(network, "length drop", options.head_lr, options=options, objective=objective),
        ]
