"""BART: learned positions that begin at 2, a norm on the embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from offramp.backbones import Decoder, Encoder
from offramp.backbones._seq2seq import Follows, blocks_and_head, encoder_half, language_head

MODEL_TYPES = ("bart",)
head = language_head


def encoder(model: Any) -> Encoder:
    """The encoder half for the packed loop."""
    return encoder_half(model, _embed)


def decoder(model: Any) -> Decoder:
    """The decoder half."""
    return blocks_and_head(model, partial(_embed, model.base_model.decoder))


def _embed(half: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Word and position embeddings, normed."""  # [..., hidden]
    places = half.embed_positions
    words = half.embed_tokens(ids) + F.embedding(positions + places.offset, places.weight)
    return Follows(half, half.dropout)(half.layernorm_embedding(words))
