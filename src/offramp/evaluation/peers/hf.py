"""Hugging Face as it is usually run: eager attention, and PyTorch's own (SDPA)."""

from __future__ import annotations

import torch

from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits, PeerRunner, _padded

VARIANTS = (EngineVariant("hf-eager", "fp32"), EngineVariant("hf-sdpa", "fp32"), EngineVariant("hf-sdpa", "bf16"))


def load_peer(model: BenchModel, variant: EngineVariant) -> PeerRunner:
    """Load the model in evaluation mode and run it without gradients."""
    dtype = torch.bfloat16 if variant.precision == "bf16" else torch.float32
    plain = _padded.load_plain_model(model, variant.engine.removeprefix("hf-"), dtype)
    padding = _padded.padding_token(model)

    def run(batch: EncodedBatch) -> Logits:
        with torch.inference_mode():
            logits = plain(*_padded.padded_tensors(_padded.pad_batch(batch, padding)))
        return _padded.unpad_logits(logits.float().numpy(), batch)

    return run
