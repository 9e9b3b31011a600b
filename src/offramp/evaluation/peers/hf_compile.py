"""Hugging Face under `torch.compile` with dynamic shapes: one graph for all lengths, one more for single rows."""

from __future__ import annotations

import torch

from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits, PeerRunner, _padded

VARIANTS = (EngineVariant("hf-compile", "fp32"),)


def load_peer(model: BenchModel, variant: EngineVariant) -> PeerRunner:
    """Load a model that is compiled in the first, untimed pass."""
    compiled = torch.compile(_padded.load_plain_model(model), dynamic=True)
    padding = _padded.padding_token(model)

    def run(batch: EncodedBatch) -> Logits:
        with torch.inference_mode():
            logits = compiled(*_padded.padded_tensors(_padded.pad_batch(batch, padding)))
        return _padded.unpad_logits(logits.numpy(), batch)

    return run
