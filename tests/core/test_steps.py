"""Running batches are split and merged between steps: answers, exit layers and costs stay those of one plain run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offramp import engines, methods
from offramp.core import cost
from offramp.core.columns import GATE, ID, ORIGIN, POSITION
from offramp.core.layout import AttentionScores
from offramp.core.loop import State, merge, run, start, step
from offramp.core.packed import Packed, pack
from offramp.core.policy import Needs, Policy
from offramp.errors import OfframpError
from offramp.nn.batches import pack_rows
from offramp.nn.network import Network
from tests import factories

LENGTHS = (9, 3, 17, 5, 1, 12, 4, 7)


class ByFirstToken(Policy):
    """Rows exit at a layer, tokens are dropped or idle, all decided by ids of the row itself."""

    def __init__(self, drops: bool, idles: bool) -> None:
        self.drops, self.idles = drops, idles

    def needs(self, layer: int) -> Needs:
        return Needs(before_layer=self.idles, after_attention=self.drops, scores=self.drops, should_exit=layer != 1)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        if self.idles and layer > 1:
            s.packed = s.packed.with_tokens(gate=(s.packed.tokens[ID] % 4 != layer).float())
        return None

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        tokens = s.packed.tokens
        return (tokens[ID] % 5 != layer) | (tokens[POSITION] == 0) if self.drops else None

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        return s.packed.tokens[ID][s.packed.starts] % 5 == layer


def policies(net: Network, method: str, values: dict[str, Any]) -> Policy:
    chosen = methods.get(method)
    return chosen.policy(net, methods.configure(chosen.settings, values, method))


CASES: dict[str, tuple[str, str, dict[str, Any] | tuple[bool, bool]]] = {  # name → method, task, settings
    "rows exit": ("branchynet", "classification", (False, False)),
    "rows exit, tokens are dropped": ("branchynet", "classification", (True, False)),
    "tags, tokens are dropped and idle": ("branchynet", "tagging", (True, True)),
    "entropy": ("branchynet", "classification", {"threshold": 1.0}),
    "patience": ("pabee", "classification", {"patience": 1}),
    "learned unit": ("berxit", "regression", {"threshold": 0.5}),
    "word by word": ("token_exit", "tagging", {"threshold": 0.9}),
    "scored tokens": ("adapler", "classification", {"scale": 1.0}),
    "kept lengths of rows": ("length_adaptive", "classification", {"lengths": (0.8, 0.5, 0.4)}),
    "kept lengths": ("length_adaptive", "tagging", {"lengths": (0.8, 0.5, 0.4)}),
    "kept lengths of rows, patience": (
        "length_adaptive+pabee",
        "classification",
        {"lengths": (0.8, 0.5, 0.4), "patience": 2},
    ),
    "kept lengths, patience": ("length_adaptive+pabee", "tagging", {"lengths": (0.8, 0.5, 0.4), "patience": 2}),
}


def batch_for(net: Network, lengths: tuple[int, ...]) -> Packed:
    packed = pack_rows(net.task, factories.encode(factories.token_ids(list(lengths))))
    return packed.with_rows(request=torch.arange(packed.count))


def case(name: str) -> tuple[Network, Policy]:
    method, task, values = CASES[name]
    net = factories.network(method, task)
    if isinstance(values, tuple):
        return net, ByFirstToken(*values)
    return net, policies(net, method, values)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12)
@given(data=st.data())
def test_any_split_and_merge_gives_the_same_answers(name: str, data: st.DataObject) -> None:
    net, policy = case(name)
    engine, packed = engines.make("torch", net.encoder), batch_for(net, LENGTHS)
    with torch.no_grad():
        plain = run(engine, net, policy, packed)
        running, done = [start(engine, net, policy, packed)], []
        while running:
            state = running.pop(data.draw(st.integers(0, len(running) - 1), label="which batch"))
            action = data.draw(st.sampled_from(["step", "split", "merge"]), label="action")
            alike = [other for other in running if other.layer == state.layer]
            if action == "split" and state.packed.count > 1:
                size = state.packed.count
                keep = data.draw(st.lists(st.booleans(), min_size=size, max_size=size), label="first part")
                for part in state.split(torch.tensor(keep)):
                    (done if part.done else running).append(part)
                continue
            if action == "merge" and alike:
                running = [other for other in running if other not in alike]
                running.append(merge([state, *alike]))
                continue
            step(engine, policy, state)
            (done if state.done else running).append(state)
    compare(net, packed, plain, done)


@pytest.mark.parametrize("name", CASES)
def test_live_rows_alone_go_on_to_the_same_answers(name: str) -> None:
    """Also if tokens were dropped before: kept lengths are shares of the original ones."""
    net, policy = case(name)
    engine, packed = engines.make("torch", net.encoder), batch_for(net, LENGTHS)
    with torch.no_grad():
        plain, state = run(engine, net, policy, packed), start(engine, net, policy, packed)
        sizes = packed.lengths.tolist() if net.per_token else [1] * packed.count
        expected, answers = plain.logits.split(sizes), {}
        while True:
            for group in state.exited:
                requests = state.base.rows["request"][group.rows].tolist()
                answers |= dict(zip(requests, group.logits.split([sizes[one] for one in requests]), strict=True))
            if state.done:
                break
            state = state.live_part()
            step(engine, policy, state)
    assert all(torch.allclose(answers[row], expected[row], atol=1e-5) for row in range(packed.count))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", ["kept lengths of rows, patience", "kept lengths, patience"])
def test_a_batch_that_dropped_tokens_merges_with_one_that_had_none_to_drop(name: str, alone: bool) -> None:
    """The memory of a method lies in different places of the two: answers are still those of one plain run."""
    net, policy = case(name)
    engine, packed = engines.make("torch", net.encoder), batch_for(net, (9, 17, 2, 1))
    with torch.no_grad():
        plain = run(engine, net, policy, packed)
        parts = start(engine, net, policy, packed).split(torch.tensor([True, True, False, False]))
        for part in parts:
            step(engine, policy, part)
        long, short = (part.live_part() if alone else part for part in parts)
        assert long.packed.total < 26 and short.packed.total == 3, "only the long rows lost tokens"
        state = merge([long, short])
        while not state.done:
            step(engine, policy, state)
    if alone:  # what was computed before is not in the trace of live parts
        state = replace(state, trace=list(plain.trace))
    compare(net, packed, plain, [state])


def compare(net: Network, packed: Packed, plain: Any, done: list[State]) -> None:
    spent = cost.macs(plain.trace, net, packed.count)
    kept = cost.tokens_kept(plain.trace, net.depth, packed.count)
    sizes = packed.lengths.tolist() if net.per_token else [1] * packed.count
    logits, seen = plain.logits.split(sizes), []
    for state in done:
        result, requests = state.result(), state.base.rows["request"].tolist()
        if not requests:
            continue
        own = cost.macs(result.trace, net, state.base.count)
        own_kept = cost.tokens_kept(result.trace, net.depth, state.base.count)
        parts = result.logits.split([sizes[request] for request in requests])
        for row, request in enumerate(requests):
            assert torch.allclose(parts[row], logits[request], atol=1e-5)
            assert result.exit_layer[row] == plain.exit_layer[request]
            assert own[row].item() == pytest.approx(spent[request].item())
            assert own_kept[row].item() == pytest.approx(kept[request].item())
        seen += requests
    assert sorted(seen) == list(range(packed.count)), "every row is answered once"


def test_merging_batches_at_different_layers_is_refused() -> None:
    net, _ = case("entropy")
    engine, packed = engines.make("torch", net.encoder), batch_for(net, LENGTHS)
    with torch.no_grad():
        first, second = (start(engine, net, Policy(), packed) for _ in range(2))
        step(engine, ByFirstToken(False, False), second)
    with pytest.raises(OfframpError, match="same layer"):
        merge([first, second])


def test_concat_fills_absent_columns_with_their_declared_default() -> None:
    first, second = (
        pack(factories.token_ids(lengths)).with_states(torch.zeros(sum(lengths), 2)) for lengths in ([2, 3], [4])
    )
    both = Packed.concat([first.with_tokens(gate=torch.zeros(5)), second])
    assert both.tokens[GATE].tolist() == [0.0] * 5 + [1.0] * 4
    assert both.rows[ORIGIN].tolist() == [0, 1, 2] and both.tokens[ORIGIN].tolist() == list(range(9))


def test_concat_refuses_a_missing_column_without_a_default() -> None:
    first, second = (pack(factories.token_ids([2])).with_states(torch.zeros(2, 2)) for _ in range(2))
    with pytest.raises(OfframpError, match="'own'"):
        Packed.concat([first.with_rows(own=torch.ones(1)), second])


def test_rows_with_different_thresholds_share_a_batch() -> None:
    net = factories.network("branchynet")
    strict, loose = policies(net, "branchynet", {"threshold": 0.8}), policies(net, "branchynet", {"threshold": 1.09})
    engine, packed = engines.make("torch", net.encoder), batch_for(net, LENGTHS)
    own = [strict if row % 2 else loose for row in range(packed.count)]
    columns = {name: torch.stack([policy.row_settings()[name] for policy in own]) for name in strict.row_settings()}
    with torch.no_grad():
        mixed = run(engine, net, strict.by_row(), packed.with_rows(**columns))
        for row, policy in enumerate(own):
            alone = run(engine, net, policy, packed.keep_rows(torch.arange(packed.count) == row))
            assert mixed.exit_layer[row] == alone.exit_layer[0]
            assert torch.allclose(mixed.logits[row], alone.logits[0], atol=1e-5)
    assert len(set(mixed.exit_layer.tolist())) > 1


def test_rows_with_different_patience_share_a_batch() -> None:
    net = factories.network("pabee")
    choices = [policies(net, "pabee", {"patience": n}) for n in (0, 1, 2)]
    engine, packed = engines.make("torch", net.encoder), batch_for(net, LENGTHS)
    own = [choices[row % 3] for row in range(packed.count)]
    columns = {"patience": torch.stack([policy.row_settings()["patience"] for policy in own])}
    with torch.no_grad():
        mixed = run(engine, net, choices[0].by_row(), packed.with_rows(**columns))
        for row, policy in enumerate(own):
            alone = run(engine, net, policy, packed.keep_rows(torch.arange(packed.count) == row))
            assert mixed.exit_layer[row] == alone.exit_layer[0]


def test_a_policy_without_row_settings_refuses_to_read_rows() -> None:
    with pytest.raises(OfframpError, match="batches of their own"):
        Policy().by_row()


def test_a_state_can_be_split_after_rows_have_left() -> None:
    net, packed = factories.network("branchynet"), batch_for(factories.network("branchynet"), LENGTHS)
    engine, policy = engines.make("torch", net.encoder), ByFirstToken(False, False)
    with torch.no_grad():
        plain, state = run(engine, net, policy, packed), start(engine, net, policy, packed)
        step(engine, policy, state)
        parts = list(state.split(torch.arange(state.packed.count) % 2 == 0))
        for part in parts:
            while not part.done:
                step(engine, policy, part)
    compare(net, packed, plain, [replace(part) for part in parts])
