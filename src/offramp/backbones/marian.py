"""Marian: the translation models of OPUS-MT, and small ones trained from scratch. Sinusoidal positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from offramp.backbones import Decoder, Encoder
from offramp.backbones._seq2seq import Follows, blocks_and_head, encoder_half, language_head

MODEL_TYPES = ("marian",)
FIXED = frozenset({"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"})
head = language_head


def encoder(model: Any) -> Encoder:
    """The encoder half for the packed loop."""
    return encoder_half(model, _embed)


def decoder(model: Any) -> Decoder:
    """The decoder half."""
    return blocks_and_head(model, partial(_embed, model.base_model.decoder), FIXED)


def _embed(half: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Scaled word embeddings and sinusoids."""  # [..., hidden]
    words = half.embed_tokens(ids) * half.embed_scale
    return Follows(half, half.dropout)(words + F.embedding(positions, half.embed_positions.weight.detach()))
