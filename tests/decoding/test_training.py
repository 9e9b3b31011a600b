"""Aligned and mixed training of decoder exits, and the unit taught by an oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from offramp import methods, tasks
from offramp.core.packed import pack
from offramp.data.tokenization import Encoded
from offramp.decoding.teacher_forcing import Lesson, decoder_of, exits
from offramp.decoding.training import Deciding, Mixed, Speaking, decoder_stages, marks
from offramp.inference.run_folder import build_network
from offramp.methods.depth_adaptive.options import DepthAdaptiveOptions
from offramp.nn.batches import Batch, Data, epoch_batches
from offramp.nn.exit_oracles import correctness_oracle, geometric_loss
from offramp.nn.network import Network
from tests import tiny

LENGTHS, TARGETS = [9, 3, 14, 5], [4, 6, 2, 5]


def made(form: str = "geometric", kind: str = "marian", **options: Any) -> tuple[Network, DepthAdaptiveOptions]:
    given = DepthAdaptiveOptions(form=form, **options)  # type: ignore[arg-type]  # a word from a list
    torch.manual_seed(1)
    net = build_network(tiny.speaker(kind), tasks.get("translation")(), methods.get("depth_adaptive"), given)
    net.eval()
    return net, given


def some() -> Batch:
    task = tasks.get("translation")()
    return Batch(pack(tiny.rows(LENGTHS)), task.stack_targets(tiny.rows(TARGETS, seed=1)), [0, 1, 2, 3])


def loss_of(stage: Any, batch: Batch) -> float:
    return float(stage.step(batch, lambda loss: None)["loss"])


def hugging_face_loss(net: Network, batch: Batch) -> float:
    ids = tiny.rows(LENGTHS)
    wide = max(LENGTHS)
    padded = torch.tensor([row + [0] * (wide - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (wide - len(row)) for row in ids])
    with torch.no_grad():
        return float(net.hf(input_ids=padded, attention_mask=mask, labels=batch.targets).loss)


@pytest.mark.parametrize("kind", tiny.SEQ2SEQ)
def test_the_last_exit_alone_loses_what_hugging_face_says(kind: str) -> None:
    net, _ = made(kind=kind)
    stage = Speaking(net, weights=(0.0, 0.0, 0.0, 1.0), smoothing=0.0)
    assert loss_of(stage, some()) == pytest.approx(hugging_face_loss(net, some()), rel=1e-5)


def test_aligned_is_the_weighted_mean_over_exits() -> None:
    net, _ = made()
    alone = [loss_of(Speaking(net, weights=tuple(float(n == i) for n in range(4)), smoothing=0.0), some())
             for i in range(4)]  # fmt: skip
    assert loss_of(Speaking(net, weights=(0.25,) * 4, smoothing=0.0), some()) == pytest.approx(sum(alone) / 4)
    uniform, index = (decoder_stages(net, DepthAdaptiveOptions(weights=rule))[0] for rule in ("uniform", "index"))
    assert isinstance(uniform, Speaking) and uniform.weights == (0.25,) * 4 and uniform.fine_tuning
    assert isinstance(index, Speaking) and index.weights == (0.1, 0.2, 0.3, 0.4)


@pytest.mark.parametrize("kind", tiny.SEQ2SEQ)
def test_low_precision_changes_little(kind: str) -> None:
    net, _ = made(kind=kind)
    stage = Speaking(net, weights=(0.0, 0.0, 0.0, 1.0), smoothing=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        low = loss_of(stage, some())
    assert low == pytest.approx(loss_of(stage, some()), rel=0.02) and low != loss_of(stage, some())


def test_mixed_answers_at_the_drawn_exits_from_copied_states() -> None:
    net, _ = made("threshold")
    batch = some()
    stage = Mixed(net, weights=(0.25,) * 4, smoothing=0.0, samples=2)
    torch.manual_seed(5)
    loss = loss_of(stage, batch)
    torch.manual_seed(5)
    lesson, parts = Lesson(net, batch), []
    for _ in range(2):
        leave = torch.randint(1, 5, batch.targets.shape)
        with torch.no_grad():
            taught = lesson.taught(lesson.source(), leave)
            own = leave[batch.targets != -100]
            states = torch.stack(taught.words)[own - 1, torch.arange(len(own))]  # after each word's own exit
            parts.append(F.cross_entropy(exits(net)[0](states), taught.targets))
    assert loss == pytest.approx(float(sum(parts)) / 2, rel=1e-5)


@pytest.mark.parametrize("kind", tiny.SEQ2SEQ)
def test_words_that_left_are_seen_and_not_computed(kind: str) -> None:
    net, _ = made(kind=kind)
    block, (x, source) = decoder_of(net).blocks[0], (torch.randn(3, 5, 32), torch.randn(3, 5, 32))
    going = torch.rand(3, 5) < 0.5
    some_of, everyone = block(x, source, None, going), block(x, source, None)
    assert torch.equal(some_of[~going], x[~going]) and torch.allclose(some_of[going], everyone[going], atol=1e-5)
    assert torch.equal(block(x, source, None, torch.zeros(3, 5, dtype=torch.bool)), x)


def test_vocabularies_of_their_own_answer_in_the_order_of_words() -> None:
    net, _ = made("threshold", tied=False)
    stage = Mixed(net, weights=(0.25,) * 4)
    words, leave = torch.randn(7, 32), torch.tensor([4, 1, 2, 1, 4, 3, 2])
    said = stage._said(words, leave)
    for place, block in enumerate(leave.tolist()):
        assert torch.allclose(said[place], exits(net)[block - 1](words[place]), atol=1e-6)


def test_the_unit_learns_from_the_oracle() -> None:
    net, options = made(alpha=0.5, smoothing=0.0)
    first, second = decoder_stages(net, options)
    batch = some()
    lesson = Lesson(net, batch)
    with torch.no_grad():
        taught = lesson.taught(lesson.source())
        seen = marks(net, taught, 0.0, range(1, 5))
        oracle = correctness_oracle(seen.right, taught.lengths, 0.1)
        unit = net.added["halting_unit"]
        stops = torch.stack([unit(place, states) for place, states in enumerate(taught.words[:-1])], 1)
        expected = loss_of(first, batch) + 0.5 * float(geometric_loss(stops, oracle))
    assert loss_of(second, batch) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("training", ["aligned", "mixed"])
@pytest.mark.parametrize("form", ["sequence", "multinomial", "geometric", "threshold"])
def test_gradients_reach_exactly_the_declared_parameters(form: str, training: str) -> None:
    net, options = made(form, training=training, tied=form != "geometric", oracle="likelihood")
    for stage in decoder_stages(net, options):
        for _, parameter in net.named_parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        for _, parameter in stage.trainable():
            parameter.requires_grad_(True)
        stage.set_train_mode()
        torch.manual_seed(0)
        stage.step(some(), lambda loss: loss.backward())
        reached = {name for name, p in net.named_parameters() if p.grad is not None}
        assert reached == {name for name, _ in stage.trainable()}
        assert any(name.startswith("added.halting_unit") for name in reached) is isinstance(stage, Deciding)


def test_detached_units_do_not_pull_on_the_model() -> None:
    gradients = []
    for detach in (False, True):
        net, options = made(detach=detach)
        decoder_stages(net, options)[1].step(some(), lambda loss: loss.backward())
        gradients.append(net.hf.get_parameter("model.decoder.layers.0.fc1.weight").grad)
    assert gradients[0] is not None and gradients[1] is not None
    assert not torch.allclose(gradients[0], gradients[1])


def test_batches_of_sentences_are_even_in_tokens_and_as_many_every_epoch() -> None:
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
