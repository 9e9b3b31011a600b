"""Translate encoded sources in batches: the encoder through the layer loop, the decoder through the decode loop."""

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
from offramp.decoding.beam_search import Hypothesis, generate
from offramp.decoding.cost import decoder_macs, full_decoder_macs
from offramp.decoding.decoder import decoder_cost, decoder_of, generation_rules, pad_packed, step_decoder
from offramp.decoding.loop import Decoding
from offramp.nn.batches import batches_by_length, pack_rows
from offramp.nn.network import Network
from offramp.nn.outputs import Array, RunOutput
from offramp.utils.progress import report_progress


class _EncoderStates:
    """Exit heads whose logits are the encoder's final states, for a loop that only encodes."""

    per_token = True

    def __init__(self, network: Network) -> None:
        self.final = network.encoder.final

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        return self.final(packed.states)

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """Raise: the encoder of a translation model has no exit unit."""
        raise NotImplementedError

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """Raise: the encoder of a translation model has no predictor."""
        raise NotImplementedError


def length_limit(source_tokens: int, positions: int) -> int:
    """Return the most pieces a translation may have: twice the source and 16, within the model's positions."""
    return min(positions, 2 * source_tokens + 16)


def translate_encoded(
    network: Network, engine: Engine, policy: Policy, encoded: Sequence[Encoded], batch_size: int = 32
) -> RunOutput:
    """Translate rows in batches of similar length with as many source tokens each; results come in the order given.

    Words of a batch wait for the deepest of them, so that exits save the more time the larger the batch is.
    """
    hypotheses: list[Hypothesis] = [Hypothesis()] * len(encoded)
    macs, full, kept = (np.zeros(len(encoded)) for _ in range(3))
    done = 0
    for index in batches_by_length([len(e.ids) for e in encoded], batch_size):
        packed = pack_rows(network.task, [encoded[i] for i in index]).to(network.device)
        with torch.inference_mode():
            found, costs = translate_packed(network, engine, policy, packed)
        for i, hypothesis in zip(index, found, strict=True):
            hypotheses[i] = hypothesis
        macs[index], full[index], kept[index] = costs
        done += len(index)
        report_progress(done, len(encoded))
    answers = [np.stack((one.pieces, one.exits), axis=1) for one in hypotheses]
    layers = np.array([np.mean(one.exits) for one in hypotheses])
    return RunOutput(answers, layers, macs, kept, full_macs=full)


def translate_packed(
    network: Network, engine: Engine, policy: Policy, packed: Packed
) -> tuple[list[Hypothesis], tuple[Array, Array, Array]]:
    """Translate one batch.

    Returns the hypotheses and, for each sentence, its MACs, the full model's MACs, and the tokens kept: the sum of its
    tokens' depths divided by the number of blocks.
    """
    rules = generation_rules(network)
    encoded = run(engine, _EncoderStates(network), Policy(), packed)
    source, _ = pad_packed(packed, encoded.logits)
    decoding = Decoding(step_decoder(network), policy, source, packed.lengths, policy.beams or rules.beams)
    positions = decoder_of(network).positions
    limits = [length_limit(tokens, positions) for tokens in packed.lengths.tolist()]
    hypotheses = generate(decoding, rules, limits)
    encoder, costs = _encoder_macs(network, packed), decoder_cost(network)
    macs = encoder + decoder_macs(decoding.trace, costs)
    full = encoder + full_decoder_macs(decoding.trace, costs)
    return hypotheses, (macs, full, decoding.trace.token_blocks() / network.depth)


def _encoder_macs(network: Network, packed: Packed) -> Array:
    """Return the MACs of the encoder, which always runs in full."""
    n = packed.lengths.double()
    embedding = network.encoder.embed_cost
    total = embedding.row + embedding.token * n
    for layer in network.encoder.layers:
        layer_cost: cost.LayerCost = layer.cost
        total = total + (layer_cost.query + layer_cost.key + layer_cost.feed) * n + layer_cost.pair * n * n
    return np.asarray(total.numpy())
