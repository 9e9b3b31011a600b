"""`train(from_scratch=True)`: random weights of a family, a tokenizer of its own or another model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from offramp.commands.train import TrainedRun, train
from offramp.data.tokenizer_training import train_wordpiece_tokenizer
from offramp.errors import OfframpError
from offramp.inference.new_model import create_model
from tests import factories

SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2,
         "max_position_embeddings": 64}  # fmt: skip


def train_tiny(folder: Path, kind: str = "masked_lm", **more: Any) -> TrainedRun:
    """Train a tiny BERT from scratch for one epoch on rows of a kind, in `folder/run` unless `out` is given."""
    rows = factories.write_jsonl(folder / "train.jsonl", factories.labelled_rows(kind, 40))
    given = {
        "model": "bert",
        "from_scratch": True,
        "out": folder / "run",
        "task": kind,
        "shape": SHAPE,
        "method": "full",
    }
    given |= more
    return train(train=rows, epochs=1, batch_size=8, **given)


def test_a_tokenizer_is_learned_from_the_training_rows(tmp_path: Path) -> None:
    trained = train_tiny(tmp_path, vocabulary=150)
    assert len(trained.model.tokenizer) <= 150 and trained.model.base_model == "bert"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["hidden_size"] == 32
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["model"] == "bert"
    assert recipe["new_model"] == {
        "tokenizer": None,
        "vocabulary": 150,
        "shape": {name: str(size) for name, size in SHAPE.items()},
    }


def test_embeddings_that_began_from_scratch_are_fine_tuned_at_a_rate_of_their_own(base: str, tmp_path: Path) -> None:
    def rate(folder: str) -> float:
        recipe = yaml.safe_load((tmp_path / folder / "run" / "recipe.yaml").read_text())
        return float(recipe["schedule"]["embedding_lr"])

    for folder in ("pretrained", "tuned", "again", "untrained", "other", "given"):
        (tmp_path / folder).mkdir()
    train_tiny(tmp_path / "pretrained", vocabulary=150)
    losses = json.loads((tmp_path / "pretrained" / "run" / "losses.json").read_text())["stages"]
    assert [len([loss for loss in stage if loss is not None]) for stage in losses] == [5], "a point for every step"
    began = {"from_scratch": False, "shape": None, "kind": "classification"}
    train_tiny(tmp_path / "tuned", model=tmp_path / "pretrained" / "run", **began)
    train_tiny(tmp_path / "again", model=None, init=tmp_path / "tuned" / "run", method="deebert", **began)
    train_tiny(tmp_path / "untrained", "classification", vocabulary=150)
    train_tiny(tmp_path / "other", model=base, **began)
    train_tiny(tmp_path / "given", model=tmp_path / "pretrained" / "run", embedding_lr=0.01, **began)
    found = {folder: rate(folder) for folder in ("pretrained", "tuned", "again", "untrained", "other", "given")}
    assert found == {"pretrained": 0.0, "tuned": 2e-3, "again": 2e-3, "untrained": 2e-3, "other": 0.0, "given": 0.01}


def test_a_continued_training_keeps_its_learned_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[int] = []

    def learn(texts: list[str], vocabulary: int) -> Any:
        learned.append(vocabulary)
        return train_wordpiece_tokenizer(texts, vocabulary - len(learned) + 1)  # another one every time

    def interrupt(**news: Any) -> None:
        if news.get("step") == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("offramp.commands.train.train_wordpiece_tokenizer", learn)
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tmp_path, vocabulary=150, save_seconds=0.0, listener=interrupt)
    trained = train_tiny(tmp_path, vocabulary=150)
    assert len(learned) == 1 and len(trained.model.tokenizer) == trained.model.network.hf.config.vocab_size


def test_another_models_tokenizer_is_taken(base: str, tmp_path: Path) -> None:
    trained = train_tiny(tmp_path, "classification", tokenizer=base, method="deebert")
    assert trained.model.tokenizer.get_vocab() == factories.wordpiece_tokenizer().get_vocab()


def test_weights_are_those_of_a_model_created_with_the_same_seed(tmp_path: Path) -> None:
    trained = train_tiny(tmp_path, vocabulary=150, seed=3, lr=1e-12)
    texts = [row["text"] for row in factories.labelled_rows("masked_lm", 40)]
    assert len(train_wordpiece_tokenizer(texts, 150)) == len(trained.model.tokenizer)
    created = create_model(
        "bert", tmp_path / "new", trained.model.tokenizer, {name: str(size) for name, size in SHAPE.items()}, 3
    )
    before, after = (m.base_model.embeddings.word_embeddings.weight for m in (created, trained.model.network.hf))
    assert torch.allclose(before, after, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"model": "gpt2"}, "'gpt2'"),
        ({"init": "runs/other"}, "--init runs/other"),
        ({"tokenizer": "minilm", "vocabulary": 200}, "both --tokenizer and --vocabulary"),
        ({"from_scratch": False}, "--shape"),
        ({"from_scratch": False, "shape": None, "tokenizer": "minilm"}, "--tokenizer"),
        ({"shape": {"hidden": 3}}, "no such entry"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, given: dict[str, Any], match: str) -> None:
    with pytest.raises(OfframpError, match=match):
        train_tiny(tmp_path, **given)
    assert not (tmp_path / "run").exists()
