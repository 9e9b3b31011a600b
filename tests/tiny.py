"""Tiny random models of every backbone, made on the spot. The table is the only list; a test checks it is whole."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import offramp.backbones  # noqa: F401  # makes our own family known to transformers

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 600,
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "alberta": {"embedding_size": 16, "num_hidden_groups": 2, "num_hidden_layers": 4, "relative_reach": 5},
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 3},
    "albert": {"embedding_size": 16, "num_hidden_groups": 2, "num_hidden_layers": 4},
    "electra": {"embedding_size": 16},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
}
SEQ2SEQ = ("bart", "marian")  # encoder–decoders
SPEAKING = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "bos_token_id": None,
    "forced_eos_token_id": None,
}
DISTILBERT_HAS = {"vocab_size", "max_position_embeddings", "pad_token_id"}
BACKBONES = sorted(CONFIGS)
AUTO = {
    "classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "tagging": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "masked_lm": "AutoModelForMaskedLM",
}


def model(backbone: str, auto_class: str = AUTO["classification"], seed: int = 0, **config: Any) -> Any:
    """A tiny random Hugging Face model in evaluation mode, with weights large enough that rows differ."""
    shape = {key: value for key, value in SHAPE.items() if backbone != "distilbert" or key in DISTILBERT_HAS}
    made = transformers.AutoConfig.for_model(backbone, **{**shape, **CONFIGS[backbone], "num_labels": 3, **config})
    torch.manual_seed(seed)
    net = getattr(transformers, auto_class).from_config(made)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return net.eval()


def speaker(backbone: str, seed: int = 0, **config: Any) -> Any:
    """A tiny random encoder–decoder that says many different things."""
    made = transformers.AutoConfig.for_model(backbone, **{**SPEAKING, **config})
    torch.manual_seed(seed)
    net = transformers.AutoModelForSeq2SeqLM.from_config(made)
    sinusoids = "marian"  # whose positions are no parameters
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if backbone != sinusoids or "embed_positions" not in name:
                parameter.add_(torch.randn_like(parameter) * (0.25 if "attn" in name else 0.1))
    return net.eval()


def rows(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random token ids (never a special one)."""
    make = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 97, (n,), generator=make).tolist() for n in lengths]


def padded(net: Any, ids: list[list[int]], **more: Any) -> Any:
    """The same rows through Hugging Face's own padded model."""
    wide, fill = max(map(len, ids)), net.config.pad_token_id
    batch = torch.tensor([row + [fill] * (wide - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (wide - len(row)) for row in ids])
    with torch.no_grad():
        return net(input_ids=batch, attention_mask=mask, **more)
