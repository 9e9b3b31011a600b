"""A network's decoder in the forms that the decode loop, the search and the cost need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from offramp.backbones import FREE, Decoder
from offramp.core.cost import HeadCost
from offramp.core.packed import Packed
from offramp.decoding.beam_search import GenerationRules
from offramp.decoding.cost import DecoderCost
from offramp.decoding.loop import StepDecoder
from offramp.nn.keys import HALTING_UNIT, VOCABULARIES
from offramp.nn.network import Network


def decoder_of(network: Network) -> Decoder:
    """Return the decoder of a network that has one."""
    if network.decoder is None:
        raise RuntimeError(f"a network for {network.task.name} has no decoder")
    return network.decoder


def vocabulary_heads(network: Network) -> list[Any]:
    """Return what scores the vocabulary after each block; exits that share the model's own head share the object."""
    decoder = decoder_of(network)
    added: dict[str, Any] = dict(network.added[VOCABULARIES].named_children()) if VOCABULARIES in network.added else {}
    return [added.get(str(block), decoder.head) for block in range(1, decoder.depth + 1)]


def halting_unit(network: Network) -> nn.Module | None:
    """Return the unit that decides depths, or None if the method added none."""
    return dict(network.added.items()).get(HALTING_UNIT)


def step_decoder(network: Network) -> StepDecoder:
    """Return the decoder for the decode loop, with its parameters as they are now."""
    decoder = decoder_of(network)
    positions = torch.arange(decoder.positions, device=network.device)
    blocks = [block.step_block() for block in decoder.blocks]
    heads = vocabulary_heads(network)
    return StepDecoder(lambda ids, at: decoder.embed(ids, positions[at : at + 1]), blocks, heads, decoder.heads)


def decoder_cost(network: Network) -> DecoderCost:
    """Return what the decoder's parts and its exit unit cost."""
    decoder, unit = decoder_of(network), halting_unit(network)
    blocks = [block.cost for block in decoder.blocks]
    unit_cost: HeadCost = FREE if unit is None else unit.cost  # type: ignore[assignment]  # a module attribute
    return DecoderCost(blocks, float(decoder.hidden * decoder.vocabulary), unit_cost.row, unit_cost.token)


def generation_rules(network: Network) -> GenerationRules:
    """Return how the model's generation configuration begins and ends sentences."""
    config: Any = network.hf.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    last = config.forced_eos_token_id
    return GenerationRules(
        start=config.decoder_start_token_id,
        ends=frozenset(ends),
        banned=tuple(words[0] for words in config.bad_words_ids or [] if len(words) == 1),
        forced_first=config.forced_bos_token_id,
        forced_last=last[0] if isinstance(last, list) else last,
        beams=config.num_beams or 1,
        length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
        early_stopping=config.early_stopping is True,
    )


def pad_packed(packed: Packed, states: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return packed states as [rows, longest, hidden], and where they are real ([rows, 1, 1, longest]; None: all)."""
    lengths = packed.lengths.to(states.device)
    positions = torch.arange(int(packed.lengths.max()), device=states.device)
    real = positions < lengths[:, None]
    index = packed.starts[:, None].to(states.device) + positions * real  # padding repeats a row's first token
    padded = states.index_select(0, index.flatten()).unflatten(0, index.shape)
    return padded, None if bool(real.all()) else real[:, None, None, :]
