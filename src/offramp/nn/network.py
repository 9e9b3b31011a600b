"""A model as methods see it: a backbone in half-layers, a task, the model's own head, and what a method added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offramp import backbones
from offramp.backbones import Decoder, Encoder, Head, Narrowing
from offramp.core.cost import HeadCost, LayerCost
from offramp.core.packed import Packed
from offramp.errors import OfframpError
from offramp.nn.artifacts import FittedModule
from offramp.nn.bag_of_words import BagOfWordsExit, FittedBagOfWordsExit
from offramp.nn.batches import Data
from offramp.nn.exit_heads import ExitHead, SharedExitHead
from offramp.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Network:
    """Everything with parameters. Also answers the loop's two questions: what an exit says, and what parts cost."""

    hf: PreTrainedModel
    encoder: Encoder
    task: Task
    model_head: Head
    added: nn.ModuleDict  # a method's modules; exits under `exit_heads`, by layer; `last` replaces the model's own head
    newly_initialized: frozenset[str] = frozenset()  # parameters of `hf` that no checkpoint held
    decoder: Decoder | None = None  # of sequence tasks: exits and depth are then the decoder's

    @property
    def per_token(self) -> bool:
        """Whether answers are per token."""
        return self.task.kind == "token"

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._first.device

    @cached_property
    def _first(self) -> Tensor:
        """A parameter: it stays the same object wherever the model moves."""
        return next(self.hf.parameters())

    @property
    def depth(self) -> int:
        """Number of layers that a method may save: the encoder's, or the decoder's blocks where there is one."""
        return self.encoder.depth if self.decoder is None else self.decoder.depth

    @property
    def exit_heads(self) -> dict[int, ExitHead | BagOfWordsExit | FittedBagOfWordsExit | SharedExitHead]:
        """Off-ramps by the layer they follow; the last exit is the model's own head and not among them."""
        found = self.added["exit_heads"] if "exit_heads" in self.added else nn.ModuleDict()
        return {int(layer): exit_head for layer, exit_head in found.items()}  # type: ignore[operator]  # a ModuleDict

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        """Logits of the exit after `layer`, per row or per token."""
        packed = packed.with_states(self.encoder.final(packed.states))
        if layer < self.depth:
            logits: Tensor = self.added["exit_heads"][str(layer)](packed)  # type: ignore[index]  # a ModuleDict
            return logits
        said: Tensor = self.added["final_head"](packed) if "final_head" in self.added else self.model_head.apply(packed)
        return said

    def embed_cost(self) -> HeadCost:
        """MACs among the embeddings."""
        return self.encoder.embed_cost

    def layer_cost(self, layer: int) -> LayerCost:
        """MACs of layer 1…L."""
        return self.encoder.layers[layer - 1].cost

    def exit_cost(self, layer: int) -> HeadCost:
        """MACs of the exit after layer 0…L."""
        if layer < self.depth:
            own: HeadCost = self.added["exit_heads"][str(layer)].cost  # type: ignore[index]  # a ModuleDict
            return own
        cost: HeadCost = self.added["final_head"].cost if "final_head" in self.added else self.model_head.cost  # type: ignore[assignment]
        return cost

    @property
    def unpruned(self) -> Network:
        """The same network at the prices it had before parts of its layers were cut off."""
        layers = [layer.uncut() if isinstance(layer, Narrowing) else layer for layer in self.encoder.layers]
        return replace(self, encoder=replace(self.encoder, layers=layers))

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """What the method's learned unit, under `uncertainty`, says of each row: 0 sure … 1 unsure."""  # [rows, …]
        packed = packed.with_states(self.encoder.final(packed.states))
        said: Tensor = self.added["exit_unit"](layer, packed)
        return said

    def exit_unit_cost(self, layer: int) -> HeadCost:
        """MACs of that unit."""
        cost: HeadCost = self.added["exit_unit"].cost  # type: ignore[assignment]  # a module attribute
        return cost

    def predictor_cost(self, layer: int) -> HeadCost:
        """MACs of a method's own predictor at a layer: modules under `extra`, which carry a `cost`."""
        cost: HeadCost = self.added["predictors"][str(layer)].cost  # type: ignore[index]  # a ModuleDict
        return cost

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """What that predictor says of each token's state before the layer."""
        said: Tensor = self.added["predictors"][str(layer)](self.encoder.final(packed.states))  # type: ignore[index]
        return said

    def prepare(self, data: Data, folder: Path) -> None:
        """Parts that are made from training rows, not learned, are made now, or found in the folder."""
        for part in self.added.modules():
            if isinstance(part, FittedModule):
                part.prepare(self.task, data, folder)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters: `model.…` for the Hugging Face part, `added.…` for the rest."""
        yield from ((f"model.{name}", p) for name, p in self.hf.named_parameters())
        yield from ((f"added.{name}", p) for name, p in self.added.named_parameters())

    def to(self, device: torch.device) -> None:
        """All parameters on a device, in place."""
        self.hf.to(device)  # type: ignore[arg-type]  # transformers' own annotation is narrower
        self.added.to(device)

    def train(self, backbone: bool = True, added: bool = True) -> None:
        """Dropout on or off, part by part."""
        self.hf.train(backbone)
        self.added.train(added)

    def eval(self) -> None:
        """Dropout off everywhere."""
        self.train(False, False)


def bare_network(hf: PreTrainedModel, task: Task) -> Network:
    """A bare network; a method's modules are put into `added` afterwards."""
    head = backbones.head(hf, task.auto_class)
    decoder = backbones.decoder(hf) if task.kind == "sequence" else None
    if decoder is not None and task.vocabulary > decoder.vocabulary:
        given = f"a tokenizer of {task.vocabulary} pieces and a model that can say {decoder.vocabulary}"
        raise OfframpError("a model and its tokenizer", given, "use the tokenizer that the model was trained with")
    return Network(hf, backbones.encoder(hf), task, head, nn.ModuleDict(), decoder=decoder)
