"""Hugging Face as it is usually run: eager attention, and PyTorch's own (SDPA)."""

from __future__ import annotations

import torch

from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits, PeerRunner
from offramp.evaluation.plain_model import load_plain_model, pad_batch, padded_tensors, padding_token, unpad_logits

VARIANTS = (EngineVariant("hf-eager", "fp32"), EngineVariant("hf-sdpa", "fp32"), EngineVariant("hf-sdpa", "bf16"))


def load_peer(model: BenchModel, variant: EngineVariant) -> PeerRunner:
    """Load the model in evaluation mode and run it without gradients."""
    dtype = torch.bfloat16 if variant.precision == "bf16" else torch.float32
    plain = load_plain_model(model, variant.engine.removeprefix("hf-"), dtype)
    padding = padding_token(model)

    def run(batch: EncodedBatch) -> Logits:
        with torch.inference_mode():
            logits = plain(*padded_tensors(pad_batch(batch, padding)))
        return unpad_logits(logits.float().numpy(), batch)

    return run
