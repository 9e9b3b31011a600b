"""Marian: the translation models of OPUS-MT, and small ones trained from scratch. Sinusoidal positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from offramp.backbones import Decoder, Encoder
from offramp.backbones._seq2seq import OwnerDropout, seq2seq_decoder, seq2seq_encoder, seq2seq_head

MODEL_TYPES = ("marian",)
FIXED = frozenset({"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"})
head = seq2seq_head


def encoder(model: Any) -> Encoder:
    """Return the encoder for the packed loop."""
    return seq2seq_encoder(model, _embed)


def decoder(model: Any) -> Decoder:
    """Return the decoder."""
    return seq2seq_decoder(model, partial(_embed, model.base_model.decoder), FIXED)


def _embed(half: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Return scaled word embeddings plus sinusoids: [..., hidden]."""
    embedded = half.embed_tokens(ids) * half.embed_scale
    return OwnerDropout(half, half.dropout)(embedded + F.embedding(positions, half.embed_positions.weight.detach()))
