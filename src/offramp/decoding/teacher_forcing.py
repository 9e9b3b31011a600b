"""A network's decoder as the step loop, the search and the costs want it, and sentences taught word by word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offramp.backbones import FREE, Decoder
from offramp.core.cost import HeadCost
from offramp.core.packed import Packed
from offramp.decoding.beam_search import Rules
from offramp.decoding.cost import DecoderPrices
from offramp.decoding.loop import Speaker
from offramp.nn.batches import Batch
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers

IGNORED = -100  # beyond a sentence's end
UNIT = "halting_unit"  # where a method keeps the unit that decides depths
OWN = "vocabularies"  # where a method keeps vocabularies of its own for exits below the last


def decoder_of(network: Network) -> Decoder:
    """The decoder of a network that has one."""
    if network.decoder is None:
        raise RuntimeError(f"a network for {network.task.name} has no decoder")
    return network.decoder


def exits(network: Network) -> list[Any]:
    """What scores the vocabulary after each block; one and the same where exits share the model's own."""
    decoder = decoder_of(network)
    own: dict[str, Any] = dict(network.added[OWN].named_children()) if OWN in network.added else {}
    return [own.get(str(block), decoder.head) for block in range(1, decoder.depth + 1)]


def unit_of(network: Network) -> nn.Module | None:
    """The unit that decides depths, where a method added one."""
    return dict(network.added.items()).get(UNIT)


def speaker(network: Network) -> Speaker:
    """The decoder for the step loop, parameters as they are now."""
    decoder = decoder_of(network)
    places = torch.arange(decoder.positions, device=network.device)
    blocks = [block.ready() for block in decoder.blocks]
    return Speaker(lambda ids, t: decoder.embed(ids, places[t : t + 1]), blocks, exits(network), decoder.heads)


def prices(network: Network) -> DecoderPrices:
    """What decoding costs."""
    decoder = decoder_of(network)
    unit, costs = unit_of(network), [block.cost for block in decoder.blocks]
    asked: HeadCost = FREE if unit is None else unit.cost  # type: ignore[assignment]  # a module attribute
    return DecoderPrices(costs, float(decoder.hidden * decoder.vocabulary), asked.row, asked.token)


def rules(network: Network) -> Rules:
    """How the model's own configuration wants sentences to begin and end."""
    made: Any = network.hf.generation_config
    start = made.decoder_start_token_id
    ends = made.eos_token_id if isinstance(made.eos_token_id, list) else [made.eos_token_id]
    last = made.forced_eos_token_id[0] if isinstance(made.forced_eos_token_id, list) else made.forced_eos_token_id
    never = tuple(words[0] for words in made.bad_words_ids or [] if len(words) == 1)
    penalty = 1.0 if made.length_penalty is None else made.length_penalty
    beams = (made.num_beams or 1, penalty, made.early_stopping is True)
    return Rules(start, frozenset(ends), never, made.forced_bos_token_id, last, *beams)


def side_by_side(packed: Packed, states: Tensor) -> tuple[Tensor, Tensor | None]:
    """Packed rows as a rectangle, and where it is real (None: everywhere)."""  # [rows, tokens, hidden]
    lengths = packed.lengths.to(states.device)
    places = torch.arange(int(packed.lengths.max()), device=states.device)
    real = places < lengths[:, None]
    index = packed.starts[:, None].to(states.device) + places * real  # filler repeats a row's first token, unseen
    made = states.index_select(0, index.flatten()).unflatten(0, index.shape)
    return made, None if bool(real.all()) else real[:, None, None, :]


@dataclass(frozen=True)
class Taught:
    """A batch of sentences under teacher forcing: the words to be said, packed, as they stand after every block."""

    source: Packed  # after the encoder
    words: list[Tensor]  # after each block 1…N: [words, hidden]
    targets: Tensor  # [words]
    lengths: Tensor  # [rows] words, on the CPU

    def detached(self) -> Taught:
        """The same without a way back."""
        source = self.source.with_states(self.source.states.detach())
        return Taught(source, [states.detach() for states in self.words], self.targets, self.lengths)


@dataclass(frozen=True)
class Lesson:
    """A batch before the decoder; several passes may share one encoding."""

    network: Network
    batch: Batch

    def source(self) -> Packed:
        """Encoder states of the batch."""
        made = forward_all_layers(self.network.encoder, self.batch.packed)
        return made.packed.with_states(self.network.encoder.final(made.states[-1]))

    def taught(self, source: Packed, leave: Tensor | None = None) -> Taught:
        """All words through all blocks. With `leave` [rows, longest], a word's state stays as it is after that block:
        copied up, and every block above takes its keys and values from the copy."""
        decoder, targets = decoder_of(self.network), self.batch.targets
        real = targets != IGNORED
        before = torch.full_like(targets[:, :1], rules(self.network).start)
        heard = torch.cat((before, targets[:, :-1]), dim=1).clamp(min=0)
        places = torch.arange(targets.shape[1], device=targets.device)
        x = decoder.embed(heard, places)
        wide, mask = side_by_side(source, source.states)
        words = []
        for number, block in enumerate(decoder.blocks, 1):
            x = block(x, wide, mask, None if leave is None else leave >= number)
            words.append(x[real])
        return Taught(source, words, targets[real], real.sum(1).cpu())
