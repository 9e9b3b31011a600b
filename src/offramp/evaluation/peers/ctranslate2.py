"""CTranslate2: its own encoder without padding, in fp32 or int8; the task's head runs in torch behind it.

Its converter knows BERT, RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT among the encoders that Offramp serves; other
families are refused. int8 weights have a scale per output, activations one per token, as in Offramp's own engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from offramp.errors import OfframpError, missing_package
from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits, PeerRunner
from offramp.evaluation.plain_model import load_plain_model, silence_converters, unpad_logits
from offramp.utils.files import atomic_replace

VARIANTS = (EngineVariant("ctranslate2", "fp32"), EngineVariant("ctranslate2", "int8"))
COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}
ROBERTA_LIKE = ("roberta", "xlm-roberta", "camembert")
FAMILIES = ("bert", "distilbert", *ROBERTA_LIKE)
TaskHead = Callable[[Any], Tensor]  # from the encoder's output to logits


def load_peer(model: BenchModel, variant: EngineVariant) -> PeerRunner:
    """Open the converted encoder and the head of the plain model."""
    try:
        import ctranslate2
    except ImportError as error:
        raise missing_package("bench", "ctranslate2") from error
    config = transformers.AutoConfig.from_pretrained(model.run)
    if config.model_type not in FAMILIES:
        fix = "leave ctranslate2 out of --against"
        raise OfframpError(f"a model that CTranslate2 serves ({', '.join(FAMILIES)})", config.model_type, fix)
    head, typed = task_head(model, config.model_type), config.model_type == "bert" and config.type_vocab_size > 1
    encoder = ctranslate2.Encoder(
        str(_converted(model)),
        device="cpu",
        compute_type=COMPUTE_TYPES[variant.precision],
        inter_threads=1,
        intra_threads=model.threads,
    )

    def run(batch: EncodedBatch) -> Logits:
        types = [row.types for row in batch] if typed else None
        output = encoder.forward_batch([row.ids for row in batch], token_type_ids=types)
        with torch.inference_mode():
            return unpad_logits(head(output).numpy(), batch)

    return run


def task_head(model: BenchModel, family: str) -> TaskHead:
    """Return what the plain model computes behind its encoder."""
    plain: Any = load_plain_model(model).model
    if model.auto_class == "AutoModelForQuestionAnswering":
        ends = plain.qa_outputs
        return lambda output: ends(_tensor(output.last_hidden_state))
    if model.auto_class not in ("AutoModelForSequenceClassification", "AutoModelForTokenClassification"):
        fix = "leave ctranslate2 out of --against"
        raise OfframpError("a task whose head stands behind the encoder", model.auto_class, fix)
    classifier = plain.classifier
    if model.auto_class == "AutoModelForTokenClassification" or family in ROBERTA_LIKE:
        return lambda output: classifier(_tensor(output.last_hidden_state))
    if family == "bert":
        return lambda output: classifier(_tensor(output.pooler_output))
    dense = plain.pre_classifier
    return lambda output: classifier(torch.relu(dense(_tensor(output.last_hidden_state)[:, 0])))


def _tensor(storage: Any) -> Tensor:
    return torch.from_numpy(np.asarray(storage))


def _converted(model: BenchModel) -> Path:
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):
        """Adds an entry that the converter reads and that transformers 5 no longer writes: it has no other value."""

        def load_model(self, *given: Any, **options: Any) -> Any:
            loaded = super().load_model(*given, **options)
            if not hasattr(loaded.config, "position_embedding_type"):
                loaded.config.position_embedding_type = "absolute"
            return loaded

    folder = Path(model.work) / "ctranslate2"
    if not folder.is_dir():
        with atomic_replace(folder) as fresh, silence_converters():
            Converter(model.run).convert(str(fresh), force=True)
    return folder
