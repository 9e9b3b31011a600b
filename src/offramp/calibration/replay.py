"""What every exit would say, recorded in one pass and replayed for any setting.

A replay runs the same loop and the same policy over the recorded answers with an engine that computes nothing, so
answers, exits and costs are exactly those a real run would have, at a fraction of its time. It holds for methods whose
settings never change later states (`replay` in their space). Tokens may have been dropped while it was recorded: a
replay drops the same ones at the same moments, so exits can be tried under one length setting after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from offramp import engines
from offramp.core.attention import Layout, Scores
from offramp.core.columns import DROPPED_AT, ORIGIN
from offramp.core.cost import Event
from offramp.core.loop import Engine, State, run
from offramp.core.packed import Packed
from offramp.core.policy import PairPolicy, Policy, PolicyWrapper
from offramp.inference.batching import RunOutput, run_encoded, run_packed
from offramp.nn.batches import Data, pack_rows
from offramp.nn.network import Network


@dataclass(frozen=True)
class ExitRecording:
    """What every exit says about every row, in the order of the encoded rows."""

    logits: dict[int, Tensor]  # layer → [rows, outputs] or [tokens, outputs]
    exit_unit: dict[int, Tensor]  # layer → [rows] or [rows, layers], where a method has a learned unit
    packed: Packed  # all rows together, no states; the token column `gone` says when each was dropped
    extras: frozenset[int] = frozenset()  # moments at which the method computed something besides

    def keep(self, rows: Tensor, per_token: bool) -> ExitRecording:
        """The recording of some rows, as if the others had never been there."""
        packed = self.packed.keep_rows(rows)
        index = (rows[self.packed.row_of_token] if per_token else rows).nonzero().squeeze(1)
        numbered = packed.with_rows(origin=torch.arange(packed.count)).with_tokens(origin=torch.arange(packed.total))
        logits = {layer: said[index] for layer, said in self.logits.items()}
        exit_unit = {layer: said[rows] for layer, said in self.exit_unit.items()}
        return replace(self, logits=logits, exit_unit=exit_unit, packed=numbered)


def _moment(layer: int, attended: bool) -> int:
    """When tokens may be dropped, in the order of time: before attention or after it."""
    return 2 * layer + int(attended)


NEVER = _moment(1 << 20, False)


@dataclass
class _Recorder(PolicyWrapper):
    """Notes what each off-ramp (and the learned unit) says while `inner` runs, and whom that drops when."""

    network: Network
    inner: Policy
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    exit_unit: dict[int, list[Tensor]] = field(default_factory=dict)
    gone: list[Tensor] = field(default_factory=list)  # of each batch
    extras: set[int] = field(default_factory=set)

    def on_embeddings(self, s: State) -> None:
        self.gone.append(torch.full((s.packed.total,), NEVER))
        self.inner.on_embeddings(s)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        return self._noted(_moment(layer, False), s, lambda: self.inner.before_layer(layer, s))

    def after_attention(self, layer: int, s: State, scores: Scores | None) -> Tensor | None:
        return self._noted(_moment(layer, True), s, lambda: self.inner.after_attention(layer, s, scores))

    def _noted(self, moment: int, s: State, decide: Callable[[], Tensor | None]) -> Tensor | None:
        before = len(s.trace)
        keep = decide()
        self.extras |= {moment for event in s.trace[before:] if event.kind == "predictor"}
        if keep is not None:
            self.gone[-1][s.packed.tokens[ORIGIN][~keep].cpu()] = moment
        return keep

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        done = self.inner.should_exit(
            layer, s
        )  # at its loosest a method lets nobody go, or (a truncated model) everybody
        if layer in self.network.exit_heads:
            self.logits.setdefault(layer, []).append(s.logits().float().cpu())
            if "exit_unit" in self.network.added:
                self.exit_unit.setdefault(layer, []).append(s.exit_unit().float().cpu())
        return done


def record_exits(
    network: Network, data: Data, batch_size: int = 32, engine: Engine | None = None, policy: Policy | None = None
) -> ExitRecording:
    """One pass over the rows, every exit evaluated, under a `policy`: a method's at its loosest, or one that drops."""
    engine = engine or engines.make("torch", network.encoder)
    order = sorted(range(len(data.encoded)), key=lambda i: len(data.encoded[i].ids))
    ordered, recorder = [data.encoded[i] for i in order], _Recorder(network, policy or Policy())
    outcome = run_encoded(network, engine, recorder, ordered, batch_size)
    recorder.logits[network.depth] = [torch.from_numpy(np.atleast_2d(part)) for part in outcome.logits]
    back = torch.tensor(np.argsort(order))
    sizes = [len(e.ids) for e in ordered] if network.per_token else [1] * len(ordered)

    def in_order(parts: list[Tensor], pieces: list[int]) -> Tensor:
        split = torch.cat(parts).split(pieces)
        return torch.cat([split[i] for i in back])

    logits = {layer: in_order(parts, sizes) for layer, parts in recorder.logits.items()}
    exit_unit = {layer: in_order(parts, [1] * len(ordered)) for layer, parts in recorder.exit_unit.items()}
    gone = in_order(recorder.gone, [len(e.ids) for e in ordered])
    packed = pack_rows(network.task, data.encoded).with_tokens(dropped_at=gone)
    return ExitRecording(logits, exit_unit, packed, frozenset(recorder.extras))


@dataclass(frozen=True)
class _Dropping(Policy):
    """Drops whom the recording saw dropped, when it did."""

    extras: frozenset[int]

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        return self._keep(_moment(layer, False), layer, s)

    def after_attention(self, layer: int, s: State, scores: Scores | None) -> Tensor | None:
        return self._keep(_moment(layer, True), layer, s)

    def _keep(self, moment: int, layer: int, s: State) -> Tensor | None:
        if moment in self.extras:
            s.trace.append(Event("predictor", layer, s.packed.rows[ORIGIN], s.packed.lengths, s.packed.lengths))
        gone = s.packed.tokens.get(DROPPED_AT)
        return None if gone is None else gone > moment


@dataclass(frozen=True)
class _Idle(Engine):
    """An engine that computes nothing: states are a column of zeros."""

    layers: int

    @property
    def depth(self) -> int:
        return self.layers

    def embed(self, packed: Packed) -> Tensor:
        return torch.zeros(packed.total, 1)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, where: Layout, scores: bool
    ) -> tuple[Tensor, Scores | None]:
        return queries, None

    def feed(self, layer: int, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class ReplayedExitHeads:
    """Heads that answer from the recording."""

    recording: ExitRecording
    per_token: bool

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        index = packed.tokens[ORIGIN] if self.per_token else packed.rows[ORIGIN]
        return self.recording.logits[layer][index]

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """What the learned unit said."""
        return self.recording.exit_unit[layer][packed.rows[ORIGIN]]

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """Methods with token predictors change later states: nothing of theirs is replayed."""
        raise NotImplementedError


def replay(network: Network, recording: ExitRecording, policy: Policy) -> RunOutput:
    """What a real run of this policy would answer, leave at and cost."""
    heads, dropping = ReplayedExitHeads(recording, network.per_token), _Dropping(recording.extras)
    return run_packed(network, _Idle(network.depth), PairPolicy(dropping, policy), recording.packed, heads)


def trace_all_exits(network: Network, recording: ExitRecording) -> list[Event]:
    """Everything the loop would do if every exit answered every row and nobody left."""
    asking = PairPolicy(_Dropping(recording.extras), _Recorder(network, Policy()))
    return run(_Idle(network.depth), ReplayedExitHeads(recording, network.per_token), asking, recording.packed).trace


def replay_trace(network: Network, recording: ExitRecording, policy: Policy) -> list[Event]:
    """What the loop would do under this policy, event by event."""
    with torch.inference_mode():
        return run(
            _Idle(network.depth), ReplayedExitHeads(recording, network.per_token), policy, recording.packed
        ).trace


def replayed_state(network: Network, recording: ExitRecording, layer: int) -> State:
    """All rows as a policy would see them after a layer, answering from the recording."""
    heads = ReplayedExitHeads(recording, network.per_token)
    return State(recording.packed, recording.packed, heads, network.depth, layer)
