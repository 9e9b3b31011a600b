"""New models: any family, a given or a trained tokenizer; pretraining, then fine-tuning; bad shapes are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from offramp.commands.train import TrainRequest, run_training
from offramp.data.tokenizer_training import train_wordpiece_tokenizer
from offramp.errors import OfframpError
from offramp.inference.new_model import create_model
from offramp.inference.run_folder import load_run, quiet_transformers
from offramp.training.schedule import Schedule
from tests import factories

SMALL = {"hidden_size": "32", "num_attention_heads": "4", "intermediate_size": "48", "embedding_size": "16"}
SMALL |= {"num_hidden_layers": "4", "num_hidden_groups": "2", "max_position_embeddings": "64", "relative_reach": "8"}


@pytest.mark.parametrize("family", ["alberta", "bert"])
def test_create_model_writes_a_model_that_transformers_opens(tmp_path: Path, family: str) -> None:
    shape = {key: value for key, value in SMALL.items() if family == "alberta" or key in factories.SHAPE}
    model = create_model(family, tmp_path / family, factories.wordpiece_tokenizer(), shape)
    with quiet_transformers():
        again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / family)
    assert again.config.vocab_size == len(factories.wordpiece_tokenizer()) and again.config.hidden_size == 32
    ids = factories.token_ids([5, 9])
    assert torch.equal(factories.hf_padded(again.eval(), ids).logits, factories.hf_padded(model.eval(), ids).logits)


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ({"hidden": "3"}, "no such entry"),
        ({"vocab_size": "3"}, "the tokenizer decides"),
        ({"hidden_size": "wide"}, "give a int, like 768"),
        ({"absolute_positions": "perhaps"}, "give a bool, like True"),
        ({"num_attention_heads": "7"}, "7 heads do not divide"),
        ({"num_hidden_groups": "99"}, "every group needs a layer"),
    ],
)
def test_create_model_refuses_shapes_that_do_not_fit(tmp_path: Path, shape: dict[str, str], match: str) -> None:
    with pytest.raises(OfframpError, match=match):
        create_model("alberta", tmp_path / "new", factories.wordpiece_tokenizer(), {**shape})
    assert not (tmp_path / "new").exists()


def test_create_model_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with pytest.raises(OfframpError, match="choose another --out"):
        create_model("alberta", tmp_path / "kept", factories.wordpiece_tokenizer(), SMALL)


def test_wordpiece_tokenizer_is_trained_on_texts() -> None:
    tokenizer = train_wordpiece_tokenizer([row["text"] for row in factories.labelled_rows("masked_lm", 60)], 200)
    assert tokenizer.pad_token_id == 0 and len(tokenizer) <= 200
    encoded = tokenizer("the film", "is good")
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"])[:3] == ["[CLS]", "the", "film"]
    assert encoded["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    with pytest.raises(OfframpError, match="100 or more"):
        train_wordpiece_tokenizer(["a"], 3)


def test_fine_tuning_starts_from_pretrained_words_and_depth_predictor(tmp_path: Path) -> None:
    """The second training changes nothing (its learning rates are near zero), so it ends with what it started from."""
    create_model("alberta", tmp_path / "new", factories.wordpiece_tokenizer(), SMALL)
    text = factories.write_jsonl(tmp_path / "text.jsonl", factories.labelled_rows("masked_lm", 64))
    out = tmp_path / "pretrained"
    quick = Schedule(epochs=4, batch_size=8, lr=0.01, precision="fp32")
    given = {"task": "masked_lm", "method": "alberta", "options": {"start": 2.0}, "schedule": quick}
    loss = [entry["loss"] for entry in run_training(TrainRequest(str(tmp_path / "new"), text, str(out), **given)).log]
    assert loss[-1] < 0.9 * loss[0], "the loss falls"
    frozen = {"schedule": Schedule(1, 48, 1e-9), "options": {"start": 2.0, "head_lr": 1e-9}}
    base, tuned = load_run(out), load_run(factories.run_folder(str(out), tmp_path, "alberta", **frozen))
    words, before = (m.network.hf.base_model.embeddings.word_embeddings.weight for m in (tuned, base))
    assert torch.allclose(words, before, atol=1e-6)
    tuned_unit, base_unit = (m.network.added["exit_unit"].state_dict() for m in (tuned, base))
    assert all(torch.allclose(tuned_unit[name], base_unit[name], atol=1e-6) for name in base_unit)
