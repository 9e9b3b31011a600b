"""What Marian and BART share: post-norm encoder layers and decoder blocks with the same attribute names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.backbones import Decoder, Encoder, Head, token_head
from offramp.backbones._post_norm import PostNormLayer, Sublayers
from offramp.core.attention.training_kernel import attend_while_training
from offramp.core.columns import ID, POSITION
from offramp.core.decoder import BlockCost
from offramp.core.dropout import dropout
from offramp.core.packed import Packed

Embed = Callable[[Any, Tensor, Tensor], Tensor]  # encoder or decoder of the model, ids, positions → embeddings


@dataclass(frozen=True)
class OwnerDropout:
    """Dropout that is active when its owner is in training mode; these families store only the probability."""

    owner: Any
    p: float

    @property
    def training(self) -> bool:
        """Whether dropout is active."""
        return bool(self.owner.training)

    def __call__(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)


def seq2seq_encoder(model: Any, embed: Embed) -> Encoder:
    """Return the encoder of an encoder–decoder for the packed loop."""
    half, config = model.base_model.encoder, model.config

    def packed_embed(packed: Packed) -> Tensor:
        return embed(half, packed.tokens[ID], packed.tokens[POSITION])

    layers = [_encoder_layer(layer) for layer in half.layers]
    return Encoder(packed_embed, layers, nn.Identity(), config.d_model, config.max_position_embeddings)


def _encoder_layer(layer: Any) -> PostNormLayer:
    attention, state_dropout = layer.self_attn, cast("nn.Dropout", OwnerDropout(layer, layer.dropout))
    inner_dropout = OwnerDropout(layer, layer.activation_dropout)
    parts = Sublayers(
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        attention_dropout=cast("nn.Dropout", OwnerDropout(attention, attention.dropout)),
        out=attention.out_proj,
        out_dropout=state_dropout,
        attention_norm=layer.self_attn_layer_norm,
        up=layer.fc1,
        activation=lambda x: inner_dropout(layer.activation_fn(x)),
        down=layer.fc2,
        down_dropout=state_dropout,
        feed_norm=layer.final_layer_norm,
    )
    return PostNormLayer(parts, attention.num_heads)


class PostNormDecoderBlock:
    """A post-norm decoder block: self-attention, cross-attention, feed-forward, each added and normed."""

    def __init__(self, layer: Any) -> None:
        self.layer, self._step_block = layer, cast("tuple[tuple[int, ...], PostNormStepBlock] | None", None)
        hidden, inner = layer.fc1.in_features, layer.fc1.out_features
        self.cost = BlockCost(
            token=6.0 * hidden * hidden + 2.0 * hidden * inner,
            copied_token=2.0 * hidden * hidden,
            self_pair=2.0 * hidden,
            source_token=2.0 * hidden * hidden,
            cross_pair=2.0 * hidden,
        )

    def __call__(self, x: Tensor, source: Tensor, mask: Tensor | None, computed: Tensor | None = None) -> Tensor:
        """Return the states of whole sentences [rows, tokens, hidden]; differentiable, with dropout in training."""
        layer, subset = self.layer, TokenSubset.from_mask(x, computed)
        drop, drop_inner = OwnerDropout(layer, layer.dropout), OwnerDropout(layer, layer.activation_dropout)
        own = subset.take(x)
        own = layer.self_attn_layer_norm(own + drop(_attend(layer.self_attn, own, subset, x, causal=True)))
        own = layer.encoder_attn_layer_norm(own + drop(_attend(layer.encoder_attn, own, subset, source, mask)))
        own = layer.final_layer_norm(own + drop(layer.fc2(drop_inner(layer.activation_fn(layer.fc1(own))))))
        return subset.put_back(own, x)

    def step_block(self) -> PostNormStepBlock:
        """Return the block for one-token steps, with Q, K and V fused; rebuilt when a parameter changed."""
        stamp = tuple(n for p in self.layer.parameters() for n in (p.data_ptr(), p._version))
        if self._step_block is None or self._step_block[0] != stamp:
            self._step_block = (stamp, PostNormStepBlock(self.layer))
        return self._step_block[1]


@dataclass(frozen=True)
class TokenSubset:
    """Which tokens of a rectangle a block computes; the others keep their states and serve as keys only."""

    shape: tuple[int, int]  # rows, tokens
    index: Tensor | None  # [computed tokens], in the flattened rectangle; None: all

    @classmethod
    def from_mask(cls, x: Tensor, computed: Tensor | None) -> TokenSubset:
        """Return the subset that a mask [rows, tokens] selects."""
        return cls((x.shape[0], x.shape[1]), None if computed is None else computed.flatten().nonzero().squeeze(1))

    def take(self, x: Tensor) -> Tensor:
        """Return the computed tokens [n, hidden], or the rectangle itself if it is computed whole."""
        return x if self.index is None else x.flatten(0, 1).index_select(0, self.index)

    def put_back(self, own: Tensor, x: Tensor) -> Tensor:
        """Return the rectangle x with the computed tokens replaced."""
        if self.index is None:
            return own
        return x.to(own.dtype).flatten(0, 1).index_copy(0, self.index, own).unflatten(0, self.shape)

    def spread(self, own: Tensor) -> Tensor:
        """Return the computed tokens as a rectangle, with zeros in place of the others."""
        return self.put_back(own, own.new_zeros(*self.shape, own.shape[-1])) if self.index is not None else own


def _attend(
    attention: Any, own: Tensor, subset: TokenSubset, states: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Return multi-head attention of the computed tokens over `states` [rows, positions, hidden]."""

    def heads(y: Tensor) -> Tensor:
        return y.unflatten(2, (attention.num_heads, -1)).transpose(1, 2)  # [rows, heads, positions, width]

    q = heads(subset.spread(attention.q_proj(own)))
    k, v = heads(attention.k_proj(states)), heads(attention.v_proj(states))
    dropout = attention.dropout if attention.training else 0.0
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        attended = attend_while_training((q, k, v), _causal_mask(q) if causal else mask, dropout)
    else:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
    out: Tensor = attention.out_proj(subset.take(attended.transpose(1, 2).flatten(2)))
    return out


def _causal_mask(q: Tensor) -> Tensor:
    """Return a mask under which each token attends to itself and the tokens before it: [tokens, tokens] bool."""
    tokens = q.shape[2]
    return torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()


class PostNormStepBlock:
    """A decoder block for the decode loop: plain tensor products, as few as possible."""

    def __init__(self, layer: Any) -> None:
        own, cross = layer.self_attn, layer.encoder_attn
        self.qkv, hidden = _fused(own.q_proj, own.k_proj, own.v_proj), own.q_proj.out_features
        self.kv = self.qkv[0][hidden:], self.qkv[1][hidden:]  # views: weights that are in a cache serve both products
        self.self_out, self.cross_q = _fused(own.out_proj), _fused(cross.q_proj)
        self.cross_kv, self.cross_out = _fused(cross.k_proj, cross.v_proj), _fused(cross.out_proj)
        self.up, self.down, self.activation = _fused(layer.fc1), _fused(layer.fc2), layer.activation_fn
        norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
        self.norms = [(n.normalized_shape, n.weight.detach(), n.bias.detach(), n.eps) for n in norms]

    def project_qkv(self, x: Tensor) -> Tensor:
        """Return self-attention query, key and value side by side."""
        return F.linear(x, *self.qkv)

    def project_kv(self, states: Tensor) -> Tensor:
        """Return self-attention keys and values of tokens that exited below this block."""
        return F.linear(states, *self.kv)

    def project_source_kv(self, states: Tensor) -> Tensor:
        """Return cross-attention keys and values of the source."""
        return F.linear(states, *self.cross_kv)

    def add_self_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the states after the self-attention sublayer."""
        return F.layer_norm(x + F.linear(attended, *self.self_out), *self.norms[0])

    def cross_query(self, x: Tensor) -> Tensor:
        """Return the query of cross-attention."""
        return F.linear(x, *self.cross_q)

    def add_cross_attention_and_feed(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the states after the cross-attention and feed-forward sublayers."""
        x = F.layer_norm(x + F.linear(attended, *self.cross_out), *self.norms[1])
        return F.layer_norm(x + F.linear(self.activation(F.linear(x, *self.up)), *self.down), *self.norms[2])


def _fused(*linears: Any) -> tuple[Tensor, Tensor]:
    """Return weight and bias of several linear layers as those of one."""
    weights, biases = [part.weight.detach() for part in linears], [part.bias.detach() for part in linears]
    return (weights[0], biases[0]) if len(linears) == 1 else (torch.cat(weights), torch.cat(biases))


def seq2seq_head(model: Any, auto_class: str) -> Head | None:
    """Return the vocabulary head; these families have no head for other tasks."""
    if auto_class != "AutoModelForSeq2SeqLM":
        return None
    return token_head(lambda x: vocabulary_scores(model, x), model.lm_head)


def vocabulary_scores(model: Any, x: Tensor) -> Tensor:
    """Return the scores over the vocabulary, with the model's own bias."""
    return F.linear(x, model.lm_head.weight, model.final_logits_bias[0])


def seq2seq_decoder(
    model: Any, embed: Callable[[Tensor, Tensor], Tensor], fixed: frozenset[str] = frozenset()
) -> Decoder:
    """Return the decoder of an encoder–decoder around the embeddings of its family."""
    config, layers = model.config, model.base_model.decoder.layers
    return Decoder(
        embed=embed,
        blocks=[PostNormDecoderBlock(layer) for layer in layers],
        head=lambda x: vocabulary_scores(model, x),
        hidden=config.d_model,
        heads=config.decoder_attention_heads,
        positions=config.max_position_embeddings,
        vocabulary=model.lm_head.out_features,
        fixed=fixed,
    )
