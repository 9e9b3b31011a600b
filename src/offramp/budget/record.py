"""What every exit would say, recorded in one pass and replayed for any setting.

A replay runs the same loop and the same policy over the recorded answers with an engine that computes nothing, so
answers, exits and costs are exactly those a real run would have, at a fraction of its time. It holds for methods whose
settings never change later states (`replay` in their space).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from offramp import engines
from offramp.core.attention import Layout, Scores
from offramp.core.cost import Event
from offramp.core.loop import Engine, State, run
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.model.runner import Outcome, run_encoded, run_packed
from offramp.parts.batch import Data, packed_rows
from offramp.parts.network import Network


@dataclass(frozen=True)
class Recording:
    """What every exit says about every row, in the order of the encoded rows."""

    logits: dict[int, Tensor]  # layer → [rows, outputs] or [tokens, outputs]
    unsure: dict[int, Tensor]  # layer → [rows], where a method has a learned unit
    packed: Packed  # all rows together, no states


@dataclass
class _Recorder(Policy):
    """Lets nobody leave and notes what each off-ramp (and the learned unit) says."""

    network: Network
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    unsure: dict[int, list[Tensor]] = field(default_factory=dict)

    def leave(self, layer: int, s: State) -> Tensor | None:
        if layer in self.network.ramps:
            self.logits.setdefault(layer, []).append(s.logits().float().cpu())
            if "doubt" in self.network.added:
                self.unsure.setdefault(layer, []).append(s.unsure().float().cpu())
        return None


def record(network: Network, data: Data, batch_size: int = 32, engine: Engine | None = None) -> Recording:
    """One full pass over the rows, every exit evaluated."""
    engine = engine or engines.make("torch", network.encoder)
    order = sorted(range(len(data.encoded)), key=lambda i: len(data.encoded[i].ids))
    ordered, recorder = [data.encoded[i] for i in order], _Recorder(network)
    outcome = run_encoded(network, engine, recorder, ordered, batch_size)
    recorder.logits[network.depth] = [torch.from_numpy(np.atleast_2d(part)) for part in outcome.logits]
    back = torch.tensor(np.argsort(order))
    sizes = [len(e.ids) for e in ordered] if network.per_token else [1] * len(ordered)

    def in_order(parts: list[Tensor], pieces: list[int]) -> Tensor:
        split = torch.cat(parts).split(pieces)
        return torch.cat([split[i] for i in back])

    logits = {layer: in_order(parts, sizes) for layer, parts in recorder.logits.items()}
    unsure = {layer: in_order(parts, [1] * len(ordered)) for layer, parts in recorder.unsure.items()}
    return Recording(logits, unsure, packed_rows(network.task, data.encoded))


@dataclass(frozen=True)
class _Idle(Engine):
    """An engine that computes nothing: states have no width."""

    layers: int

    @property
    def depth(self) -> int:
        return self.layers

    def embed(self, packed: Packed) -> Tensor:
        return torch.zeros(packed.total, 0)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, Scores | None]:
        return queries, None

    def feed(self, layer: int, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Recorded:
    """Heads that answer from the recording."""

    recording: Recording
    per_token: bool

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        index = packed.tokens["origin"] if self.per_token else packed.rows["origin"]
        return self.recording.logits[layer][index]

    def unsure(self, layer: int, packed: Packed) -> Tensor:
        """What the learned unit said."""
        return self.recording.unsure[layer][packed.rows["origin"]]

    def predict(self, layer: int, packed: Packed) -> Tensor:
        """Methods with token predictors change later states: nothing of theirs is replayed."""
        raise NotImplementedError


def replay(network: Network, recording: Recording, policy: Policy) -> Outcome:
    """What a real run of this policy would answer, leave at and cost."""
    heads = Recorded(recording, network.per_token)
    return run_packed(network, _Idle(network.depth), policy, recording.packed, heads)


def relive(network: Network, recording: Recording, policy: Policy) -> list[Event]:
    """What the loop would do under this policy, event by event."""
    with torch.inference_mode():
        return run(_Idle(network.depth), Recorded(recording, network.per_token), policy, recording.packed).log


def state_at(network: Network, recording: Recording, layer: int) -> State:
    """All rows as a policy would see them after a layer, answering from the recording."""
    heads = Recorded(recording, network.per_token)
    return State(recording.packed, recording.packed, heads, network.depth, layer)
