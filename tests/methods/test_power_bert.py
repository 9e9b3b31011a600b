"""PoWER-BERT: weights by rank, counts from weights, tokens that are really gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offramp import engines, methods
from offramp.cli.printing.tables import print_run
from offramp.commands.info import info
from offramp.core.loop import Result, run
from offramp.core.packed import pack
from offramp.core.policy import PairPolicy, Policy
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.inference.run_folder import load_run, read_description, reuse_added_modules
from offramp.methods import power_bert
from offramp.methods.power_bert import (
    FixedCountsStage,
    PoWERBERTOptions,
    PoWERBERTPolicy,
    PoWERBERTSettings,
    RankSearchStage,
    Retention,
)
from offramp.nn.batches import Batch, Data
from offramp.nn.network import Network
from offramp.training.schedule import Schedule
from tests import factories
from tests.methods.test_length_adaptive import FirstTokens

LENGTHS = [12, 3, 20, 1]


def network_and_retention(**options: Any) -> tuple[Network, Retention]:
    net = factories.network("power_bert", seed=None, **options)
    return net, power_bert.retention(net)


def run_counts(net: Network, settings: PoWERBERTSettings, recorder: Policy | None = None) -> Result:
    policy = PairPolicy(PoWERBERTPolicy(net, settings), recorder or Policy())
    with torch.no_grad():
        return run(engines.make("torch", net.encoder), net, policy, pack(factories.token_ids(LENGTHS)))


def fed(result: Result) -> list[list[int]]:
    return [event.tokens.tolist() for event in result.trace if event.kind == "feed"]


def test_policy_keeps_counts_scaled_and_at_most_the_row() -> None:
    net, _ = network_and_retention(counts=(15, 6, 2))
    assert fed(run_counts(net, PoWERBERTSettings())) == [[12, 3, 15, 1], [6, 3, 6, 1], [2, 2, 2, 1]]
    assert fed(run_counts(net, PoWERBERTSettings(0.5))) == [[6, 2, 8, 1], [3, 2, 3, 1], [1, 1, 1, 1]]


def test_first_token_is_never_dropped() -> None:
    net, _ = network_and_retention(counts=(6, 3, 1))
    for scale in (1.0, 0.3):
        recorder = FirstTokens()
        run_counts(net, PoWERBERTSettings(scale), recorder)
        assert len(recorder.first) == net.depth and all(recorder.first)


def test_only_layers_that_drop_need_scores() -> None:
    net, kept = network_and_retention(counts=(15, 15, 2))
    policy = PoWERBERTPolicy(net, PoWERBERTSettings())
    assert [policy.needs(layer).scores for layer in (1, 2, 3)] == [True, False, True]
    kept.counts.fill_(kept.weights.shape[1])
    assert not PoWERBERTPolicy(net, PoWERBERTSettings()).acts(net.depth)


def test_counts_are_sums_of_weights_that_never_grow() -> None:
    _, kept = network_and_retention()
    with torch.no_grad():
        kept.weights.zero_()
        kept.weights[0, :5], kept.weights[1, :9], kept.weights[2, 0] = 0.7, 1.0, -3.0
    kept.update_counts()
    assert kept.counts.tolist() == [3, 3, 1]  # floor(3.5); 9, but not more than before; never none


def some_batch() -> Batch:
    return Batch(pack(factories.token_ids([12, 7, 20])), torch.tensor([0, 1, 2]), [0, 1, 2])


def test_penalty_grows_with_the_layer() -> None:
    net, kept = network_and_retention()
    stage = RankSearchStage(net, options=PoWERBERTOptions(penalty=0.5))
    net.eval()
    losses: list[float] = []
    logged = stage.step(some_batch(), lambda loss: losses.append(float(loss.detach())))
    longest = kept.weights.shape[1]
    assert losses[0] - float(logged["loss"]) == pytest.approx(0.5 * longest * (1 + 2 + 3), rel=1e-4)


def test_ranks_that_no_row_has_are_not_penalised(tmp_path: Path) -> None:
    """Their gradient would dominate the norm to which gradients are clipped."""
    net, kept = network_and_retention()
    stage = RankSearchStage(net, options=PoWERBERTOptions(penalty=0.5))
    stage.prepare(Data([], [Encoded([1] * n, [0] * n, 0, list(range(n)), [], 0) for n in (12, 7, 20)]), tmp_path)
    stage.step(some_batch(), lambda loss: loss.backward())
    assert kept.weights.grad is not None and kept.weights.grad[:, :20].abs().min() > 0
    assert kept.weights.grad[:, 20:].abs().max() == 0


def test_kept_tokens_of_a_row_do_not_depend_on_the_batch() -> None:
    net, _ = network_and_retention(counts=(15, 6, 2))
    net.eval()
    together = run_counts(net, PoWERBERTSettings())
    for row, length in enumerate(LENGTHS):
        ids = [factories.token_ids(LENGTHS)[row]]
        with torch.no_grad():
            alone = run(engines.make("torch", net.encoder), net, PoWERBERTPolicy(net, PoWERBERTSettings()), pack(ids))
        assert torch.allclose(alone.logits[0], together.logits[row], atol=1e-5), length
        assert [kept[0] for kept in fed(alone)] == [kept[row] for kept in fed(together)]


def test_weights_scale_the_token_of_their_rank_and_are_clipped() -> None:
    net, kept = network_and_retention()
    stage = RankSearchStage(net, options=PoWERBERTOptions(penalty=0.0))
    net.eval()
    one = float(stage.step(some_batch(), lambda loss: None)["loss"])
    with torch.no_grad():
        kept.weights[:, 20:] = 0.0  # ranks that no row has
        kept.weights[0, 0] = 7.0
    assert float(stage.step(some_batch(), lambda loss: None)["loss"]) == pytest.approx(one)
    assert kept.weights.max() == 1.0
    with torch.no_grad():
        kept.weights[0, 3:] = 0.2
    assert float(stage.step(some_batch(), lambda loss: None)["loss"]) != pytest.approx(one, rel=1e-3)


def test_rank_weights_have_their_own_learning_rate_and_no_decay() -> None:
    net, kept = network_and_retention()
    (groups,) = RankSearchStage(net, options=PoWERBERTOptions(soft_lr=0.03)).optimisers(1e-4)
    own = [group for group in groups if any(p is kept.weights for p in group["params"])]
    assert len(own) == 1 and own[0]["lr"] == 0.03 and own[0]["weight_decay"] == 0.0
    parameters = [id(p) for group in groups for p in group["params"]]
    assert len(parameters) == len(set(parameters)) == len(list(net.named_parameters()))


def test_given_counts_skip_the_search() -> None:
    net, _ = network_and_retention(counts=(15, 6, 2))
    assert [stage.name for stage in methods.get("power_bert").stages(net, PoWERBERTOptions(counts=(15, 6, 2)))] == [
        "fine-tune",
        "re-train",
    ]
    net, _ = network_and_retention()
    stages = methods.get("power_bert").stages(net, PoWERBERTOptions())
    assert [stage.name for stage in stages] == ["fine-tune", "search", "re-train"] and isinstance(
        stages[2], FixedCountsStage
    )


def test_counts_are_stored_with_the_model_and_shown(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = Schedule(epochs=2, batch_size=12, lr=0.005)
    options = {"penalty": "0.5", "soft_lr": "0.2"}
    run_folder = factories.run_folder(base, tmp_path, "power_bert", schedule=quick, options=options)
    model = load_run(run_folder)
    found = power_bert.retention(model.network).counts.tolist()
    assert found == sorted(found, reverse=True) and 1 <= found[-1] <= found[0] < 17  # the longest row has 17
    assert methods.get("power_bert").policy(model.network, PoWERBERTSettings()).needs(1).scores
    listed = ", ".join(map(str, found))
    assert (
        read_description(run_folder)["layers"] == {"counts": found}
        and f"counts {listed}." in (run_folder / "README.md").read_text()
    )
    print_run(str(run_folder), info(run_folder))
    assert f"layers: {{'counts': [{listed}]}}" in capsys.readouterr().out
    net, kept = network_and_retention(counts=(9, 6, 2))
    reuse_added_modules(net, methods.get("power_bert"), str(run_folder))  # as when --model names that run
    assert kept.counts.tolist() == [9, 6, 2] and bool((kept.weights == 1.0).all())


NAN, INF = float("nan"), float("inf")
BAD = [
    *({"counts": counts} for counts in ((3, 5, 1), (3, 0, 0), (3.5, 2, 1), (INF, 2, 1), (NAN, 2, 1), (3, 2, NAN))),
    *({"penalty": penalty} for penalty in (-1.0, NAN, INF)),
    {"soft_lr": 0.0},
]


@pytest.mark.parametrize("options", BAD)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OfframpError, match=r"fix: .*e\.g\."):
        PoWERBERTOptions(**options)
    with pytest.raises(OfframpError, match="each of 3 layers") as refused:
        network_and_retention(counts=(4, 2))
    assert "leave counts out: training finds them" in refused.value.fix and "search`" not in refused.value.fix
    with pytest.raises(OfframpError, match="at most 1"):
        PoWERBERTSettings(0.0)


def test_pair_shows_the_numbers_of_its_parts() -> None:
    for name, options, expected in (
        ("power_bert+branchynet", {"counts": (15, 6, 2)}, {"counts": [15, 6, 2]}),
        ("length_adaptive+branchynet", {}, {}),
    ):
        assert methods.get(name).about(factories.network(name, **options)) == expected


def test_tasks_that_need_every_token_are_refused() -> None:
    for name, instead in (
        ("power_bert", r"adapler, length_adaptive, tr_bert; or "),
        ("power_bert+branchynet", r"adapler\+branchynet, length_adaptive\+branchynet, tr_bert\+branchynet; or "),
    ):
        with pytest.raises(OfframpError, match=rf"answer for every token.*\n.*use one of: {instead}"):
            factories.network(name, "tagging")
