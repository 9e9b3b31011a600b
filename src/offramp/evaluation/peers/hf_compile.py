"""Hugging Face under `torch.compile` with dynamic shapes: one graph for all lengths, one more for single rows."""

from __future__ import annotations

import torch

from offramp.evaluation.peers import Answer, Batch, Ground, Logits, Variant, _padded

VARIANTS = (Variant("hf-compile", "fp32"),)


def load(ground: Ground, variant: Variant) -> Answer:
    """Compiles while the rows are first answered, so not on the clock."""
    model, blank = torch.compile(_padded.plain(ground), dynamic=True), _padded.fill(ground)

    def answer(batch: Batch) -> Logits:
        with torch.inference_mode():
            made = model(*_padded.tensors(_padded.pad(batch, blank)))
        return _padded.unpad(made.numpy(), batch)

    return answer
