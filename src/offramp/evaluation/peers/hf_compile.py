"""Hugging Face under `torch.compile` with dynamic shapes: one graph for all lengths, one more for single rows."""

from __future__ import annotations

import torch

from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits, PeerRunner, _padded

VARIANTS = (EngineVariant("hf-compile", "fp32"),)


def load(ground: BenchModel, variant: EngineVariant) -> PeerRunner:
    """Compiles while the rows are first answered, so not on the clock."""
    model, blank = torch.compile(_padded.load_plain_model(ground), dynamic=True), _padded.padding_token(ground)

    def answer(batch: EncodedBatch) -> Logits:
        with torch.inference_mode():
            made = model(*_padded.padded_tensors(_padded.pad_batch(batch, blank)))
        return _padded.unpad_logits(made.numpy(), batch)

    return answer
