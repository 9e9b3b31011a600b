"""Models whose family is a variant of one that is served: equal to Hugging Face, or refused with the known families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from offramp import backbones
from offramp.core.packed import pack
from offramp.errors import OfframpError
from tests import factories
from tests.backbones.test_hugging_face import LENGTHS, states_of

SERVED = {"camembert": {"pad_token_id": 1}, "xlm-roberta": {"pad_token_id": 1}, "bert": {"vocab_size": 119}}
REFUSED = ["xlm-roberta-xl", "xlnet", "longformer", "gpt2", "t5"]


def build(model_type: str, auto_class: str, **entries: Any) -> Any:
    """Return a tiny random model of a family by its Hugging Face name."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**factories.SHAPE, "num_labels": 3, **entries})
    hf = getattr(transformers, auto_class).from_config(config)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return hf.eval()


@pytest.mark.parametrize("task", ["classification", "tagging"])
@pytest.mark.parametrize("model_type", SERVED)
def test_variants_equal_hugging_face(model_type: str, task: str) -> None:
    model = build(model_type, factories.AUTO_CLASSES[task], **SERVED[model_type])
    ids = factories.token_ids(LENGTHS)
    expected = factories.hf_padded(model, ids).logits
    with torch.no_grad():
        packed = pack(ids).with_states(states_of(backbones.encoder(model), ids))
        logits = backbones.head(model, factories.AUTO_CLASSES[task]).apply(packed)
    parts = logits.split(1 if task == "classification" else LENGTHS)
    for row, part in enumerate(parts):
        own = expected[row][None] if task == "classification" else expected[row, : LENGTHS[row]]
        assert torch.allclose(part, own, atol=2e-5), row


@pytest.mark.parametrize("model_type", REFUSED)
def test_other_families_are_refused_with_the_known_ones(model_type: str) -> None:
    with pytest.raises(OfframpError) as caught:
        backbones.find(model_type)
    known = ["bert", "camembert", "deberta-v2", "mpnet", "xlm-roberta"]
    assert repr(model_type) in str(caught.value) and all(name in str(caught.value) for name in known)
