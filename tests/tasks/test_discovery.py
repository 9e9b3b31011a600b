"""What holds for every task: it is found by its file, survives JSON, and its loss leads to its metric."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
import torch
import transformers

from offramp import tasks
from offramp.errors import OfframpError
from tests.factories import bytelevel_tokenizer, wordpiece_tokenizer

TEXTS = ["a good film .", "not very good", "the man lives in paris and saw it"]
ANSWER = {"text": ["good"], "answer_start": [2]}
ROWS: dict[str, list[dict[str, Any]]] = {
    "classification": [{"text": text, "label": index % 2} for index, text in enumerate(TEXTS)],
    "multi_label": [{"text": text, "labels": ["a", "b"][:index]} for index, text in enumerate(TEXTS)],
    "regression": [{"text": text, "label": index / 2} for index, text in enumerate(TEXTS)],
    "tagging": [{"tokens": text.split(), "tags": ["O", "B-PER"] + ["O"] * len(text.split()[2:])} for text in TEXTS],
    "question_answering": [
        {"question": "what is it ?", "context": TEXTS[0], "answers": ANSWER},
        {"question": "who ?", "context": TEXTS[1], "answers": {"text": [], "answer_start": []}},
        {"question": "who saw it ?", "context": TEXTS[2], "answers": {"text": ["the man"], "answer_start": [0]}},
    ],
    "masked_lm": [{"text": text} for text in TEXTS],
    "translation": [{"src": text, "tgt": text} for text in TEXTS],
}
SCORING = [
    name for name in tasks.names() if tasks.get(name).kind != "sequence"
]  # tasks whose predictions come from one pass


def task_of(name: str, tokenizer: Any = None) -> Any:
    return tasks.get(name).from_rows(ROWS[name], "train.jsonl").with_tokenizer(tokenizer or wordpiece_tokenizer())


def test_rows_here_cover_every_task() -> None:
    assert tasks.names() == sorted(ROWS)


@pytest.mark.parametrize("name", [name for name in tasks.names() if name != "masked_lm"])
def test_a_task_is_recognised_by_its_rows(name: str) -> None:
    assert tasks.name_for({"id": 7, **ROWS[name][0]}) == name


def test_pairs_and_rows_without_labels_are_taken_for_classification() -> None:
    assert tasks.name_for({"text_a": "a", "text_b": "b", "label": 1}) == "classification"
    assert tasks.name_for({"text_a": "a", "text_b": "b", "label": 1.0}) == "regression"
    assert tasks.name_for({"sentence": "a"}) == tasks.name_for({"text": "a"}) == "classification"


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (["5.000", "3.8", "0.2"], "regression"),  # of CSV, where all labels are texts
        ([5, 3.8], "regression"),
        (["1.0", "0.0"], "classification"),  # whole numbers
        (["good", "nan"], "classification"),
        ([1, 0], "classification"),
    ],
)
def test_a_task_is_guessed_by_the_first_rows(labels: list[Any], name: str) -> None:
    assert tasks.name_for_rows({"text": "a", "label": label} for label in labels) == name


def test_get_lists_the_known_tasks_for_an_unknown_name() -> None:
    for name in ("nosuch", "_loss", "", "os"):
        with pytest.raises(
            OfframpError, match="classification, masked_lm, multi_label, question_answering, regression"
        ):
            tasks.get(name)


def test_get_names_the_new_name_of_a_renamed_task() -> None:
    with pytest.raises(OfframpError, match="question_answering"):
        tasks.get("span")


@pytest.mark.parametrize("name", tasks.names())
def test_a_task_is_a_frozen_dataclass_and_equal_after_json(name: str) -> None:
    task = task_of(name)
    assert task.name == name and isinstance(task, tasks.Task)
    again = tasks.get(name).from_json(json.loads(json.dumps(task.to_json())))
    assert again == task and again.outputs == task.outputs
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.anything = 1
    task.check_rows(ROWS[name], "dev.jsonl")
    task.check_inputs(ROWS[name], "input.jsonl")


@pytest.mark.parametrize("name", SCORING)
def test_the_head_of_transformers_has_the_outputs_of_the_task(name: str) -> None:
    task = task_of(name)
    shape = {
        "vocab_size": 90,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    config = transformers.BertConfig(**shape, **task.config())
    model = getattr(transformers, task.auto_class).from_config(config)
    (ids,) = torch.tensor([[2, 9, 10, 3]]).unsqueeze(0)
    output = model(ids)
    logits = output.start_logits if name == "question_answering" else output.logits
    assert logits.shape[-1] == (4 if name == "question_answering" else task.outputs or 90)
    assert logits.shape[:-1] == ((1,) if task.kind == "row" or name == "question_answering" else (1, 4))


@pytest.mark.parametrize("make", [wordpiece_tokenizer, bytelevel_tokenizer])
@pytest.mark.parametrize("name", SCORING)
def test_minimising_the_loss_gives_the_best_metric(name: str, make: Any) -> None:
    """With logits as free parameters, minimising the task's loss must lead to the best value of its metric."""
    task, rows, tokenizer = task_of(name, make()), ROWS[name], make()
    encoded = task.encode(tokenizer, rows, 32)
    pairs = [task.inputs_and_targets(item, rows[item.example], random.Random(i)) for i, item in enumerate(encoded)]
    lengths = torch.tensor([len(ids) for ids, _ in pairs])
    targets = task.stack_targets([target for _, target in pairs])
    count = len(encoded) if task.kind == "row" else int(lengths.sum())
    logits = torch.zeros(count, task.outputs or len(tokenizer), requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.5)
    first = task.loss(logits, targets, lengths)
    for _ in range(60):
        optimiser.zero_grad()
        task.loss(logits, targets, lengths).backward()
        optimiser.step()
    per_row = task.loss(logits, targets, lengths, "rows")
    assert per_row.shape == (len(encoded),) and per_row.dtype == torch.float32
    assert per_row.max() < 0.05 < first
    values = logits.detach().numpy()
    split = list(values) if task.kind == "row" else [part.numpy() for part in logits.detach().split(lengths.tolist())]
    predictions = task.predictions(rows, encoded, split)
    assert len(predictions) == len(rows) and json.dumps(predictions)
    by_loss = task.metrics_from_losses(per_row.tolist())
    score = (by_loss if task.scores_by_loss else task.metrics(rows, predictions))[task.metric]
    assert score == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", SCORING)
def test_losses_are_float32_under_autocast_and_independent_of_the_batch(name: str) -> None:
    task, rows = task_of(name), ROWS[name]
    encoded = task.encode(wordpiece_tokenizer(), rows, 32)
    pairs = [task.inputs_and_targets(item, rows[item.example], random.Random(i)) for i, item in enumerate(encoded)]
    lengths = torch.tensor([len(ids) for ids, _ in pairs])
    width = task.outputs or len(wordpiece_tokenizer())
    parts = [torch.randn(1 if task.kind == "row" else n, width).bfloat16() for n in lengths.tolist()]
    with torch.autocast("cpu", torch.bfloat16):
        together = task.loss(torch.cat(parts), task.stack_targets([t for _, t in pairs]), lengths, "rows")
        alone = [
            task.loss(part, task.stack_targets([target]), lengths[i : i + 1])
            for i, (part, (_, target)) in enumerate(zip(parts, pairs, strict=True))
        ]
    assert together.dtype == torch.float32
    torch.testing.assert_close(together, torch.stack(alone))


@pytest.mark.parametrize("name", [name for name in tasks.names() if "distribution" in tasks.get(name).provides])
def test_distributions_name_the_row_of_each_choice(name: str) -> None:
    task = task_of(name)
    lengths = torch.tensor([3, 1, 2])
    count = 3 if task.kind == "row" else 6
    logits = torch.randn(count, task.outputs or 7)
    spread, owner = task.distributions(logits, lengths, torch.tensor([True, False, True, True, False, True]))
    assert torch.allclose(spread.softmax(-1).sum(-1), torch.ones(len(spread)))
    several = {"question_answering": [0, 0, 1, 1, 2, 2], "multi_label": [0, 0, 1, 1, 2, 2]}  # start and end; two labels
    expected = several.get(name, [0, 1, 2] if task.kind == "row" else [0, 0, 1, 2])
    found = [0, 1, 2] if owner is None else owner.tolist()
    assert found == expected and len(found) == len(spread)


@pytest.mark.parametrize("name", tasks.names())
def test_no_rows_give_no_predictions(name: str) -> None:
    task = task_of(name)
    task.check_inputs([], "stdin")
    assert task.encode(wordpiece_tokenizer(), [], 16) == [] and task.predictions([], [], []) == []
