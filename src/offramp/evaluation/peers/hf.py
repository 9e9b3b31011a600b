"""Hugging Face as most people run it: eager attention, and PyTorch's own (SDPA)."""

from __future__ import annotations

import torch

from offramp.evaluation.peers import Answer, Batch, Ground, Logits, Variant, _padded

VARIANTS = (Variant("hf-eager", "fp32"), Variant("hf-sdpa", "fp32"), Variant("hf-sdpa", "bf16"))


def load(ground: Ground, variant: Variant) -> Answer:
    """The model in evaluation mode, without gradients."""
    dtype = torch.bfloat16 if variant.precision == "bf16" else torch.float32
    model, blank = _padded.plain(ground, variant.engine.removeprefix("hf-"), dtype), _padded.fill(ground)

    def answer(batch: Batch) -> Logits:
        with torch.inference_mode():
            made = model(*_padded.tensors(_padded.pad(batch, blank)))
        return _padded.unpad(made.float().numpy(), batch)

    return answer
