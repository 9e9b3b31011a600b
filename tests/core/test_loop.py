"""The loop: rows leave with their answers, tokens drop and come back, idle tokens are copies that are still seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offramp import engines
from offramp.core.attention import AttentionScores
from offramp.core.loop import Result, State, run
from offramp.core.packed import Packed, pack
from offramp.core.policy import Needs, PairPolicy, Policy
from offramp.nn.exit_policies import ExitOptions, build_exit_heads
from offramp.nn.network import Network, bare_network
from offramp.tasks import get
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers
from tests import tiny
from tests.fakes import Drop, Gate, Leave

LENGTHS = [9, 3, 17, 5]


def net_for(task: str, kind: str = "bert") -> Network:
    rows = [{"text": "a", "label": i, "tokens": ["a", "b", "c"], "tags": ["O", "B-X", "I-X"]} for i in range(3)]
    spec = get(task).from_rows(rows, "rows")
    made = bare_network(tiny.model(kind, spec.auto_class), spec)
    torch.manual_seed(5)
    made.added.update({"exit_heads": build_exit_heads(made, ExitOptions())})
    made.eval()
    return made


def answer(net: Network, policy: Policy, packed: Packed) -> Result:
    with torch.no_grad():
        return run(engines.make("torch", net.encoder), net, policy, packed)


class Watch(Policy):
    """Notes the states after every layer."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        self.seen[layer] = s.packed.states.clone()
        return None


def test_do_nothing_is_the_plain_model() -> None:
    net, ids = net_for("classification"), tiny.rows(LENGTHS)
    assert torch.allclose(answer(net, Policy(), pack(ids)).logits, tiny.padded(net.hf, ids).logits, atol=1e-5)


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_a_row_that_leaves_takes_the_answer_of_its_off_ramp(task: str) -> None:
    net, packed = net_for(task), pack(tiny.rows(LENGTHS))
    made = answer(net, Leave({0: [3], 1: [0], 2: [2]}), packed)
    assert made.exit_layer.tolist() == [1, 3, 2, 0]
    with torch.no_grad():
        whole = forward_all_layers(net.encoder, packed)
        for row, layer in enumerate([1, 3, 2, 0]):
            logits = net(layer, whole.after(layer))
            mine = packed.row_of_token == row if net.per_token else torch.arange(len(LENGTHS)) == row
            assert torch.allclose(made.logits[mine], logits[mine], atol=1e-5)


def test_all_rows_may_leave_before_the_first_layer() -> None:
    made = answer(net_for("classification"), Leave({0: [0, 1, 2, 3]}), pack(tiny.rows(LENGTHS)))
    assert made.exit_layer.tolist() == [0, 0, 0, 0]
    assert {event.kind for event in made.trace} == {"embed", "head"}


def test_dropped_tokens_answer_with_their_last_state() -> None:
    """Drop-and-restore: what the head reads of a dropped token is its state when it left."""
    net, packed = net_for("tagging"), pack(tiny.rows(LENGTHS))
    watch = Watch()
    made = answer(net, PairPolicy(Drop({2: 4}, "before_layer"), watch), packed)
    gone = packed.tokens["position"] >= 4
    assert made.logits.shape[0] == packed.total
    with torch.no_grad():
        early = net.model_head.apply(packed.with_states(watch.seen[1]))
    assert torch.allclose(made.logits[gone], early[gone], atol=1e-6)
    assert not torch.allclose(made.logits[~gone], early[~gone], atol=1e-2)


def test_idle_tokens_are_exact_copies_and_are_attended_to() -> None:
    net, ids = net_for("classification"), tiny.rows([8])
    idle = {2: [1.0, 1.0, 1.0, 0.0, 0.0]}  # positions from 3 on do nothing in layer 2
    watch = Watch()
    answer(net, PairPolicy(Gate(idle), watch), pack(ids))
    assert torch.equal(watch.seen[2][3:], watch.seen[1][3:])
    assert not torch.allclose(watch.seen[2][:3], watch.seen[1][:3])
    other = [[*ids[0][:5], ids[0][5] % 90 + 5, *ids[0][6:]]]  # another word among the idle ones
    changed = Watch()
    answer(net, PairPolicy(Gate(idle), changed), pack(other))
    assert not torch.allclose(changed.seen[2][:3], watch.seen[2][:3])


@pytest.mark.parametrize("kind", tiny.BACKBONES)
def test_gate_one_is_the_layer_and_soft_gates_agree_with_the_trace(kind: str) -> None:
    net, packed = net_for("classification", kind), pack(tiny.rows(LENGTHS))
    depth = net.depth
    plain = answer(net, Policy(), packed).logits
    assert torch.allclose(answer(net, Gate({}), packed).logits, plain, atol=1e-5)
    plan = {layer: [1.0, 0.3, 0.0, 0.7] for layer in range(2, depth + 1)}

    def gate(layer: int, _: LayerStates) -> Tensor | None:
        values = torch.tensor(plan.get(layer, [1.0]))
        return values[packed.tokens["position"].clamp(max=len(values) - 1)]

    with torch.no_grad():
        soft = net(depth, forward_all_layers(net.encoder, packed, ForwardHooks(gate=gate)).after(depth))
    assert torch.allclose(answer(net, Gate(plan), packed).logits, soft, atol=1e-5)


def test_scores_are_given_only_where_asked() -> None:
    got: list[bool] = []

    class Asks(Policy):
        def needs(self, layer: int) -> Needs:
            return Needs(after_attention=True, scores=layer == 2)

        def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
            got.append(scores is not None)
            return None

    answer(net_for("classification"), Asks(), pack(tiny.rows(LENGTHS)))
    assert got == [False, True, False]


def test_both_keeps_what_both_keep_and_leaves_when_either_leaves() -> None:
    net, packed = net_for("classification"), pack(tiny.rows(LENGTHS))
    pair = PairPolicy(Leave({1: [0]}), PairPolicy(Leave({1: [2]}), Drop({1: 2}, "after_attention")))
    made = answer(net, pair, packed)
    assert made.exit_layer.tolist() == [1, 3, 1, 3]
    fed = [event.tokens.tolist() for event in made.trace if event.kind == "feed"]
    assert fed == [[2, 2, 2, 2], [2, 2], [2, 2]]


def test_the_loop_is_differentiable() -> None:
    net, packed = net_for("classification"), pack(tiny.rows(LENGTHS))
    made = run(
        engines.make("torch", net.encoder), net, PairPolicy(Drop({2: 2}, "after_attention"), Leave({1: [1]})), packed
    )
    made.logits.sum().backward()
    assert net.hf.base_model.embeddings.word_embeddings.weight.grad is not None
    assert net.exit_heads[1].project.weight.grad is not None and net.exit_heads[2].project.weight.grad is None


@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=6),
    leave=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    keep=st.integers(1, 6),
    task=st.sampled_from(["classification", "tagging"]),
)
@settings(max_examples=25, deadline=None)
def test_a_batch_never_changes_an_answer(lengths: list[int], leave: list[int], keep: int, task: str) -> None:
    """Rows that leave anywhere and tokens that drop anywhere: each row answers as it would alone."""
    net, ids = net_for(task), tiny.rows(lengths)
    exits = {layer: [row for row in range(len(ids)) if leave[row] == layer] for layer in range(3)}
    together = answer(net, PairPolicy(Leave(exits), Drop({2: keep}, "after_attention")), pack(ids))
    parts = together.logits.split(lengths) if net.per_token else together.logits[:, None]
    for row, words in enumerate(ids):
        own = {layer: [0] for layer in range(3) if leave[row] == layer}
        alone = answer(net, PairPolicy(Leave(own), Drop({2: keep}, "after_attention")), pack([words]))
        assert alone.exit_layer[0] == together.exit_layer[row]
        assert torch.allclose(alone.logits, parts[row], atol=1e-5)


def test_answers_that_settled_survive_the_dropping_of_their_token() -> None:
    """Depth and length together on tags: a word settles after layer 1, then its token is dropped."""

    class Settle(Policy):
        def should_exit(self, layer: int, s: State) -> Tensor | None:
            if layer == 1:
                s.answer_tokens(s.packed.tokens["position"] >= 4)
            return None

    net, packed = net_for("tagging"), pack(tiny.rows(LENGTHS))
    made = answer(net, PairPolicy(Settle(), Drop({3: 4}, "before_layer")), packed)
    with torch.no_grad():
        early = net(1, forward_all_layers(net.encoder, packed).after(1))
    late = packed.tokens["position"] >= 4
    assert torch.allclose(made.logits[late], early[late], atol=1e-5)
    assert not torch.allclose(made.logits[~late], early[~late], atol=1e-2)
