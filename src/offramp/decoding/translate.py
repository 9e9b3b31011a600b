"""Encoded sources through the encoder's loop and the decoder's steps, in batches; sentences back in their order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from offramp.core import cost
from offramp.core.loop import Engine, run
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.data.tokenization import Encoded
from offramp.decoding.beam_search import Said, speak
from offramp.decoding.cost import decoder_macs, full_decoder_macs
from offramp.decoding.loop import Decoding
from offramp.decoding.teacher_forcing import decoder_of, prices, rules, side_by_side, speaker
from offramp.nn.batches import pack_rows
from offramp.nn.network import Network
from offramp.nn.outputs import Array, RunOutput


class _States:
    """Instead of an answer the encoder's loop gives its states."""

    per_token = True

    def __init__(self, network: Network) -> None:
        self.final = network.encoder.final

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        return self.final(packed.states)

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """Nobody asks."""
        raise NotImplementedError

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """Nobody asks."""
        raise NotImplementedError


def limit(tokens: int, positions: int) -> int:
    """The most pieces a sentence may have: twice its source and some, as far as the model can count."""
    return min(positions, 2 * tokens + 16)


def translate_encoded(
    network: Network, engine: Engine, policy: Policy, encoded: Sequence[Encoded], batch_size: int = 32
) -> RunOutput:
    """Rows sorted by length into batches, sentences in the order given."""
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i].ids))
    said: list[Said] = [Said()] * len(encoded)
    macs, full, kept = (np.zeros(len(encoded)) for _ in range(3))
    for start in range(0, len(order), batch_size):
        index = order[start : start + batch_size]
        packed = pack_rows(network.task, [encoded[i] for i in index]).to(network.device)
        with torch.inference_mode():
            made, spent = translate_packed(network, engine, policy, packed)
        for i, one in zip(index, made, strict=True):
            said[i] = one
        macs[index], full[index], kept[index] = spent
    answers = [np.stack((one.pieces, one.exits), axis=1) for one in said]
    layers = np.array([np.mean(one.exits) for one in said])
    return RunOutput(answers, layers, macs, kept, full_macs=full)


def translate_packed(
    network: Network, engine: Engine, policy: Policy, packed: Packed
) -> tuple[list[Said], tuple[Array, Array, Array]]:
    """One batch: what was said, and for each sentence MACs, the full model's MACs, and words × blocks ÷ blocks."""
    own = rules(network)
    read = run(engine, _States(network), Policy(), packed)
    source, _ = side_by_side(packed, read.logits)
    decoding = Decoding(speaker(network), policy, source, packed.lengths, policy.beams or own.beams)
    positions = decoder_of(network).positions
    said = speak(decoding, own, [limit(tokens, positions) for tokens in packed.lengths.tolist()])
    reading = _reading(network, packed)
    known = prices(network)
    spent, full = decoder_macs(decoding.account, known), full_decoder_macs(decoding.account, known)
    return said, (reading + spent, reading + full, decoding.account.word_blocks() / network.depth)


def _reading(network: Network, packed: Packed) -> Array:
    """MACs of the encoder, which always reads the whole source."""
    n = packed.lengths.double()
    embedded = network.encoder.embed_cost
    total = embedded.row + embedded.token * n
    for layer in network.encoder.layers:
        price: cost.LayerCost = layer.cost
        total = total + (price.query + price.key + price.feed) * n + price.pair * n * n
    return np.asarray(total.numpy())
