"""The only place where layers are iterated at run time.

    start: embed ─► on_embeddings ─► should_exit(0)
    step:  before_layer ─► attend ─► after_attention ─► feed ─► should_exit

`run` starts a batch and steps until every row has left. One step is one segment: where the policy does nothing between
layers, an engine runs them together. Between steps a batch may be split, and batches at the same layer may be merged: a
row's answer never depends on its batch. A policy that is a plain rule runs whole on an engine that understands it.

A row that exits takes its logits along and is never computed again. A dropped token's last state is kept for answers
per token. Idle tokens (gate 0) stay visible as keys and values; their states are exact copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from offramp.core.columns import EXIT_LOGITS, EXITED_AT, GATE, ORIGIN, POSITION, Column
from offramp.core.cost import Event
from offramp.core.engine import Engine, ExitHeads
from offramp.core.layout import AttentionScores, layout
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.core.rules import ExitRule, RuleTrace
from offramp.errors import OfframpError

__all__ = ["Engine", "ExitHeads", "Exited", "Result", "State", "merge", "run", "runs_whole", "start", "step"]


class Exited(NamedTuple):
    """A group of rows that left together."""

    rows: Tensor  # [n] their ORIGIN
    tokens: Tensor  # [their tokens] ORIGIN of their tokens; of tasks with answers per row again the rows
    logits: Tensor  # [n, outputs] or [their tokens, outputs]
    layers: Tensor  # [n] float64; the mean over tokens where those left one by one


@dataclass(frozen=True)
class Result:
    """Logits and exit layers of all rows, in the order of the packed batch."""

    logits: Tensor  # [rows, outputs] or [tokens, outputs]
    exit_layer: Tensor  # [rows] float64: whole numbers, or the mean over tokens that left one by one
    trace: Sequence[Event]


@dataclass(eq=False)
class State:
    """A batch on its way through the layers, after `layer`: what a policy sees and what `step` advances."""

    packed: Packed  # rows and tokens still going
    base: Packed  # the batch as it was packed, dropped tokens as they were when they left
    exit_heads: ExitHeads
    depth: int
    layer: int = 0
    has_dropped: bool = False  # tokens were dropped that answers per token still need
    trace: list[Event] = field(default_factory=list)
    exited: list[Exited] = field(default_factory=list)
    _logits: Tensor | None = None  # of the exit after the current layer, counted
    _ready: Tensor | None = None  # the same, computed together with the layer, counted once they are read

    @property
    def done(self) -> bool:
        """Whether every row has left."""
        return self.packed.count == 0

    def logits(self) -> Tensor:
        """Return the logits of the exit after the current layer; computed once a layer and counted."""
        if self._logits is None:
            packed = self.exit_input()
            self._logits = self.exit_heads(self.layer, packed) if self._ready is None else self._ready
            self._count("head", packed)
        return self._logits

    def exit_unit(self) -> Tensor:
        """Return the output of the method's learned unit for each row after the current layer; counted."""  # [rows, …]
        packed = self.exit_input()
        self._count("exit_unit", packed)
        return self.exit_heads.exit_unit(self.layer, packed)

    def predictor(self) -> Tensor:
        """Return the output of the method's predictor before the current layer for each token; counted."""
        self._count("predictor", self.packed)
        return self.exit_heads.predictor(self.layer, self.packed)  # [tokens, …]

    def exit_input(self) -> Packed:
        """Return what an exit reads: the live rows, for answers per token with their dropped tokens put back."""
        return self.with_dropped_tokens() if self.exit_heads.per_token else self.packed

    def with_dropped_tokens(self) -> Packed:
        """Return the live rows with all their original tokens, dropped ones at their last state."""
        if not self.has_dropped:
            return self.packed
        live = torch.zeros(self.base.count, dtype=torch.bool)
        live[self.packed.rows[ORIGIN].cpu()] = True
        return self._restored_base().keep_rows(live)

    def answer_tokens(self, certain: Tensor) -> None:
        """Give tokens their answer now: the exit's logits are kept for them, and they become idle."""  # [tokens] bool
        tokens, logits = self.packed.tokens, self.logits()
        if self.has_dropped:  # logits are for all original tokens of the live rows
            logits = logits[torch.isin(self.with_dropped_tokens().tokens[ORIGIN], tokens[ORIGIN])]
        exited_at = tokens.get(EXITED_AT, torch.full_like(tokens[ORIGIN], -1))
        new = certain & (exited_at < 0)
        kept = torch.where(new[:, None], logits, tokens.get(EXIT_LOGITS, torch.zeros_like(logits)))
        exited_at = torch.where(new, self.layer, exited_at)
        gate = torch.where(exited_at >= 0, 0.0, tokens.get(GATE, torch.ones_like(exited_at, dtype=torch.float32)))
        self.packed = self.packed.with_tokens(exited_at=exited_at, exit_logits=kept, gate=gate)

    def drop(self, keep: Tensor | None) -> None:
        """Drop tokens; for answers per token their last states are kept."""  # [tokens] bool
        if keep is None or bool(keep.all()):
            return
        if self.exit_heads.per_token:
            self.base, self.has_dropped = self._restored_base(), True
        self.packed = self.packed.keep_tokens(keep)
        self._logits = self._ready = None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """While this lasts, what is read is neither counted nor kept: for explanations."""
        trace, logits = list(self.trace), self._logits
        try:
            yield
        finally:
            self.trace[:], self._logits = trace, logits

    def split(self, keep: Tensor) -> tuple[State, State]:
        """Split between steps: rows where `keep` is true, and the other ones. Rows that left stay with the first part.

        Origins are numbered anew in each part, in the same order; results are those of the rows in one batch.
        """  # [live rows] bool
        first = torch.ones(self.base.count, dtype=torch.bool)
        first[self.packed.rows[ORIGIN].cpu()[~keep.cpu()]] = False
        return self._select(keep.cpu(), first), self._select(~keep.cpu(), ~first)

    def live_part(self) -> State:
        """Return the live rows alone, between steps, numbered anew.

        Where tokens were dropped, the rows as they were before come along: methods keep shares of the original lengths.
        """
        packed, origin = self.packed, self.packed.rows[ORIGIN].cpu()
        if self.has_dropped or not torch.equal(packed.lengths, self.base.lengths[origin]):
            return self.split(torch.zeros(packed.count, dtype=torch.bool))[1]
        rows, tokens = (torch.arange(size, device=packed.device) for size in (packed.count, packed.total))
        packed = packed.with_rows(origin=rows).with_tokens(origin=tokens)
        return State(packed, packed, self.exit_heads, self.depth, self.layer)

    def result(self) -> Result:
        """Return logits and exit layers of all rows in the order they were packed; every row must have left."""
        groups, per_token = self.exited, self.exit_heads.per_token
        if not groups:  # a part of a split that answers for no row
            return Result(torch.empty(0), torch.empty(0, dtype=torch.float64), self.trace)
        if len(groups) == 1:  # all rows left together, in order
            return Result(groups[0].logits.float(), groups[0].layers, self.trace)
        rows = torch.cat([group.rows for group in groups])
        layers = torch.cat([group.layers for group in groups])
        owner = torch.cat([group.tokens for group in groups]) if per_token else rows
        logits = torch.cat([group.logits.float() for group in groups])
        return Result(logits[owner.argsort()], layers[rows.cpu().argsort()], self.trace)

    def begin_layer(self, layer: int) -> None:
        """Stand before a layer: logits of the layer below no longer hold."""
        self.layer, self._logits, self._ready = layer, None, None

    def end_segment(self, layer: int, states: Tensor, logits: Tensor | None) -> None:
        """Stand after a layer with new states, and logits if they came with it."""
        self.layer, self._logits, self._ready = layer, None, logits
        self.packed = self.packed.with_states(states)

    def exit_rows(self, leaving: Tensor | None) -> None:
        """Let rows leave with their logits; the others stay."""  # [rows] bool
        if leaving is None or not bool(leaving.any()):
            return
        leaving = leaving.cpu()
        if bool(leaving.all()):
            self._exit_all()
        else:
            self._exit_some(leaving)
        self._logits = self._ready = None

    def _exit_all(self) -> None:
        self.exited.append(_exited(self.exit_input(), self.logits(), self.layer, self.exit_heads.per_token))
        self.packed = Packed(self.packed.states[:0], self.packed.lengths[:0])

    def _exit_some(self, leaving: Tensor) -> None:
        per_token, going = self.exit_heads.per_token, self.packed
        if self._logits is None and self._ready is None:  # no logits yet: computed for the leaving rows only
            self.packed = going.keep_rows(leaving)
            logits, owners = self.logits(), self.exit_input()
            self.exited.append(_exited(owners, logits, self.layer, per_token))
        elif per_token:
            logits, owners = self.logits(), self.exit_input()
            logits = logits[leaving[owners.row_of_token.cpu()].to(logits.device)]
            self.exited.append(_exited(owners.keep_rows(leaving), logits, self.layer, per_token))
        else:  # of whole rows nothing but their numbers is needed any more
            logits, rows = self.logits(), going.rows[ORIGIN]
            rows = rows[leaving.to(rows.device)]
            self.exited.append(_group(rows, rows, logits[leaving.to(logits.device)], self.layer))
        self.packed = going.keep_rows(~leaving)

    def _count(self, kind: Literal["head", "exit_unit", "predictor"], packed: Packed) -> None:
        self.trace.append(Event(kind, self.layer, packed.rows[ORIGIN], packed.lengths, packed.lengths))

    def _restored_base(self) -> Packed:
        """Return the whole batch with the states and columns of the live tokens put back."""
        origin, columns = self.packed.tokens[ORIGIN], dict(self.base.tokens)
        for name, column in self.packed.tokens.items():
            if name not in columns:  # a column that a policy added: tokens dropped before have no value there
                absent = Column.value_of_dropped(name)
                columns[name] = column.new_full((self.base.total, *column.shape[1:]), absent)
            columns[name] = columns[name].index_copy(0, origin, column)
        return self.base.with_states(self.packed.restore(self.base.states)).with_tokens(**columns)

    def _select(self, live: Tensor, owned: Tensor) -> State:
        """Return a state of some live rows [live rows] over the rows of the base that it answers for [base rows]."""
        tokens = owned[self.base.row_of_token.cpu()]
        new_row = (owned.cumsum(0) - 1).to(self.base.device)  # number of each old row, and of each old token
        new_token = (tokens.cumsum(0) - 1).to(self.base.device)

        def renumber(packed: Packed) -> Packed:
            rows, own = new_row[packed.rows[ORIGIN]], new_token[packed.tokens[ORIGIN]]
            return packed.with_rows(origin=rows).with_tokens(origin=own)

        events = []
        for event in self.trace:
            selected = owned[event.rows.cpu()]
            if bool(selected.any()):
                rows = new_row[event.rows[selected.to(event.rows.device)]]
                events.append(event._replace(rows=rows, tokens=event.tokens[selected], keys=event.keys[selected]))
        per_token = self.exit_heads.per_token
        exited = [
            group._replace(rows=new_row[group.rows], tokens=(new_token if per_token else new_row)[group.tokens])
            for group in self.exited
            if bool(owned[group.rows.cpu()].all())
        ]
        packed, base = renumber(self.packed.keep_rows(live)), renumber(self.base.keep_rows(owned))
        return State(packed, base, self.exit_heads, self.depth, self.layer, self.has_dropped, events, exited)


def run(engine: Engine, exit_heads: ExitHeads, policy: Policy, packed: Packed) -> Result:
    """Run a packed batch through the layers, as far as the policy sends each row and token."""
    with engine.running():
        rule = policy.rule()
        if rule is not None and not exit_heads.per_token and engine.runs_rule(rule, exit_heads):
            logits, exit_layer = engine.run_rule(rule, exit_heads, packed)
            return Result(logits.float(), exit_layer.double(), RuleTrace(rule, packed, exit_layer, engine.depth))
        if not policy.acts(engine.depth):
            return _run_whole(engine, exit_heads, packed)
        state = start(engine, exit_heads, policy, packed)
        while not state.done:
            step(engine, policy, state)
        return state.result()


def rule_for_arrays(engine: Engine, exit_heads: ExitHeads, policy: Policy) -> ExitRule | None:
    """Return the policy's rule if the engine runs it on plain arrays of token ids; None: the rows must be packed."""
    if not engine.takes_arrays or exit_heads.per_token:
        return None
    rule = policy.rule()
    return None if rule is None or rule.by_row or not engine.runs_rule(rule, exit_heads) else rule


def runs_whole(engine: Engine, exit_heads: ExitHeads, policy: Policy) -> bool:
    """Return whether `run` is one call of the engine: under a rule that it knows, or through all layers."""
    rule = policy.rule()
    known = rule is not None and not exit_heads.per_token and engine.runs_rule(rule, exit_heads)
    return known or not policy.acts(engine.depth)


def start(engine: Engine, exit_heads: ExitHeads, policy: Policy, packed: Packed) -> State:
    """Embed a batch and let rows leave at exit 0."""
    segment = engine.run_segment(0, 0, exit_heads if policy.needs(0).logits else None, packed)
    assert segment.states is not None, "embeddings do not end the model"
    packed = packed.with_states(segment.states)
    state = State(packed, packed, exit_heads, engine.depth, _ready=segment.logits)
    state.trace.append(Event("embed", 0, packed.rows[ORIGIN], packed.lengths, packed.lengths))
    policy.on_embeddings(state)
    if policy.needs(0).should_exit:
        state.exit_rows(policy.should_exit(0, state))
    return state


def step(engine: Engine, policy: Policy, state: State) -> None:
    """Advance by one segment: the next layer, and those after it as long as the policy does nothing in between."""
    if state.done:
        return
    layer = state.layer + 1
    state.begin_layer(layer)
    needs = policy.needs(layer)
    if needs.before_layer:
        state.drop(policy.before_layer(layer, state))
    if GATE in state.packed.tokens or needs.after_attention:
        scores = _attend(engine, layer, state, needs.scores)
        state.drop(policy.after_attention(layer, state, scores))
        _feed(engine, layer, state)
    else:
        _run_segment(engine, policy, state)
    if state.layer == state.depth:
        state.exit_rows(torch.ones(state.packed.count, dtype=torch.bool))
    elif policy.needs(state.layer).should_exit:
        state.exit_rows(policy.should_exit(state.layer, state))


def merge(states: Sequence[State]) -> State:
    """Merge batches that stand after the same layer, between steps; their rows are numbered one batch after another."""
    first = states[0]
    if any(state.layer != first.layer or state.depth != first.depth for state in states):
        layers = ", ".join(str(state.layer) for state in states)
        fix = "merge batches of one model between steps, when they stand at the same layer"
        raise OfframpError("to merge running batches", f"batches after layers {layers}", fix)
    has_dropped = any(state.has_dropped for state in states)
    live = Packed.concat([state.packed for state in states], [state.base for state in states])
    base = _concat_bases(states, has_dropped)
    trace, exited = [], []
    rows = tokens = 0
    for state in states:
        per_token = state.exit_heads.per_token
        trace += [event._replace(rows=event.rows + rows) for event in state.trace]
        exited += [
            group._replace(rows=group.rows + rows, tokens=group.tokens + (tokens if per_token else rows))
            for group in state.exited
        ]
        rows, tokens = rows + state.base.count, tokens + state.base.total
    return State(live, base, first.exit_heads, first.depth, first.layer, has_dropped, trace, exited)


def _concat_bases(states: Sequence[State], has_dropped: bool) -> Packed:
    """Return the bases of several batches as one; columns that only some of them have are left out.

    Where answers per token need tokens that a batch has dropped, every base first takes over the columns of its live
    tokens: a method's memory is in the base of that batch, and must be in the others.
    """
    bases = [state._restored_base() if has_dropped else state.base for state in states]
    rows, tokens = (set.intersection(*({*getattr(base, kind)} for base in bases)) for kind in ("rows", "tokens"))
    if has_dropped:
        tokens = {name for base in bases for name in base.tokens}
    return Packed.concat([_with_columns(base, rows, tokens) for base in bases])


def _with_columns(packed: Packed, rows: set[str], tokens: set[str]) -> Packed:
    """Return a batch with no other columns than these."""
    own_rows = {name: column for name, column in packed.rows.items() if name in rows}
    own_tokens = {name: column for name, column in packed.tokens.items() if name in tokens}
    return Packed(packed.states, packed.lengths, own_rows, own_tokens)


def _run_whole(engine: Engine, exit_heads: ExitHeads, packed: Packed) -> Result:
    """Run every row through every layer."""
    depth, counts = engine.depth, (packed.rows[ORIGIN], packed.lengths, packed.lengths)
    states, logits = engine.run_segment(0, depth, exit_heads, packed)
    if logits is None:
        assert states is not None, "a segment gives states or logits"
        logits = exit_heads(depth, packed.with_states(states))
    trace = [Event("embed", 0, *counts), Event("head", depth, *counts)]
    for layer in range(1, depth + 1):
        trace += [Event("attend", layer, *counts), Event("feed", layer, *counts)]
    return Result(logits.float(), torch.full((packed.count,), float(depth), dtype=torch.float64), trace)


def _run_segment(engine: Engine, policy: Policy, state: State) -> None:
    """Run this layer, and those after it as long as the policy does nothing in between."""
    packed, first, last = state.packed, state.layer, state.layer
    while last < state.depth and not policy.needs(last).should_exit:
        following = policy.needs(last + 1)
        if following.before_layer or following.after_attention:
            break
        last += 1
    reads_logits = not state.has_dropped and (last == state.depth or policy.needs(last).logits)
    states, logits = engine.run_segment(first, last, state.exit_heads if reads_logits else None, packed)
    state.end_segment(last, packed.states if states is None else states, logits)
    for layer in range(first, last + 1):
        counts = (layer, packed.rows[ORIGIN], packed.lengths, packed.lengths)
        state.trace += (Event("attend", *counts), Event("feed", *counts))


def _attend(engine: Engine, layer: int, state: State, wants_scores: bool) -> AttentionScores | None:
    """Run attention of a layer for the tokens whose gate is open."""
    packed, gate = state.packed, state.packed.tokens.get(GATE)
    if gate is None or bool((gate > 0).all()):
        states, scores = engine.attend(layer, packed.states, packed.states, packed.layout, wants_scores)
        states = states if gate is None else _gated(packed.states, states, gate)
        counts = packed.lengths
    elif not bool((gate > 0).any()):
        counts, states = torch.zeros_like(packed.lengths), packed.states
        zeros = torch.zeros(packed.total, device=packed.device)
        scores = AttentionScores(zeros, zeros.clone()) if wants_scores else None
    else:
        live = gate > 0
        counts = torch.bincount(packed.row_of_token[live], minlength=packed.count).cpu()
        position = packed.tokens[POSITION]
        where = layout(packed.lengths, position, counts, position[live])
        index = live.nonzero().squeeze(1)
        before = packed.states.index_select(0, index)
        after, scores = engine.attend(layer, before, packed.states, where, wants_scores)
        states = packed.states.index_copy(0, index, _gated(before, after, gate.index_select(0, index)))
    state.packed = packed.with_states(states)
    state.trace.append(Event("attend", layer, packed.rows[ORIGIN], counts, packed.lengths))
    return scores


def _feed(engine: Engine, layer: int, state: State) -> None:
    """Run the feed-forward half of a layer for the tokens whose gate is open."""
    packed, gate = state.packed, state.packed.tokens.get(GATE)
    if gate is None or bool((gate > 0).all()):
        states = engine.feed(layer, packed.states)
        state.packed = packed.with_states(states if gate is None else _gated(packed.states, states, gate))
        counts = packed.lengths
    else:
        live = gate > 0
        counts = torch.bincount(packed.row_of_token[live], minlength=packed.count).cpu()
        index = live.nonzero().squeeze(1)
        before = packed.states.index_select(0, index)
        after = _gated(before, engine.feed(layer, before), gate.index_select(0, index))
        state.packed = packed.with_states(packed.states.index_copy(0, index, after))
    state.trace.append(Event("feed", layer, packed.rows[ORIGIN], counts, packed.lengths))


def _gated(before: Tensor, after: Tensor, gate: Tensor) -> Tensor:
    """Return `before + gate · (after − before)`, exactly `after` where the gate is 1."""
    if bool((gate == 1).all()):
        return after.to(before.dtype)
    g = gate.to(before.dtype).unsqueeze(1)
    return torch.where(g == 1, after.to(before.dtype), before + g * (after - before))


def _exited(owners: Packed, logits: Tensor, layer: int, per_token: bool) -> Exited:
    """Return rows that leave with their logits; tokens that were answered earlier keep those logits and layers."""
    rows = owners.rows[ORIGIN]
    if not per_token:
        return _group(rows, rows, logits, layer)
    group, exited_at = _group(rows, owners.tokens[ORIGIN], logits, layer), owners.tokens.get(EXITED_AT)
    if exited_at is None:
        return group
    logits = torch.where((exited_at >= 0)[:, None], owners.tokens[EXIT_LOGITS].to(logits.dtype), logits)
    each = torch.where(exited_at >= 0, exited_at, layer).double()
    total = torch.zeros(owners.count, dtype=torch.float64).index_add(0, owners.row_of_token.cpu(), each.cpu())
    return group._replace(logits=logits, layers=total / owners.lengths)


def _group(rows: Tensor, tokens: Tensor, logits: Tensor, layer: int) -> Exited:
    return Exited(rows, tokens, logits, torch.full((len(rows),), float(layer), dtype=torch.float64))
