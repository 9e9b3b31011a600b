"""The only place where layers are iterated at run time.

    embed ─► begin ─► leave(0) ─► [ enter ─► attend ─► attended ─► feed ─► leave ] × L ─► final head

Where nobody looks in between, an engine runs both halves, several layers, or everything at once.

A row that leaves takes its answer along and is never computed again. A dropped token's last state is remembered for
token-level answers. Idle tokens (gate 0) stay visible as keys and values; their states are exact copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offramp.core.answers import Answer, Result, answer, gather
from offramp.core.attention import Scores, layout
from offramp.core.cost import Event
from offramp.core.engine import Engine, ExitHeads
from offramp.core.packed import Packed
from offramp.core.policy import Policy

__all__ = ["Engine", "ExitHeads", "Result", "State", "run"]


@dataclass
class State:
    """What a policy sees: the live rows, and their logits on request."""

    packed: Packed  # rows and tokens still going
    base: Packed  # the whole batch, dropped tokens as they were when they left
    heads: ExitHeads
    depth: int
    layer: int = 0
    shortened: bool = False  # tokens were dropped that answers still need
    trace: list[Event] = field(default_factory=list)
    _logits: Tensor | None = None
    _ready: Tensor | None = None  # logits that came with the layer; counted when asked for

    def logits(self) -> Tensor:
        """What the off-ramp after the current layer says; computed once a layer and counted."""
        if self._logits is None:
            whole = self.whole() if self.heads.per_token else self.packed
            self._logits = self.heads(self.layer, whole) if self._ready is None else self._ready
            self.trace.append(Event("head", self.layer, whole.rows["origin"], whole.lengths, whole.lengths))
        return self._logits

    def exit_unit(self) -> Tensor:
        """What the method's learned unit says of each row after the current layer; counted."""  # [rows, …]
        packed = self.whole() if self.heads.per_token else self.packed
        self.trace.append(Event("exit_unit", self.layer, packed.rows["origin"], packed.lengths, packed.lengths))
        return self.heads.exit_unit(self.layer, packed)

    def predictor(self) -> Tensor:
        """What the method's own predictor before the current layer says of each token; counted."""  # [tokens, …]
        packed = self.packed
        self.trace.append(Event("predictor", self.layer, packed.rows["origin"], packed.lengths, packed.lengths))
        return self.heads.predictor(self.layer, packed)

    def settle(self, done: Tensor) -> None:
        """Tokens whose answer stands from now on: what the exit says is kept, and they go idle."""
        tokens, logits = self.packed.tokens, self.logits()
        if self.shortened:  # logits are for all original tokens of the live rows
            logits = logits[torch.isin(self.whole().tokens["origin"], tokens["origin"])]
        left = tokens.get("left", torch.full_like(tokens["origin"], -1))
        fresh = done & (left < 0)
        answer = torch.where(fresh[:, None], logits, tokens.get("answer", torch.zeros_like(logits)))
        left = torch.where(fresh, self.layer, left)
        gate = torch.where(left >= 0, 0.0, tokens.get("gate", torch.ones_like(left, dtype=torch.float32)))
        self.packed = self.packed.with_tokens(left=left, answer=answer, gate=gate)

    def whole(self) -> Packed:
        """The live rows with all their original tokens, dropped ones at their last state."""
        if not self.shortened:
            return self.packed
        live = torch.zeros(self.base.count, dtype=torch.bool)
        live[self.packed.rows["origin"].cpu()] = True
        return self._put_back().keep_rows(live)

    def _put_back(self) -> Packed:
        """The whole batch with what the live tokens have become, their columns included."""
        origin, columns = self.packed.tokens["origin"], dict(self.base.tokens)
        for name, column in self.packed.tokens.items():
            if name not in columns:  # a column a policy added: tokens dropped before have no value there
                columns[name] = column.new_full((self.base.total, *column.shape[1:]), -1)
            columns[name] = columns[name].index_copy(0, origin, column)
        return self.base.with_states(self.packed.restore(self.base.states)).with_tokens(**columns)

    def drop(self, keep: Tensor | None) -> None:
        """Tokens leave, remembered for restoring where answers are per token."""
        if keep is None or bool(keep.all()):
            return
        if self.heads.per_token:
            self.base, self.shortened = self._put_back(), True
        self.packed = self.packed.keep_tokens(keep)
        self._logits = self._ready = None


def run(engine: Engine, heads: ExitHeads, policy: Policy, packed: Packed) -> Result:
    """A packed batch through the layers, as far as the policy sends each row and token."""
    with engine.room():
        return _run(engine, heads, policy, packed)


def _run(engine: Engine, heads: ExitHeads, policy: Policy, packed: Packed) -> Result:
    if not policy.wants_anything(engine.depth):
        return _straight(engine, heads, packed)
    asked = policy.wants_logits(0)
    states, ready = engine.opened(heads, packed) if asked else (engine.embed(packed), None)
    packed = packed.with_states(states)
    s = State(packed, packed, heads, engine.depth, _ready=ready)
    s.trace.append(Event("embed", 0, packed.rows["origin"], packed.lengths, packed.lengths))
    answers: list[Answer] = []
    policy.on_embeddings(s)
    _leave(policy.should_exit(0, s), s, answers)
    while s.layer < s.depth and s.packed.count > 0:
        s.layer, s._logits, s._ready = s.layer + 1, None, None
        s.drop(policy.before_layer(s.layer, s))
        if "gate" in s.packed.tokens or policy.wants_attended(s.layer):
            scores = _attend(engine, s.layer, s, policy.wants_scores(s.layer))
            s.drop(policy.after_attention(s.layer, s, scores))
            _feed(engine, s.layer, s)
        else:
            _whole(engine, policy, s)
        last = s.layer == s.depth
        _leave(torch.ones(s.packed.count, dtype=torch.bool) if last else policy.should_exit(s.layer, s), s, answers)
    return gather(answers, heads.per_token, s.trace)


def _straight(engine: Engine, heads: ExitHeads, packed: Packed) -> Result:
    """Everybody through everything."""
    depth, done = engine.depth, (packed.rows["origin"], packed.lengths, packed.lengths)
    logits = engine.straight(heads, packed)
    trace = [Event("embed", 0, *done), Event("head", depth, *done)]
    trace += [Event(what, layer, *done) for layer in range(1, depth + 1) for what in ("attend", "feed")]
    return Result(logits.float(), torch.full((packed.count,), float(depth), dtype=torch.float64), trace)


def _whole(engine: Engine, policy: Policy, s: State) -> None:
    """This layer, and those after it as long as the policy does nothing in between."""
    packed, first = s.packed, s.layer
    while s.layer < s.depth and not (policy.wants_leave(s.layer) or policy.wants_enter(s.layer + 1)):
        if policy.wants_attended(s.layer + 1):
            break
        s.layer += 1
    layers = range(first, s.layer + 1)
    if not s.shortened and (s.layer == s.depth or policy.wants_logits(s.layer)):
        below = packed.with_states(engine.whole(layers[:-1], packed.states, packed.layout)) if layers[:-1] else packed
        states, s._ready = engine.answered(s.layer, s.heads, below)
    else:
        states = engine.whole(layers, packed.states, packed.layout)
    s.packed = packed.with_states(states)
    for layer in layers:
        done = (layer, packed.rows["origin"], packed.lengths, packed.lengths)
        s.trace += (Event("attend", *done), Event("feed", *done))


def _attend(engine: Engine, layer: int, s: State, wants: bool) -> Scores | None:
    packed, gate = s.packed, s.packed.tokens.get("gate")
    if gate is None or bool((gate > 0).all()):
        states, scores = engine.attend(layer, packed.states, packed.states, packed.layout, wants)
        states = states if gate is None else _scaled(packed.states, states, gate)
        counts = packed.lengths
    elif not bool((gate > 0).any()):
        counts, states, nothing = torch.zeros_like(packed.lengths), packed.states, torch.zeros(packed.total)
        scores = Scores(nothing.to(packed.device), nothing.to(packed.device)) if wants else None
    else:
        live = gate > 0
        counts = torch.bincount(packed.row_of_token[live], minlength=packed.count).cpu()
        position = packed.tokens["position"]
        where = layout(packed.lengths, position, counts, position[live])
        index = live.nonzero().squeeze(1)
        before = packed.states.index_select(0, index)
        after, scores = engine.attend(layer, before, packed.states, where, wants)
        states = packed.states.index_copy(0, index, _scaled(before, after, gate.index_select(0, index)))
    s.packed = packed.with_states(states)
    s.trace.append(Event("attend", layer, packed.rows["origin"], counts, packed.lengths))
    return scores


def _feed(engine: Engine, layer: int, s: State) -> None:
    packed, gate = s.packed, s.packed.tokens.get("gate")
    if gate is None or bool((gate > 0).all()):
        states = engine.feed(layer, packed.states)
        s.packed = packed.with_states(states if gate is None else _scaled(packed.states, states, gate))
        counts = packed.lengths
    else:
        live = gate > 0
        counts = torch.bincount(packed.row_of_token[live], minlength=packed.count).cpu()
        index = live.nonzero().squeeze(1)
        before = packed.states.index_select(0, index)
        after = _scaled(before, engine.feed(layer, before), gate.index_select(0, index))
        s.packed = packed.with_states(packed.states.index_copy(0, index, after))
    s.trace.append(Event("feed", layer, packed.rows["origin"], counts, packed.lengths))


def _scaled(before: Tensor, after: Tensor, gate: Tensor) -> Tensor:
    """`before + g·(after − before)`, exactly `after` where the gate is 1."""
    if bool((gate == 1).all()):
        return after.to(before.dtype)
    g = gate.to(before.dtype).unsqueeze(1)
    return torch.where(g == 1, after.to(before.dtype), before + g * (after - before))


def _leave(done: Tensor | None, s: State, answers: list[Answer]) -> None:
    """Done rows go out with their answers; the others stay."""
    if done is None or not bool(done.any()):
        return
    done = done.cpu()
    everyone = bool(done.all())
    if s._logits is None and s._ready is None and not everyone:
        rest = s.packed
        s.packed = rest.keep_rows(done)
        logits, owners = s.logits(), s.whole() if s.heads.per_token else s.packed
        s.packed = rest
    else:
        logits, owners = s.logits(), s.whole() if s.heads.per_token else s.packed
        if not everyone and s.heads.per_token:
            logits, owners = logits[done[owners.row_of_token.cpu()].to(logits.device)], owners.keep_rows(done)
        elif not everyone:
            logits = logits[done.to(logits.device)]
    if s.heads.per_token:
        answers.append(answer(owners, logits, s.layer))
    else:  # whole rows: nothing of their tokens is needed any more
        rows = owners.rows["origin"]
        rows = rows[done.to(rows.device)] if owners.count > logits.shape[0] else rows
        answers.append(Answer(rows, rows, logits, torch.full((len(rows),), float(s.layer), dtype=torch.float64)))
    s.packed = s.packed.keep_rows(~done) if not everyone else _nobody(s.packed)
    s._logits = s._ready = None


def _nobody(packed: Packed) -> Packed:
    return Packed(packed.states[:0], packed.lengths[:0])
