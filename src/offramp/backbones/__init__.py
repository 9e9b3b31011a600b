"""Hugging Face models taken apart for the packed loop, with their parameters by reference. One file per family.

A backbone file defines `MODEL_TYPES`, `encoder(model) -> Encoder` and `head(model, auto_class) -> Head | None`; one
with a head for `AutoModelForSeq2SeqLM` also `decoder(model) -> Decoder`. Backbones are found by their files; files
whose name starts with an underscore are shared helpers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from offramp.backbones._prunable import PrunableLayer as PrunableLayer
from offramp.core.attention import AttentionScores, Layout
from offramp.core.cost import HeadCost, LayerCost
from offramp.core.decoder import BlockCost, StepBlock
from offramp.core.head_spec import HeadSpec, Step
from offramp.core.packed import Packed
from offramp.errors import OfframpError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Layer(Protocol):
    """One Transformer layer in two halves, each with its own residual and norm inside.

    States are [tokens, hidden]; a compiled engine also gives rows of one length as [rows, length, hidden], so features
    must be addressed as the last dimension.
    """

    cost: LayerCost

    def attend(
        self, queries: Tensor, keys: Tensor, where: Layout, scores: bool, key_bias: Tensor | None
    ) -> tuple[Tensor, AttentionScores | None]:
        """Return the states of `queries` after the attention half, and attention scores if `scores`.

        `queries` are some (or, as the same tensor, all) of the tokens whose states are `keys`.
        """

    def feed(self, x: Tensor) -> Tensor:
        """Return the states after the feed-forward half."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the layer, which it may share with other layers."""


FREE = HeadCost(0, 0)


@dataclass(frozen=True)
class EmbeddingTables:
    """Embeddings that are a sum of look-ups, a norm, and a projection if they are narrower than the states."""

    words: nn.Embedding
    positions: nn.Embedding
    types: nn.Embedding | None
    norm: nn.LayerNorm
    first_position: int = 0  # added to every position
    projection: nn.Linear | None = None


@dataclass(frozen=True)
class Encoder:
    """The encoder of a model for the packed loop; it shares parameters with the Hugging Face model."""

    embed: Callable[[Packed], Tensor]
    layers: Sequence[Layer]
    final: Callable[[Tensor], Tensor]  # norm before every head, identity where the family has none
    hidden: int
    positions: int  # the longest row the backbone can take
    embed_cost: HeadCost = FREE
    tables: EmbeddingTables | None = None  # what `embed` looks up, where it is nothing but look-ups

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)


class DecoderBlock(Protocol):
    """One decoder block: whole sentences at once in training, token by token at run time."""

    cost: BlockCost

    def __call__(self, x: Tensor, source: Tensor, mask: Tensor | None, computed: Tensor | None = None) -> Tensor:
        """Return the states of target tokens after the block: [rows, tokens, hidden] → the same shape.

        Each token attends to itself, to the tokens before it, and to `source` [rows, source tokens, hidden], where
        `mask` [rows, 1, 1, source tokens] is True if the source is not padding. With `computed` [rows, tokens] only
        those tokens are computed; the others keep their states and serve as keys.
        """

    def step_block(self) -> StepBlock:
        """Return the block for the decode loop, with its parameters as they are now."""


@dataclass(frozen=True)
class Decoder:
    """The decoder of an encoder–decoder; it shares parameters with the Hugging Face model."""

    embed: Callable[[Tensor, Tensor], Tensor]  # ids and their positions → states
    blocks: Sequence[DecoderBlock]
    head: Callable[[Tensor], Tensor]  # states → scores over the vocabulary
    hidden: int
    heads: int
    positions: int  # the longest sentence it can produce
    vocabulary: int
    fixed: frozenset[str] = frozenset()  # parameters of the model that are never trained

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)


@dataclass(frozen=True)
class Head:
    """The model's own Hugging Face head, applied to packed states after `Encoder.final`."""

    apply: Callable[[Packed], Tensor]
    cost: HeadCost
    spec: HeadSpec | None = None  # the same as plain data, where it is nothing but linear layers


def row_head(apply: Callable[[Tensor], Tensor], *modules: nn.Module, steps: tuple[Step, ...] = ()) -> Head:
    """Return a head that reads each row's first token; `steps` are the same head as plain data."""
    spec = HeadSpec(("first",), steps) if steps else None
    return Head(lambda packed: apply(packed.first()), HeadCost(linear_macs(*modules), 0), spec)


def token_head(apply: Callable[[Tensor], Tensor], *modules: nn.Module) -> Head:
    """Return a head that is applied to every token."""
    return Head(lambda packed: apply(packed.states), HeadCost(0, linear_macs(*modules)))


def linear_macs(*modules: nn.Module) -> int:
    """Return the MACs of the linear layers in `modules`, applied once each."""
    parts = [part for module in modules for part in module.modules() if isinstance(part, nn.Linear)]
    return sum(part.in_features * part.out_features for part in parts)


def names() -> list[str]:
    """Return the names of all backbones: the files of this folder."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def find(model_type: str) -> Any:
    """Return the backbone module for a Hugging Face `model_type`."""
    modules = [import_module(f"{__name__}.{name}") for name in names()]
    for module in modules:
        if model_type in module.MODEL_TYPES:
            return module
    known = ", ".join(sorted(kind for module in modules for kind in module.MODEL_TYPES))
    raise OfframpError(
        "a backbone Offramp can run packed",
        f"a model of type {model_type!r}",
        f"use one of: {known}; or add one file under backbones/ (see CONTRIBUTING.md)",
    )


def encoder(model: PreTrainedModel) -> Encoder:
    """Return the encoder of any supported Hugging Face model."""
    result: Encoder = find(model.config.model_type).encoder(model)
    return result


def head(model: PreTrainedModel, auto_class: str) -> Head:
    """Return the model's own head for a task."""
    module = find(model.config.model_type)
    result: Head | None = module.head(model, auto_class)
    if result is None:
        raise OfframpError(
            f"a head for {auto_class}",
            f"a {model.config.model_type} model, whose backbone file has none",
            "pick another task or backbone, or add the head to the backbone file",
        )
    return result


def decoder(model: PreTrainedModel) -> Decoder:
    """Return the decoder of a model that has a head for `AutoModelForSeq2SeqLM`."""
    result: Decoder = find(model.config.model_type).decoder(model)
    return result


for _family in names():  # importing the file of our own family registers it with transformers
    import_module(f"{__name__}.{_family}")
