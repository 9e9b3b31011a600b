"""Exit rules as data: an engine that runs a rule whole gives the answers, exits and costs of stepping through it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from offramp import methods
from offramp.core import cost
from offramp.core.engine import ExitHeads, RuleResult
from offramp.core.loop import run
from offramp.core.packed import Packed
from offramp.core.policy import PairPolicy, Policy
from offramp.core.rules import ExitRule, RuleTrace
from offramp.engines.torch import TorchEngine
from offramp.nn.batches import pack_rows
from tests import factories

LENGTHS = (9, 3, 17, 5, 1, 12)
RULES: dict[str, tuple[str, dict[str, Any]]] = {  # measure → method and settings
    "entropy": ("branchynet", {"thresholds": (0.0, 0.15, 0.15)}),
    "normalised_entropy": ("fastbert", {"threshold": 0.8}),
    "least_confidence": ("shallow_deep", {"thresholds": (0.0, 0.12, 0.05), "temperatures": (1.0, 2.0, 0.5)}),
    "exit_unit": ("berxit", {"threshold": 0.5}),
    "patience": ("pabee", {"patience": 1}),
}


class RuleEngine(TorchEngine):
    """Runs rules row by row in the plainest way there is."""

    rule_measures: ClassVar[frozenset[str]] = frozenset(RULES)

    def run_rule(self, rule: ExitRule, exit_heads: ExitHeads, packed: Packed) -> RuleResult:
        rows = [packed.keep_rows(torch.arange(packed.count) == row) for row in range(packed.count)]
        found = [self._row(rule, exit_heads, row) for row in rows]
        return RuleResult(torch.stack([logits for logits, _ in found]), torch.tensor([layer for _, layer in found]))

    def _row(self, rule: ExitRule, exit_heads: ExitHeads, row: Packed) -> tuple[Tensor, int]:
        row, before, agreed = row.with_states(self.embed(row)), None, 0
        for layer in range(self.depth + 1):
            if layer:
                x = row.states
                row = row.with_states(self.feed(layer, self.attend(layer, x, x, row.layout, False)[0]))
            if layer == self.depth:
                break
            if layer not in rule.consulted:
                continue
            place, logits = rule.exits.index(layer), exit_heads(layer, row)[0]
            if rule.measure == "patience":
                agreed = agreed + 1 if before is not None and before == int(logits.argmax()) else 0
                before = int(logits.argmax())
                if agreed >= rule.patience:
                    return logits, layer
                continue
            p = (logits / (rule.temperatures[place] if rule.temperatures else 1.0)).softmax(-1)
            entropy = float(torch.special.entr(p).sum())
            value = {
                "entropy": entropy,
                "normalised_entropy": entropy / float(torch.tensor(float(len(p))).log()),
                "least_confidence": float(1.0 - p.max()),
                "exit_unit": float(exit_heads.exit_unit(layer, row)[0]) if rule.measure == "exit_unit" else 0.0,
            }[rule.measure]
            if value < rule.thresholds[place]:
                return logits, layer
        return exit_heads(self.depth, row)[0], self.depth


@pytest.mark.parametrize("measure", RULES)
def test_a_rule_run_whole_equals_stepping(measure: str) -> None:
    name, values = RULES[measure]
    net, method = factories.network(name), methods.get(name)
    with torch.no_grad():
        for parameter in net.added.parameters():  # exits that are certain of some rows and not of others
            parameter.mul_(4.0)
    policy = method.policy(net, methods.configure(method.settings, values, name))
    packed = pack_rows(net.task, factories.encode(factories.token_ids(list(LENGTHS))))
    rule = policy.rule()
    assert rule is not None and rule.measure == measure
    with torch.no_grad():
        stepped = run(TorchEngine(net.encoder), net, policy, packed)
        whole = run(RuleEngine(net.encoder), net, policy, packed)
    assert torch.allclose(whole.logits, stepped.logits, atol=1e-5)
    assert whole.exit_layer.tolist() == stepped.exit_layer.tolist()
    assert len(set(whole.exit_layer.tolist())) > 1, "rows of this case exit at several layers"
    ours, theirs = (cost.macs(result.trace, net, packed.count) for result in (whole, stepped))
    assert torch.allclose(ours, theirs, rtol=1e-12)
    kept = [cost.tokens_kept(result.trace, net.depth, packed.count) for result in (whole, stepped)]
    assert torch.equal(*kept)
    assert torch.equal(*(cost.tokens_fed(result.trace, net.depth) for result in (whole, stepped)))
    events = [[(e.kind, e.layer, e.rows.tolist(), e.tokens.tolist()) for e in r.trace] for r in (whole, stepped)]
    assert events[0] == events[1]


@pytest.mark.parametrize("measure", RULES)
def test_sums_of_a_trace_equal_those_of_its_events(measure: str) -> None:
    name, values = RULES[measure]
    net, method = factories.network(name), methods.get(name)
    rule = method.policy(net, methods.configure(method.settings, values, name)).rule()
    assert rule is not None
    for lengths, exits in (((9, 3, 17, 5), (0, 3, 1, 2)), ((7,), (2,)), ((7,), (0,)), ((4, 4), (3, 3))):
        packed = pack_rows(net.task, factories.encode(factories.token_ids(list(lengths))))
        trace, rows = RuleTrace(rule, packed, torch.tensor(exits), net.depth), len(lengths)
        assert torch.equal(cost.macs(trace, net, rows), cost.macs(list(trace), net, rows))
        assert torch.equal(cost.tokens_fed(trace, net.depth), cost.tokens_fed(list(trace), net.depth))
        assert torch.equal(cost.tokens_kept(trace, net.depth, rows), cost.tokens_kept(list(trace), net.depth, rows))


@pytest.mark.parametrize(
    ("name", "task"), [("branchynet", "tagging"), ("token_exit", "tagging"), ("adapler", "classification")]
)
def test_a_policy_that_is_no_plain_rule_gives_none(name: str, task: str) -> None:
    method = methods.get(name)
    assert method.policy(factories.network(name, task), method.settings()).rule() is None


def test_a_pair_with_an_idle_policy_is_the_rule_of_the_other_one() -> None:
    net, method = factories.network("branchynet"), methods.get("branchynet")
    exits = method.policy(net, method.settings(threshold=0.5))
    assert PairPolicy(Policy(), exits).rule() == exits.rule() is not None
    assert PairPolicy(exits, factories.KeepFirst({1: 2}, "before_layer")).rule() is None


def test_a_rule_consults_only_exits_with_a_threshold() -> None:
    assert ExitRule("entropy", (0, 1, 2), (0.0, 0.5, 0.1)).consulted == (1, 2)
    assert ExitRule("patience", (0, 1, 2), patience=0).consulted == ()
    assert ExitRule("entropy", (0, 1), (0.0, 0.0), by_row=True).consulted == (0, 1)
