"""What Marian and BART share: post-norm encoder layers and decoder blocks with the same attribute names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.backbones import Decoder, Encoder, Head, token_head
from offramp.backbones._post_norm import PostNorm, Sublayers
from offramp.core.dropout import dropout
from offramp.core.packed import Packed
from offramp.core.written import written_out
from offramp.decoding.cost import BlockCost

Embed = Callable[[Any, Tensor, Tensor], Tensor]  # a half of the model, ids, positions → embeddings


@dataclass(frozen=True)
class Follows:
    """Dropout that is on when the module it belongs to is in training mode: these families keep only the number."""

    owner: Any
    p: float

    @property
    def training(self) -> bool:
        """Whether it drops anything."""
        return bool(self.owner.training)

    def __call__(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)


def encoder_half(model: Any, embed: Embed) -> Encoder:
    """The encoder half for the packed loop."""
    half, config = model.base_model.encoder, model.config

    def packed_embed(packed: Packed) -> Tensor:
        return embed(half, packed.tokens["id"], packed.tokens["position"])

    layers = [encoder_layer(layer) for layer in half.layers]
    return Encoder(packed_embed, layers, nn.Identity(), config.d_model, config.max_position_embeddings)


def encoder_layer(layer: Any) -> PostNorm:
    """An encoder layer in halves."""
    attention, dropped = layer.self_attn, cast("nn.Dropout", Follows(layer, layer.dropout))
    inner = Follows(layer, layer.activation_dropout)
    parts = Sublayers(
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        attention_dropout=cast("nn.Dropout", Follows(attention, attention.dropout)),
        out=attention.out_proj,
        out_dropout=dropped,
        attention_norm=layer.self_attn_layer_norm,
        up=layer.fc1,
        activation=lambda x: inner(layer.activation_fn(x)),
        down=layer.fc2,
        down_dropout=dropped,
        feed_norm=layer.final_layer_norm,
    )
    return PostNorm(parts, attention.num_heads)


class PostNormBlock:
    """A post-norm decoder block: words, source, feed-forward, each added and normed."""

    def __init__(self, layer: Any) -> None:
        self.layer, self._ready = layer, cast("tuple[tuple[int, ...], ReadyBlock] | None", None)
        wide, inner = layer.fc1.in_features, layer.fc1.out_features
        self.cost = BlockCost(
            word=6.0 * wide * wide + 2.0 * wide * inner,
            copy=2.0 * wide * wide,
            near=2.0 * wide,
            source=2.0 * wide * wide,
            far=2.0 * wide,
        )

    def __call__(self, x: Tensor, source: Tensor, mask: Tensor | None, going: Tensor | None = None) -> Tensor:
        """Whole sentences: [rows, words, hidden]; differentiable, dropout as the model's mode says."""
        layer, who = self.layer, Who.of(x, going)
        drop, inner = Follows(layer, layer.dropout), Follows(layer, layer.activation_dropout)
        own = who.take(x)
        own = layer.self_attn_layer_norm(own + drop(_attend(layer.self_attn, own, who, Seen(x, before=True))))
        own = layer.encoder_attn_layer_norm(own + drop(_attend(layer.encoder_attn, own, who, Seen(source, mask))))
        own = layer.final_layer_norm(own + drop(layer.fc2(inner(layer.activation_fn(layer.fc1(own))))))
        return who.put(own, x)

    def ready(self) -> ReadyBlock:
        """The block with Q, K and V fused; made anew when a parameter changed."""
        stamp = tuple(n for p in self.layer.parameters() for n in (p.data_ptr(), p._version))
        if self._ready is None or self._ready[0] != stamp:
            self._ready = (stamp, ReadyBlock(self.layer))
        return self._ready[1]


@dataclass(frozen=True)
class Who:
    """Which words of a rectangle a block computes; the others stay as they are and are only looked at."""

    shape: tuple[int, int]  # rows, words
    index: Tensor | None  # [words going on], in the flattened rectangle; None: all

    @classmethod
    def of(cls, x: Tensor, going: Tensor | None) -> Who:
        """By a mask [rows, words]."""
        return cls((x.shape[0], x.shape[1]), None if going is None else going.flatten().nonzero().squeeze(1))

    def take(self, x: Tensor) -> Tensor:
        """Those going on, one after another, or the rectangle itself."""
        return x if self.index is None else x.flatten(0, 1).index_select(0, self.index)

    def put(self, own: Tensor, x: Tensor) -> Tensor:
        """Back among the others."""
        if self.index is None:
            return own
        return x.to(own.dtype).flatten(0, 1).index_copy(0, self.index, own).unflatten(0, self.shape)

    def spread(self, own: Tensor) -> Tensor:
        """As a rectangle, with nothing where the others are."""
        return self.put(own, own.new_zeros(*self.shape, own.shape[-1])) if self.index is not None else own


@dataclass(frozen=True)
class Seen:
    """What words look at."""

    states: Tensor  # [rows, places, hidden]
    mask: Tensor | None = None
    before: bool = False  # each word sees those before it and itself


def _attend(attention: Any, own: Tensor, who: Who, at: Seen) -> Tensor:
    """Multi-head attention of the words that go on."""

    def heads(y: Tensor) -> Tensor:
        return y.unflatten(2, (attention.num_heads, -1)).transpose(1, 2)  # [rows, heads, places, width]

    q = heads(who.spread(attention.q_proj(own)))
    k, v = heads(attention.k_proj(at.states)), heads(attention.v_proj(at.states))
    dropout = attention.dropout if attention.training else 0.0
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        seen = written_out((q, k, v), _before(q) if at.before else at.mask, dropout)
    else:
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=at.mask, dropout_p=dropout, is_causal=at.before)
    out: Tensor = attention.out_proj(who.take(seen.transpose(1, 2).flatten(2)))
    return out


def _before(q: Tensor) -> Tensor:
    """Each word sees those before it and itself."""  # [words, words] bool
    words = q.shape[2]
    return torch.ones(words, words, dtype=torch.bool, device=q.device).tril()


class ReadyBlock:
    """A decoder block for the step loop: plain products of tensors, as few as there can be."""

    def __init__(self, layer: Any) -> None:
        near, far = layer.self_attn, layer.encoder_attn
        self.q, wide = _fused(near.q_proj, near.k_proj, near.v_proj), near.q_proj.out_features
        self.kv = self.q[0][wide:], self.q[1][wide:]  # the same memory: what is in a cache serves both
        self.near, self.asked, self.skv = _fused(near.out_proj), _fused(far.q_proj), _fused(far.k_proj, far.v_proj)
        self.far, self.up, self.down = _fused(far.out_proj), _fused(layer.fc1), _fused(layer.fc2)
        self.act = layer.activation_fn
        norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
        self.norms = [(n.normalized_shape, n.weight.detach(), n.bias.detach(), n.eps) for n in norms]

    def project(self, x: Tensor) -> Tensor:
        """Query, key and value side by side."""
        return F.linear(x, *self.q)

    def copied(self, states: Tensor) -> Tensor:
        """Key and value of words that left below."""
        return F.linear(states, *self.kv)

    def source(self, states: Tensor) -> Tensor:
        """Key and value of the source."""
        return F.linear(states, *self.skv)

    def settle(self, x: Tensor, seen: Tensor) -> Tensor:
        """What was seen among the words."""
        return F.layer_norm(x + F.linear(seen, *self.near), *self.norms[0])

    def ask(self, x: Tensor) -> Tensor:
        """The query to the source."""
        return F.linear(x, *self.asked)

    def finish(self, x: Tensor, seen: Tensor) -> Tensor:
        """What was seen in the source, and the feed-forward."""
        x = F.layer_norm(x + F.linear(seen, *self.far), *self.norms[1])
        return F.layer_norm(x + F.linear(self.act(F.linear(x, *self.up)), *self.down), *self.norms[2])


def _fused(*linears: Any) -> tuple[Tensor, Tensor]:
    weights, biases = [part.weight.detach() for part in linears], [part.bias.detach() for part in linears]
    return (weights[0], biases[0]) if len(linears) == 1 else (torch.cat(weights), torch.cat(biases))


def language_head(model: Any, auto_class: str) -> Head | None:
    """The vocabulary, of translation models only."""
    if auto_class != "AutoModelForSeq2SeqLM":
        return None
    return token_head(lambda x: score(model, x), model.lm_head)


def score(model: Any, x: Tensor) -> Tensor:
    """The vocabulary with the model's own bias."""
    return F.linear(x, model.lm_head.weight, model.final_logits_bias[0])


def blocks_and_head(model: Any, embed: Any, fixed: frozenset[str] = frozenset()) -> Decoder:
    """A decoder around its own embeddings."""
    config, layers = model.config, model.base_model.decoder.layers
    stack = [PostNormBlock(layer) for layer in layers]
    shape = (config.d_model, config.decoder_attention_heads, config.max_position_embeddings)
    return Decoder(embed, stack, lambda x: score(model, x), *shape, model.lm_head.out_features, fixed)
