"""Aligned and mixed training of decoder exits, and the halting unit that learns from an oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from offramp import engines, tasks
from offramp.core.packed import pack
from offramp.data.tokenization import Encoded
from offramp.decoding.decoder import decoder_of, vocabulary_heads
from offramp.decoding.exits import DecoderOptions, DecoderSettings, decoder_policy
from offramp.decoding.teacher_forcing import encode_source, teacher_force
from offramp.decoding.training import AlignedStage, HaltingStage, MixedStage, decoder_stages, score_exits
from offramp.decoding.translate import translate_encoded
from offramp.nn.batches import Batch, Data, epoch_batches
from offramp.nn.exit_oracles import correctness_oracle, geometric_loss
from offramp.nn.network import Network
from tests import factories

SOURCE_LENGTHS, TARGET_LENGTHS = [9, 3, 14, 5], [4, 6, 2, 5]
LAST_EXIT = (0.0, 0.0, 0.0, 1.0)
each_backbone = pytest.mark.parametrize("backbone", factories.SEQ2SEQ_BACKBONES)


def translation_batch() -> Batch:
    targets = tasks.get("translation")().stack_targets(factories.token_ids(TARGET_LENGTHS, seed=1))
    return Batch(pack(factories.token_ids(SOURCE_LENGTHS)), targets, [0, 1, 2, 3])


def loss_of(stage: Any, batch: Batch) -> float:
    return float(stage.step(batch, lambda loss: None)["loss"])


def hf_loss(net: Network, batch: Batch) -> float:
    return float(factories.hf_padded(net.hf, factories.token_ids(SOURCE_LENGTHS), labels=batch.targets).loss)


@each_backbone
def test_loss_of_the_last_exit_alone_equals_hugging_face(backbone: str) -> None:
    net, batch = factories.translation_network(backbone=backbone), translation_batch()
    stage = AlignedStage(net, weights=LAST_EXIT, smoothing=0.0)
    assert loss_of(stage, batch) == pytest.approx(hf_loss(net, batch), rel=1e-5)


def test_aligned_loss_is_the_weighted_mean_over_exits() -> None:
    net, batch = factories.translation_network(), translation_batch()
    single = [tuple(float(n == i) for n in range(4)) for i in range(4)]
    alone = [loss_of(AlignedStage(net, weights=weights, smoothing=0.0), batch) for weights in single]
    uniform = AlignedStage(net, weights=(0.25,) * 4, smoothing=0.0)
    assert loss_of(uniform, batch) == pytest.approx(sum(alone) / 4)


def test_decoder_stages_take_their_weights_from_the_options() -> None:
    net = factories.translation_network()
    uniform, index = (decoder_stages(net, DecoderOptions(weights=rule))[0] for rule in ("uniform", "index"))
    assert isinstance(uniform, AlignedStage) and uniform.weights == (0.25,) * 4 and uniform.fine_tuning
    assert isinstance(index, AlignedStage) and index.weights == (0.1, 0.2, 0.3, 0.4)


@each_backbone
def test_bfloat16_changes_the_loss_by_less_than_two_percent(backbone: str) -> None:
    net, batch = factories.translation_network(backbone=backbone), translation_batch()
    stage = AlignedStage(net, weights=LAST_EXIT, smoothing=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        low = loss_of(stage, batch)
    assert low == pytest.approx(loss_of(stage, batch), rel=0.02) and low != loss_of(stage, batch)


def test_mixed_loss_is_taken_at_the_drawn_exits_from_copied_states() -> None:
    net, batch = factories.translation_network(form="threshold", tied=True), translation_batch()
    stage = MixedStage(net, weights=(0.25,) * 4, smoothing=0.0, samples=2)
    torch.manual_seed(5)
    loss = loss_of(stage, batch)
    torch.manual_seed(5)
    expected = []
    for _ in range(2):
        exit_block = torch.randint(1, 5, batch.targets.shape)
        with torch.no_grad():
            forced = teacher_force(net, batch, encode_source(net, batch), exit_block)
            own = exit_block[batch.targets != -100]
            states = torch.stack(forced.states)[own - 1, torch.arange(len(own))]  # after the exit of each token
            expected.append(F.cross_entropy(vocabulary_heads(net)[0](states), forced.targets))
    assert loss == pytest.approx(float(sum(expected)) / 2, rel=1e-5)


@each_backbone
def test_a_block_keeps_the_states_of_tokens_that_exited(backbone: str) -> None:
    block = decoder_of(factories.translation_network(backbone=backbone)).blocks[0]
    x, source = torch.randn(3, 5, 32), torch.randn(3, 5, 32)
    computed = torch.rand(3, 5) < 0.5
    partly, whole = block(x, source, None, computed), block(x, source, None)
    assert torch.equal(partly[~computed], x[~computed])
    assert torch.allclose(partly[computed], whole[computed], atol=1e-5)
    assert torch.equal(block(x, source, None, torch.zeros(3, 5, dtype=torch.bool)), x)


def test_scores_of_untied_vocabularies_come_in_the_order_of_tokens() -> None:
    net = factories.translation_network(form="threshold", tied=False)
    states, exit_block = torch.randn(7, 32), torch.tensor([4, 1, 2, 1, 4, 3, 2])
    scores = MixedStage(net, weights=(0.25,) * 4).scores_at(states, exit_block)
    for place, block in enumerate(exit_block.tolist()):
        assert torch.allclose(scores[place], vocabulary_heads(net)[block - 1](states[place]), atol=1e-6)


def test_halting_loss_is_the_cross_entropy_against_the_oracle() -> None:
    net, batch = factories.translation_network(), translation_batch()
    first, second = decoder_stages(net, DecoderOptions(alpha=0.5, smoothing=0.0, oracle="correctness"))
    with torch.no_grad():
        forced = teacher_force(net, batch, encode_source(net, batch))
        scores = score_exits(net, forced, 0.0, range(1, 5))
        oracle = correctness_oracle(scores.correct, forced.lengths, 0.1)
        unit = net.added["halting_unit"]
        stops = torch.stack([unit(place, states) for place, states in enumerate(forced.states[:-1])], 1)
        expected = loss_of(first, batch) + 0.5 * float(geometric_loss(stops, oracle))
    assert loss_of(second, batch) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("training", ["aligned", "mixed"])
@pytest.mark.parametrize("form", ["sequence", "multinomial", "geometric", "threshold"])
def test_gradients_reach_exactly_the_declared_parameters(form: Any, training: Any) -> None:
    options = DecoderOptions(form=form, training=training, tied=form != "geometric", oracle="likelihood")
    net = factories.translation_network(form=form, tied=options.tied)
    for stage in decoder_stages(net, options):
        for _, parameter in net.named_parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        for _, parameter in stage.trainable():
            parameter.requires_grad_(True)
        stage.set_train_mode()
        torch.manual_seed(0)
        stage.step(translation_batch(), lambda loss: loss.backward())
        reached = {name for name, p in net.named_parameters() if p.grad is not None}
        assert reached == {name for name, _ in stage.trainable()}
        assert any(name.startswith("added.halting_unit") for name in reached) is isinstance(stage, HaltingStage)


@pytest.mark.parametrize("form", ["sequence", "multinomial", "geometric"])
def test_epochs_are_chosen_midway_even_if_the_unit_stops_everything_at_once(form: Any, tmp_path: Path) -> None:
    net = factories.translation_network(form=form)
    rows = factories.token_ids(SOURCE_LENGTHS * 4)
    data = Data(
        [{}] * len(rows), [Encoded(ids, [0] * len(ids), i, [], [], 0, tuple(ids)) for i, ids in enumerate(rows)]
    )
    unit: Any = net.added["halting_unit"]
    with torch.no_grad():
        unit.project.bias[0] += 8.0  # stops after the first block, whatever it reads
    stage = decoder_stages(net, DecoderOptions(form=form))[1]
    stage.prepare(data, tmp_path)
    chosen, published = stage.policy(), decoder_policy(net, DecoderSettings(0.5))
    depths = [
        translate_encoded(net, engines.make("torch", net.encoder), policy, data.encoded).exit_layer.mean()
        for policy in (chosen, published)
    ]
    assert depths[1] == 1.0 and 1.5 < depths[0] < 3.6


def test_exits_of_a_run_with_other_heads_are_trained_anew() -> None:
    run = {"options": {"training": "aligned", "tied": True}}
    for tied in (True, False):
        net = factories.translation_network(form="threshold", tied=tied)
        assert decoder_stages(net, DecoderOptions(form="threshold", tied=tied))[0].is_done_in(run) is tied


def test_a_detached_halting_unit_gives_the_model_no_gradient() -> None:
    gradients = []
    for detach in (False, True):
        net = factories.translation_network()
        halting = decoder_stages(net, DecoderOptions(detach=detach))[1]
        halting.step(translation_batch(), lambda loss: loss.backward())
        gradients.append(net.hf.get_parameter("model.decoder.layers.0.fc1.weight").grad)
    assert gradients[0] is not None and gradients[1] is not None
    assert not torch.allclose(gradients[0], gradients[1])


def test_grouped_sentences_fill_batches_evenly_and_keep_their_number() -> None:
    task = tasks.get("translation")()
    sizes = torch.randint(2, 40, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    data = Data([{}] * 300, [Encoded([5] * n, [0] * n, i, [], [], 0, (7,) * n) for i, n in enumerate(sizes)])
    epochs = [epoch_batches(task, data, 16, seed) for seed in range(3)]
    assert len({len(groups) for groups in epochs}) == 1 and epochs[0] != epochs[1]
    room = 16 * 2 * sum(sizes) / 300
    for groups in epochs:
        assert sorted(i for group in groups for i in group) == list(range(300))
        assert all(len(group) * 2 * max(sizes[i] for i in group) <= room for group in groups)
        assert sum(len(group) * 2 * max(sizes[i] for i in group) for group in groups) > 0.8 * room * len(groups)
