"""FastBERT (Liu et al. 2020): fine-tune, then the model teaches its own exits; leave when normalised entropy is low.

What it does: stage 1 fine-tunes the model; stage 2 freezes it and trains every off-ramp to give the last exit's
distribution, which needs no labels: with `--init RUN`, rows without any will do. Off-ramps attend over all tokens at
width 128. At run time a row leaves at the first off-ramp whose entropy, divided by its maximum, is below the threshold
(the paper calls it Speed).
Modifications from the paper and its code: forward KL(teacher ‖ student), as the code computes and the paper does not
print; the teacher runs without dropout; the learning rate falls over stage 2's own steps; pooling over the right axis.
Relations: DeeBERT with heavier heads and distillation for labels; `heads=light` uses the ordinary off-ramps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from offramp.core.attention import AttentionOptions, attend
from offramp.core.columns import PRESENT
from offramp.core.cost import HeadCost
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.methods._base import DepthMethod
from offramp.nn.exit_policies import (
    ExitOptions,
    NormalisedEntropyPolicy,
    ThresholdSettings,
    build_exit_heads_from,
    exit_modules,
)
from offramp.nn.keys import EXIT_HEADS
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.training.objectives import ExitHeadStage, Objective, detached_exits_objective, self_distillation
from offramp.training.stage import Stage

WIDTH, HEADS = 128, 2


@dataclass(frozen=True)
class FastBERTOptions(ExitOptions):
    """Which heads."""

    heads: Literal["attending", "light"] = "attending"


class AttendingExitHead(nn.Module):
    """Narrow, attend over all tokens, pool, answer."""

    def __init__(self, hidden: int, outputs: int, per_token: bool) -> None:
        super().__init__()
        self.narrow, self.mix, self.out = nn.Linear(hidden, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dense, self.project, self.per_token = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs), per_token
        token, row = WIDTH * (hidden + 4 * WIDTH), WIDTH * (WIDTH + outputs)
        cost = (0, token + row) if per_token else (row, token)
        self.cost = HeadCost(*cost, pair=2 * WIDTH)

    def forward(self, packed: Packed) -> Tensor:
        """Logits per row, or per token."""
        x = torch.tanh(self.narrow(packed.states))
        q, k, v = self.mix(x).chunk(3, dim=1)
        there = None if self.per_token else packed.tokens.get(PRESENT)  # of a pair, while tokens fade in training
        bias = None if there is None else there.clamp(min=1e-6).log()
        mixed, _ = attend(q, k, v, packed.layout, AttentionOptions(HEADS, key_bias=bias))
        seen = packed.with_states(self.out(mixed))
        logits: Tensor = self.project(torch.tanh(self.dense(seen.states if self.per_token else seen.mean())))
        return logits


class FastBERT(DepthMethod):
    """Rows exit where normalised entropy is low; exits are distilled from the model."""

    name = "fastbert"
    options = FastBERTOptions
    space = ThresholdSpace("threshold", full_value=0.0, unit="normalised")

    def modules(self, network: Network, options: FastBERTOptions) -> nn.ModuleDict:
        """An off-ramp per layer."""
        if options.heads == "light":
            return exit_modules(network, options)
        hidden, outputs = network.encoder.hidden, network.task.outputs
        heavy = build_exit_heads_from(network, options, lambda: AttendingExitHead(hidden, outputs, network.per_token))
        return nn.ModuleDict({EXIT_HEADS: heavy})

    def policy(self, network: Network, settings: ThresholdSettings) -> Policy:
        return NormalisedEntropyPolicy(network, settings)

    def objective(self, options: FastBERTOptions) -> Objective:
        return detached_exits_objective(self_distillation)

    def stages(self, network: Network, options: FastBERTOptions) -> list[Stage]:
        """Two: fine-tune, then self-distillation."""
        return [
            Stage(network, "fine-tune", options.head_lr, fine_tuning=True),
            ExitHeadStage(
                network, "self-distillation", options.head_lr, needs_labels=False, objective=self_distillation
            ),
        ]
