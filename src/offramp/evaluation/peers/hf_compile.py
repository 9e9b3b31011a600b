"""Hugging Face under `torch.compile` with dynamic shapes: one graph for all lengths, one more for single rows."""

from __future__ import annotations

import torch

from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits, PeerRunner
from offramp.evaluation.plain_model import load_plain_model, pad_batch, padded_tensors, padding_token, unpad_logits

VARIANTS = (EngineVariant("hf-compile", "fp32"),)


def load_peer(model: BenchModel, variant: EngineVariant) -> PeerRunner:
    """Load a model that is compiled in the first, untimed pass."""
    compiled = torch.compile(load_plain_model(model), dynamic=True)
    padding = padding_token(model)

    def run(batch: EncodedBatch) -> Logits:
        with torch.inference_mode():
            logits = compiled(*padded_tensors(pad_batch(batch, padding)))
        return unpad_logits(logits.numpy(), batch)

    return run
