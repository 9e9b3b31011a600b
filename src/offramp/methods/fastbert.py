"""FastBERT (Liu et al. 2020): fine-tune, then distil the model into its exits; exit where normalised entropy is low.

What it does: stage 1 fine-tunes the model; stage 2 freezes it and trains every exit head to give the last exit's
distribution, which needs no labels (with `--init RUN`, unlabelled rows suffice). Exit heads attend over all tokens at
width 128. At run time a row exits at the first exit whose entropy, divided by its maximum, is below the threshold
(which the paper calls Speed).

Modifications (ours, not the paper's or its code's): forward KL(teacher ‖ student), which the code computes but the
paper does not print; the teacher runs without dropout; the learning rate falls over the steps of stage 2 alone; pooling
over the right axis; an exit 0 on the embeddings, whose head also reads a bag of words (`bag_of_words`): where single
words tell the answer, the cheapest settings use it. `exit0=false`, or `offramp calibrate --close-exit 0`, is without
it.

Relations: DeeBERT with larger heads and with distillation instead of labels; `heads=light` uses the ordinary exit
heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from offramp.core.attention import AttentionOptions, attend
from offramp.core.columns import PRESENT
from offramp.core.cost import HeadCost
from offramp.core.head_spec import AttentionStep, HeadSpec, LinearStep
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
    """Which exit heads are built."""

    heads: Literal["attending", "light"] = "attending"


class AttendingExitHead(nn.Module):
    """Exit head that narrows states, attends over all tokens, pools and classifies."""

    def __init__(self, hidden: int, outputs: int, per_token: bool) -> None:
        super().__init__()
        self.narrow, self.mix, self.out = nn.Linear(hidden, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dense, self.project, self.per_token = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs), per_token
        token, row = WIDTH * (hidden + 4 * WIDTH), WIDTH * (WIDTH + outputs)
        cost = (0, token + row) if per_token else (row, token)
        self.cost = HeadCost(*cost, pair=2 * WIDTH)

    def spec(self) -> HeadSpec | None:
        """Return the head as plain data; None where it answers per token."""
        if self.per_token:
            return None
        attending = (LinearStep(self.narrow, "tanh"), LinearStep(self.mix), AttentionStep(HEADS), LinearStep(self.out))
        return HeadSpec(("mean",), (LinearStep(self.dense, "tanh"), LinearStep(self.project)), attending)

    def forward(self, packed: Packed) -> Tensor:
        """Return logits per row, or per token."""
        x = torch.tanh(self.narrow(packed.states))
        q, k, v = self.mix(x).chunk(3, dim=1)
        # in a pair with a length method, tokens are partly present while it trains
        present = None if self.per_token else packed.tokens.get(PRESENT)
        bias = None if present is None else present.clamp(min=1e-6).log()
        mixed, _ = attend(q, k, v, packed.layout, AttentionOptions(HEADS, key_bias=bias))
        output = packed.with_states(self.out(mixed))
        logits: Tensor = self.project(torch.tanh(self.dense(output.states if self.per_token else output.mean())))
        return logits


class FastBERT(DepthMethod):
    """Rows exit where normalised entropy is low; exits are distilled from the model."""

    name = "fastbert"
    options = FastBERTOptions
    space = ThresholdSpace("threshold", full_value=0.0, unit="normalised")

    def modules(self, network: Network, options: FastBERTOptions) -> nn.ModuleDict:
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
        """Return fine-tuning and self-distillation."""
        return [
            Stage(network, "fine-tune", options.head_lr, fine_tuning=True),
            ExitHeadStage(
                network, "self-distillation", options.head_lr, needs_labels=False, objective=self_distillation
            ),
        ]
