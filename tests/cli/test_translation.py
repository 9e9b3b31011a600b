"""Translation from the command line: a model from scratch learns to copy, and most words leave early."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import offramp
from offramp.inference.run_folder import load_run
from tests import factories
from tests.cli.calls import Call


def test_a_copy_task_is_learned_and_most_words_leave_early(translation_run: Path) -> None:
    points = json.loads((translation_run / "points.json").read_text())
    assert points["metric"] == "bleu" and points["scale"] == 100.0 and points["points"][-1]["score"] > 95.0
    model = offramp.load(translation_run)
    rows = factories.translation_rows(50, seed=7)
    result = model.predict([row["src"] for row in rows])
    assert np.mean([one["text"] == row["tgt"] for one, row in zip(result, rows, strict=True)]) > 0.9
    exits = [block for one in result for block in one["exits"]]
    assert np.mean([block == 1 for block in exits]) > 0.8, "most words leave after the first of three blocks"
    full = model.predict([row["src"] for row in rows], budget=1.0)
    assert {one["exit_layer"] for one in full} == {3}
    assert sum(one["macs"] for one in result) < 0.75 * sum(one["macs"] for one in full)


def test_plain_transformers_opens_the_folder_and_gives_the_full_model(translation_run: Path) -> None:
    model = transformers.MarianMTModel.from_pretrained(translation_run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(translation_run)
    texts = [row["src"] for row in factories.translation_rows(10, seed=8)]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    expected = tokenizer.batch_decode(model.eval().generate(**batch, max_new_tokens=20), skip_special_tokens=True)
    predictions = offramp.load(translation_run).predict(texts, budget=1.0)
    assert [one["text"] for one in predictions] == [text.strip() for text in expected]


def test_save_and_load_change_nothing_and_batches_change_nothing(translation_run: Path) -> None:
    texts = [row["src"] for row in factories.translation_rows(20, seed=9)]
    one, other = offramp.load(translation_run), offramp.load(translation_run)
    together = one.predict(texts, batch_size=20)
    assert other.predict(texts, batch_size=1) == together
    first, second = load_run(translation_run), load_run(translation_run)
    for (name, a), (_, b) in zip(first.network.named_parameters(), second.network.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_calibrate_eval_predict_and_info_of_a_translation_run(call: Call, translation_run: Path) -> None:
    shutil.copytree(translation_run, "run")
    data = factories.write_jsonl(Path("new.jsonl"), factories.translation_rows(30, seed=3))
    result = call("calibrate", "run", "--data", data)
    assert result.code == 0 and "bleu" in result.out
    result = call("eval", "run", "--data", data, "--budget", 0.9, "--json", "cell.json")
    cell = json.loads(Path("cell.json").read_text())
    assert result.code == 0 and cell["metrics"]["bleu"] > 80 and cell["macs"]["share_of_full"] < 1
    assert call("eval", "run", "--data", data, "--set", "depth=2", "--set", "beams=3", "--json", "cell.json").code == 0
    assert json.loads(Path("cell.json").read_text())["mean_exit_layer"] == 2.0
    Path("lines.txt").write_text("a b c\nd e\nf f f f\n")
    assert call("predict", "run", "--input", "lines.txt", "--output", "lines-out.txt").code == 0
    lines = Path("lines-out.txt").read_text().splitlines()
    answers = [json.loads(line) for line in call("predict", "run", "--input", "lines.txt").out.splitlines()]
    assert [answer["text"] for answer in answers] == lines and len(lines) == 3 and lines[0][0] == "a"
    assert set(answers[0]) == {"text", "pieces", "exits", "exit_layer", "tokens_kept", "macs"}
    refused = call("calibrate", "run", "--data", data, "--risk", 0.1)
    assert refused.code == 2 and "translation" in refused.err
    refused = call("calibrate", "run", "--data", data, "--latency", "5ms")
    assert refused.code == 2 and "translation" in refused.err
    refused = call("bench", "run", "--data", data, "--against", "hf", "--no-memory")
    assert refused.code == 2 and "translation" in refused.err
    assert call("info", "run").code == 0


def translation_words(folder: Path, **options: Any) -> list[str]:
    given = {
        "model": factories.translation_config(folder),
        "train": factories.write_jsonl(folder / "train.jsonl", factories.translation_rows(24)),
        "task": "translation",
        "method": "full",
        "out": "run",
        "epochs": 1,
        **options,
    }
    return ["train", *(word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value)))]


def test_train_full_and_init_from_it(call: Call, tmp_path: Path) -> None:
    assert call(*translation_words(tmp_path, method="full")).code == 0
    result = call(*translation_words(tmp_path, method="depth_adaptive", init="run", out="deep", set="form=sequence"))
    assert result.code == 0 and "aligned, epoch 1" in result.err  # a plain model has its last exit only
    assert "exits and halting, epoch 1" in result.err
    assert json.loads(Path("deep/offramp.json").read_text())["options"]["form"] == "sequence"
    result = call(*translation_words(tmp_path, method="depth_adaptive", init="deep", out="more", set="form=sequence"))
    assert result.code == 0 and "exits and halting, epoch 1" in result.err and "aligned" not in result.err


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unpaired": ({"train": '{"src": "a", "tgt": "b"}\n{"src": "a"}\n'}, ["row 2", "unpaired", "'tgt' is missing"]),
    "empty source": ({"train": '{"src": "", "tgt": "b"}\n{"src": "a", "tgt": "b"}\n'}, ["row 1", "'src' is empty"]),
    "too long": ({"train": '{"src": "%s", "tgt": "b"}\n' % ("a " * 40) * 4}, ["row 1", "pieces, the model takes 24"]),
    "another method": ({"method": "deebert"}, ["'deebert'", "word by word", "depth_adaptive, full"]),
    "another task": ({"task": "classification"}, ["tiny.json", "classification"]),
    "no such file": ({"model": "none.json"}, ["none.json", "no such file"]),
    "no model type": ({"model": '{"d_model": 8}'}, ["model_type"]),
    "an encoder": ({"model": '{"model_type": "bert"}'}, ["model.json"]),
    "a wrong shape": ({"model": json.dumps({**factories.TRANSLATION_SHAPE, "d_model": 30})}, ["model.json"]),
}


@pytest.mark.parametrize("what", BAD)
def test_train_refuses_bad_input(call: Call, tmp_path: Path, what: str) -> None:
    options, expected = BAD[what]
    options = dict(options)
    for name, file in (("train", "bad.jsonl"), ("model", "model.json")):
        if options.get(name, "").startswith("{"):
            Path(file).write_text(options[name])
            options[name] = file
    if options.get("task") == "classification":
        options["train"] = factories.write_jsonl(tmp_path / "rows.jsonl", factories.labelled_rows("classification", 8))
    result = call(*translation_words(tmp_path, **options))
    assert result.code == 2 and all(word in result.err for word in expected), result.err


def test_train_refuses_a_tokenizer_with_more_tokens_than_the_model(
    call: Call, translation_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(translation_run, "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    tokenizer.add_tokens([f"piece{number}" for number in range(200)])
    tokenizer.save_pretrained("model")
    result = call(*translation_words(tmp_path, model="model", method="full"))
    assert result.code == 2 and "tokenizer" in result.err


def test_predict_refuses_a_source_that_is_too_long_by_its_row(call: Call, translation_run: Path) -> None:
    Path("lines.txt").write_text("a b\n" + "a " * 40 + "\n")
    result = call("predict", translation_run, "--input", "lines.txt", "--strict")
    assert result.code == 2 and "lines.txt" in result.err and "line 2" in result.err and "takes 24" in result.err


def test_a_compiled_encoder_gives_the_same_predictions(translation_run: Path) -> None:
    """What `engine="auto"` picks on a CPU."""
    texts = [row["src"] for row in factories.translation_rows(12, seed=9)]
    compiled = offramp.load(translation_run, engine="openvino")
    assert (
        compiled.predict(texts) == compiled.predict(texts, batch_size=1) == offramp.load(translation_run).predict(texts)
    )
