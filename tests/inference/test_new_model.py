"""New models: any family, a borrowed or a learned tokenizer; pretrained, then fine-tuned; bad shapes are refused."""

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
from tests import runs, tiny
from tests.tiny_tokenizers import wordpiece

SMALL = {"hidden_size": "32", "num_attention_heads": "4", "intermediate_size": "48", "embedding_size": "16"}
SMALL |= {"num_hidden_layers": "4", "num_hidden_groups": "2", "max_position_embeddings": "64", "relative_reach": "8"}


def test_any_family_can_be_made(tmp_path: Path) -> None:
    for kind in ("alberta", "bert"):
        shape = {key: value for key, value in SMALL.items() if kind == "alberta" or key in tiny.SHAPE}
        model = create_model(kind, tmp_path / kind, wordpiece(), shape)
        with quiet_transformers():
            again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / kind)
        assert again.config.vocab_size == len(wordpiece()) and again.config.hidden_size == 32
        ids = tiny.rows([5, 9])
        assert torch.equal(tiny.padded(again.eval(), ids).logits, tiny.padded(model.eval(), ids).logits)


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
def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, shape: dict[str, str], match: str) -> None:
    with pytest.raises(OfframpError, match=match):
        create_model("alberta", tmp_path / "new", wordpiece(), {**shape})
    assert not (tmp_path / "new").exists()


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with pytest.raises(OfframpError, match="choose another --out"):
        create_model("alberta", tmp_path / "kept", wordpiece(), SMALL)


def test_a_tokenizer_is_learned_from_texts() -> None:
    words = train_wordpiece_tokenizer([row["text"] for row in runs.rows("masked_lm", 60)], 200)
    assert words.pad_token_id == 0 and len(words) <= 200
    encoded = words("the film", "is good")
    assert words.convert_ids_to_tokens(encoded["input_ids"])[:3] == ["[CLS]", "the", "film"]
    assert encoded["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    with pytest.raises(OfframpError, match="100 or more"):
        train_wordpiece_tokenizer(["a"], 3)


def test_pretraining_teaches_words_and_fine_tuning_goes_on_from_there(tmp_path: Path) -> None:
    """The second training moves nothing (its rates are next to zero), so what it ends with is what it was given."""
    create_model("alberta", tmp_path / "new", wordpiece(), SMALL)
    text, out = runs.jsonl(tmp_path / "text.jsonl", runs.rows("masked_lm", 64)), tmp_path / "pretrained"
    quick = Schedule(epochs=4, batch_size=8, lr=0.01, precision="fp32")
    given = {"task": "masked_lm", "method": "alberta", "options": {"start": 2.0}, "schedule": quick}
    loss = [entry["loss"] for entry in run_training(TrainRequest(str(tmp_path / "new"), text, str(out), **given)).log]
    assert loss[-1] < 0.9 * loss[0], "the loss falls"
    still = {"schedule": Schedule(1, 48, 1e-9), "options": {"start": 2.0, "head_lr": 1e-9}}
    base, tuned = load_run(out), load_run(runs.train(str(out), tmp_path, "alberta", **still))
    words, before = (m.network.hf.base_model.embeddings.word_embeddings.weight for m in (tuned, base))
    assert torch.allclose(words, before, atol=1e-6)
    guess, taught = (m.network.added["exit_unit"].state_dict() for m in (tuned, base))
    assert all(torch.allclose(guess[name], taught[name], atol=1e-6) for name in taught)
