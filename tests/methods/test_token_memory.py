"""Values that policies keep for all tokens, dropped ones included."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp.core.loop import State
from offramp.core.packed import pack
from offramp.core.policy import PairPolicy, Policy
from offramp.methods._shared.token_memory import remember
from tests.factories import ExitAt, KeepFirst, exit_network, run_policy, token_ids


def test_remember_keeps_values_of_dropped_tokens_and_the_default_of_rows_that_have_left() -> None:
    found: dict[str, Tensor] = {}

    class Remember(Policy):
        def should_exit(self, layer: int, s: State) -> Tensor | None:
            if layer == 2:
                every = torch.arange(s.with_dropped_tokens().total) / 16
                remember(s, "present", every)
                found.update(live=s.with_dropped_tokens().tokens["present"], base=s.base.tokens["present"])
            return None

    packed = pack(token_ids([3, 5, 2]))
    policy = PairPolicy(PairPolicy(ExitAt({1: [0]}), KeepFirst({2: 2}, "before_layer")), Remember())
    run_policy(exit_network("tagging"), policy, packed)
    assert found["live"].tolist() == [place / 16 for place in range(7)]
    assert found["base"].tolist() == [1.0] * 3 + found["live"].tolist()
