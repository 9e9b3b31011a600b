"""Depths by reconstruction: against Hugging Face's own masked model, one word at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from offramp.core.packed import Packed, pack
from offramp.errors import OfframpError
from offramp.methods.faster_dat.masked_model import MaskedModel, masked_model_loss
from offramp.methods.faster_dat.reconstruction import MaskedPasses, estimate_depths
from tests import factories

IDS = [[2, 10, 11, 12, 3], [2, 20, 21, 22, 23, 24, 3], [2, 10, 3], [2, 3]]
WORDS = [[-1, 0, 0, 1, -1], [-1, 0, 1, 2, 2, 3, -1], [-1, 0, -1], [-1, -1]]
LAMBDAS = torch.tensor([0.0, 0.02, 10.0])


def batch() -> Packed:
    return pack(IDS).with_tokens(word=torch.tensor([word for row in WORDS for word in row]))


@pytest.fixture(scope="module")
def model(base: str) -> MaskedModel:
    masked = MaskedModel(None, used_at_run_time=False)
    masked.load(base)
    masked.eval()
    return masked


def depths_by_hugging_face(model: MaskedModel) -> list[list[int]]:
    """Mask one word, run Hugging Face's model, apply its head to the states of every layer."""
    depths = []
    for ids, words in zip(IDS, WORDS, strict=True):
        for word in range(max(words) + 1):
            places = [place for place, own in enumerate(words) if own == word]
            masked = [int(model.mask_id) if place in places else token for place, token in enumerate(ids)]
            with torch.no_grad():
                states = model.model(torch.tensor([masked]), output_hidden_states=True).hidden_states[1:]
                logits = [model.model.cls(layer)[0, places] for layer in states]
            truth = torch.tensor([ids[place] for place in places])
            losses = torch.stack([F.cross_entropy(layer_logits, truth) for layer_logits in logits])
            depths.append([int((losses + p * torch.arange(3)).argmin()) + 1 for p in LAMBDAS])
    return depths


def test_one_mask_per_pass_equals_hugging_face(model: MaskedModel) -> None:
    depths = estimate_depths(model, batch(), MaskedPasses(3, spacing=0), LAMBDAS)
    assert depths.tolist() == depths_by_hugging_face(model)
    assert depths[:, 2].tolist() == [1.0] * 7  # with a large penalty every depth is 1


def test_spaced_masks_cover_every_word_once(model: MaskedModel) -> None:
    passes: list[int] = []
    far = estimate_depths(
        model, batch(), MaskedPasses(3, spacing=4), LAMBDAS, lambda rows, lengths, counts: passes.extend(counts)
    )
    assert far.tolist() == depths_by_hugging_face(model)  # no row has more than four words
    assert sum(map(int, passes)) == 9 and len(passes) == 2 + 4 + 1
    near: list[int] = []
    estimate_depths(
        model, batch(), MaskedPasses(3, spacing=2), LAMBDAS, lambda rows, lengths, counts: near.extend(counts)
    )
    assert sum(map(int, near)) == 9 and len(near) == 2 + 2 + 1


def test_selected_words_are_masked_in_the_fewest_passes(model: MaskedModel) -> None:
    selected, passes = torch.tensor([False, True, True, False, False, True, False]), list[int]()
    some = estimate_depths(
        model, batch(), MaskedPasses(3, 3, selected), LAMBDAS, lambda rows, lengths, counts: passes.extend(counts)
    )
    assert list(map(int, passes)) == [1, 2]  # a word of the first row; of the second, the first and the last together
    lone, every = (
        estimate_depths(model, batch(), MaskedPasses(3, 0, selected), LAMBDAS),
        torch.tensor(depths_by_hugging_face(model), dtype=torch.float),
    )
    assert torch.equal(some[1], every[1]) and torch.equal(lone[selected], every[selected])
    assert bool((some[~selected] == 1).all()) and bool((lone[~selected] == 1).all())


def test_masked_model_loss_trains_every_layer(model: MaskedModel) -> None:
    torch.manual_seed(0)
    loss = masked_model_loss(model, batch(), layers=3)
    loss.backward()
    assert loss.item() > 0.0
    layer = model.model.bert.encoder.layer[2].output.dense.weight
    assert model.mask_id == 4 and layer.grad is not None and bool((layer.grad != 0).any())
    model.zero_grad()
    nothing = pack([[2, 3]]).with_tokens(word=torch.tensor([-1, -1]))
    assert masked_model_loss(model, nothing, layers=3).item() == 0.0


def test_tied_weights_are_stored_once_and_loaded_tied(model: MaskedModel) -> None:
    state = model.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    fresh = MaskedModel(model.model.config, used_at_run_time=True)
    fresh.load_state_dict(state)
    fresh.eval()
    assert estimate_depths(fresh, batch(), MaskedPasses(3, 0), LAMBDAS).tolist() == depths_by_hugging_face(model)
    assert fresh.model.cls.predictions.decoder.weight is fresh.model.bert.embeddings.word_embeddings.weight
    empty = MaskedModel(model.model.config, used_at_run_time=False)
    empty.load_state_dict(MaskedModel(None, used_at_run_time=False).state_dict())
    assert empty.model is None


def test_checkpoint_without_a_masked_head_gets_one_with_a_warning(tmp_path: Path) -> None:
    factories.hf_model("bert", vocab_size=len(factories.wordpiece_tokenizer())).save_pretrained(tmp_path)
    factories.wordpiece_tokenizer().save_pretrained(tmp_path)
    masked = MaskedModel(None, used_at_run_time=False)
    with pytest.warns(UserWarning, match="tied to its embeddings is added"):
        masked.load(str(tmp_path))
    assert masked.has_new_head
    assert masked.model.cls.predictions.decoder.weight is masked.model.bert.embeddings.word_embeddings.weight


def test_run_folder_gets_the_head_of_the_model_it_started_from(
    model: MaskedModel, trained: Path, base: str, tmp_path: Path
) -> None:
    masked = MaskedModel(model.model.config, used_at_run_time=False)
    masked.load(str(trained), base)
    theirs = model.model.cls.predictions.transform.dense.weight
    assert not masked.has_new_head and torch.equal(masked.model.cls.predictions.transform.dense.weight, theirs)
    moved = Path(shutil.copytree(trained, tmp_path / "run"))
    about = json.loads((moved / "offramp.json").read_text())
    for missing in ("/no/such/folder", str(factories.model_folder(tmp_path / "other", hidden_size=64))):
        (moved / "offramp.json").write_text(json.dumps({**about, "base_model": missing}))
        with pytest.warns(UserWarning, match="run has no masked-language head"):
            masked.load(str(moved))
        assert masked.has_new_head and masked.model.config.hidden_size == model.model.config.hidden_size


@pytest.mark.parametrize("source", [None, "/no/such/folder"])
def test_missing_checkpoint_is_refused(source: str | None) -> None:
    with pytest.raises(OfframpError, match="estimation=mi"):
        MaskedModel(None, used_at_run_time=False).load(source)
