"""Hugging Face as most people run it: eager attention, and PyTorch's own (SDPA)."""

from __future__ import annotations

import torch

from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits, PeerRunner, _padded

VARIANTS = (EngineVariant("hf-eager", "fp32"), EngineVariant("hf-sdpa", "fp32"), EngineVariant("hf-sdpa", "bf16"))


def load(ground: BenchModel, variant: EngineVariant) -> PeerRunner:
    """The model in evaluation mode, without gradients."""
    dtype = torch.bfloat16 if variant.precision == "bf16" else torch.float32
    model, blank = (
        _padded.load_plain_model(ground, variant.engine.removeprefix("hf-"), dtype),
        _padded.padding_token(ground),
    )

    def answer(batch: EncodedBatch) -> Logits:
        with torch.inference_mode():
            made = model(*_padded.padded_tensors(_padded.pad_batch(batch, blank)))
        return _padded.unpad_logits(made.float().numpy(), batch)

    return answer
