"""The loop: rows exit with their logits, tokens are dropped and restored, idle tokens are copies that stay visible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offramp import engines
from offramp.core.attention import AttentionScores
from offramp.core.loop import State, run
from offramp.core.packed import pack
from offramp.core.policy import Needs, PairPolicy, Policy
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers
from tests.factories import (
    BACKBONES,
    ExitAt,
    KeepFirst,
    SetGates,
    exit_network,
    hf_padded,
    run_policy,
    token_ids,
)

LENGTHS = [9, 3, 17, 5]


class RecordStates(Policy):
    """Keeps the states after every layer."""

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        self.states[layer] = s.packed.states.clone()
        return None


def test_idle_policy_equals_hugging_face() -> None:
    net, ids = exit_network("classification"), token_ids(LENGTHS)
    assert torch.allclose(run_policy(net, Policy(), pack(ids)).logits, hf_padded(net.hf, ids).logits, atol=1e-5)


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_a_row_that_exits_has_the_logits_of_its_exit(task: str) -> None:
    net, packed = exit_network(task), pack(token_ids(LENGTHS))
    result = run_policy(net, ExitAt({0: [3], 1: [0], 2: [2]}), packed)
    assert result.exit_layer.tolist() == [1, 3, 2, 0]
    with torch.no_grad():
        whole = forward_all_layers(net.encoder, packed)
        for row, layer in enumerate([1, 3, 2, 0]):
            logits = net(layer, whole.after(layer))
            own = packed.row_of_token == row if net.per_token else torch.arange(len(LENGTHS)) == row
            assert torch.allclose(result.logits[own], logits[own], atol=1e-5)


def test_all_rows_may_leave_before_the_first_layer() -> None:
    result = run_policy(exit_network("classification"), ExitAt({0: [0, 1, 2, 3]}), pack(token_ids(LENGTHS)))
    assert result.exit_layer.tolist() == [0, 0, 0, 0]
    assert {event.kind for event in result.trace} == {"embed", "head"}


def test_dropped_tokens_answer_with_their_last_state() -> None:
    """Drop-and-restore: what the head reads of a dropped token is its state when it left."""
    net, packed = exit_network("tagging"), pack(token_ids(LENGTHS))
    recorder = RecordStates()
    result = run_policy(net, PairPolicy(KeepFirst({2: 4}, "before_layer"), recorder), packed)
    dropped = packed.tokens["position"] >= 4
    assert result.logits.shape[0] == packed.total
    with torch.no_grad():
        early = net.model_head.apply(packed.with_states(recorder.states[1]))
    assert torch.allclose(result.logits[dropped], early[dropped], atol=1e-6)
    assert not torch.allclose(result.logits[~dropped], early[~dropped], atol=1e-2)


def test_idle_tokens_are_exact_copies_and_are_attended_to() -> None:
    net, ids = exit_network("classification"), token_ids([8])
    idle = {2: [1.0, 1.0, 1.0, 0.0, 0.0]}  # positions from 3 on do nothing in layer 2
    recorder = RecordStates()
    run_policy(net, PairPolicy(SetGates(idle), recorder), pack(ids))
    assert torch.equal(recorder.states[2][3:], recorder.states[1][3:])
    assert not torch.allclose(recorder.states[2][:3], recorder.states[1][:3])
    other = [[*ids[0][:5], ids[0][5] % 90 + 5, *ids[0][6:]]]  # another word among the idle ones
    changed = RecordStates()
    run_policy(net, PairPolicy(SetGates(idle), changed), pack(other))
    assert not torch.allclose(changed.states[2][:3], recorder.states[2][:3])


@pytest.mark.parametrize("kind", BACKBONES)
def test_gate_one_is_the_layer_and_soft_gates_equal_the_differentiable_pass(kind: str) -> None:
    net, packed = exit_network("classification", kind), pack(token_ids(LENGTHS))
    depth = net.depth
    plain = run_policy(net, Policy(), packed).logits
    assert torch.allclose(run_policy(net, SetGates({}), packed).logits, plain, atol=1e-5)
    plan = {layer: [1.0, 0.3, 0.0, 0.7] for layer in range(2, depth + 1)}

    def gate(layer: int, _: LayerStates) -> Tensor | None:
        values = torch.tensor(plan.get(layer, [1.0]))
        return values[packed.tokens["position"].clamp(max=len(values) - 1)]

    with torch.no_grad():
        soft = net(depth, forward_all_layers(net.encoder, packed, ForwardHooks(gate=gate)).after(depth))
    assert torch.allclose(run_policy(net, SetGates(plan), packed).logits, soft, atol=1e-5)


def test_scores_are_given_only_where_needed() -> None:
    got: list[bool] = []

    class ScoresAtLayerTwo(Policy):
        def needs(self, layer: int) -> Needs:
            return Needs(after_attention=True, scores=layer == 2)

        def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
            got.append(scores is not None)
            return None

    run_policy(exit_network("classification"), ScoresAtLayerTwo(), pack(token_ids(LENGTHS)))
    assert got == [False, True, False]


def test_pair_policy_keeps_tokens_that_both_keep_and_exits_with_either() -> None:
    net, packed = exit_network("classification"), pack(token_ids(LENGTHS))
    pair = PairPolicy(ExitAt({1: [0]}), PairPolicy(ExitAt({1: [2]}), KeepFirst({1: 2}, "after_attention")))
    result = run_policy(net, pair, packed)
    assert result.exit_layer.tolist() == [1, 3, 1, 3]
    fed = [event.tokens.tolist() for event in result.trace if event.kind == "feed"]
    assert fed == [[2, 2, 2, 2], [2, 2], [2, 2]]


def test_the_loop_is_differentiable() -> None:
    net, packed = exit_network("classification"), pack(token_ids(LENGTHS))
    result = run(
        engines.make("torch", net.encoder),
        net,
        PairPolicy(KeepFirst({2: 2}, "after_attention"), ExitAt({1: [1]})),
        packed,
    )
    result.logits.sum().backward()
    assert net.hf.base_model.embeddings.word_embeddings.weight.grad is not None
    assert net.exit_heads[1].project.weight.grad is not None and net.exit_heads[2].project.weight.grad is None


@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=6),
    leave=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    keep=st.integers(1, 6),
    task=st.sampled_from(["classification", "tagging"]),
)
@settings(max_examples=25)
def test_a_batch_never_changes_an_answer(lengths: list[int], leave: list[int], keep: int, task: str) -> None:
    """Rows that leave anywhere and tokens that drop anywhere: each row answers as it would alone."""
    net, ids = exit_network(task), token_ids(lengths)
    exits = {layer: [row for row in range(len(ids)) if leave[row] == layer] for layer in range(3)}
    together = run_policy(net, PairPolicy(ExitAt(exits), KeepFirst({2: keep}, "after_attention")), pack(ids))
    parts = together.logits.split(lengths) if net.per_token else together.logits[:, None]
    for row, words in enumerate(ids):
        own = {layer: [0] for layer in range(3) if leave[row] == layer}
        alone = run_policy(net, PairPolicy(ExitAt(own), KeepFirst({2: keep}, "after_attention")), pack([words]))
        assert alone.exit_layer[0] == together.exit_layer[row]
        assert torch.allclose(alone.logits, parts[row], atol=1e-5)


def test_answered_tokens_keep_their_logits_when_they_are_dropped() -> None:
    """Depth and length together on tags: a word gets its answer after layer 1, then its token is dropped."""

    class AnswerTokens(Policy):
        def should_exit(self, layer: int, s: State) -> Tensor | None:
            if layer == 1:
                s.answer_tokens(s.packed.tokens["position"] >= 4)
            return None

    net, packed = exit_network("tagging"), pack(token_ids(LENGTHS))
    result = run_policy(net, PairPolicy(AnswerTokens(), KeepFirst({3: 4}, "before_layer")), packed)
    with torch.no_grad():
        early = net(1, forward_all_layers(net.encoder, packed).after(1))
    late = packed.tokens["position"] >= 4
    assert torch.allclose(result.logits[late], early[late], atol=1e-5)
    assert not torch.allclose(result.logits[~late], early[~late], atol=1e-2)


def test_dropped_tokens_have_the_default_of_columns_that_are_added_later() -> None:
    found: dict[str, Tensor] = {}

    class AddColumns(Policy):
        def should_exit(self, layer: int, s: State) -> Tensor | None:
            if layer == 2:
                new = torch.ones(s.packed.total)
                s.packed = s.packed.with_tokens(present=0.5 * new, own=7 * new)
                found.update(s.with_dropped_tokens().tokens)
            return None

    packed = pack(token_ids(LENGTHS))
    run_policy(exit_network("tagging"), PairPolicy(KeepFirst({2: 4}, "before_layer"), AddColumns()), packed)
    dropped = packed.tokens["position"] >= 4
    assert found["present"].tolist() == torch.where(dropped, 1.0, 0.5).tolist(), "as declared"
    assert found["own"].tolist() == torch.where(dropped, -1.0, 7.0).tolist(), "nothing is declared"
