"""BART: learned positions that begin at 2, a norm on the embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from offramp.backbones import Decoder, Encoder
from offramp.backbones._seq2seq import OwnerDropout, seq2seq_decoder, seq2seq_encoder, seq2seq_head

MODEL_TYPES = ("bart",)
head = seq2seq_head


def encoder(model: Any) -> Encoder:
    """Return the encoder for the packed loop."""
    return seq2seq_encoder(model, _embed)


def decoder(model: Any) -> Decoder:
    """Return the decoder."""
    return seq2seq_decoder(model, partial(_embed, model.base_model.decoder))


def _embed(half: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Return word plus position embeddings, normed: [..., hidden]."""
    places = half.embed_positions
    embedded = half.embed_tokens(ids) + F.embedding(positions + places.offset, places.weight)
    return OwnerDropout(half, half.dropout)(half.layernorm_embedding(embedded))
