"""The network that methods act on: a backbone in half-layers, a task, the model's own head, and added modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offramp import backbones
from offramp.backbones import Decoder, Encoder, Head, PrunableLayer
from offramp.core.cost import HeadCost, LayerCost
from offramp.core.head_spec import DescribedHead, HeadSpec
from offramp.core.packed import Packed
from offramp.errors import OfframpError
from offramp.nn.artifacts import FittedModule
from offramp.nn.bag_of_words import BagOfWordsExit, FittedBagOfWordsExit
from offramp.nn.batches import Data
from offramp.nn.exit_heads import ExitHead, SharedExitHead
from offramp.nn.keys import EXIT_HEADS, EXIT_UNIT, FINAL_HEAD, PREDICTORS
from offramp.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Network:
    """A Hugging Face model with a task and a method's modules; it is the loop's exit heads and its cost model."""

    hf: PreTrainedModel
    encoder: Encoder
    task: Task
    model_head: Head
    added: nn.ModuleDict  # a method's modules, under the keys of `nn.keys`
    newly_initialized: frozenset[str] = frozenset()  # parameters of `hf` that the checkpoint lacked
    base_source: str | None = None  # of weights from an earlier run: the model which that run started from
    decoder: Decoder | None = None  # of sequence tasks, whose exits and depth are the decoder's

    @property
    def per_token(self) -> bool:
        """Whether answers are per token."""
        return self.task.kind == "token"

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._any_parameter.device

    @cached_property
    def _any_parameter(self) -> Tensor:
        """A parameter, which stays the same object when the model moves to another device."""
        return next(self.hf.parameters())

    @property
    def depth(self) -> int:
        """Number of layers that a method may save: the encoder's, or the decoder's blocks if there is a decoder."""
        return self.encoder.depth if self.decoder is None else self.decoder.depth

    @property
    def exit_heads(self) -> dict[int, ExitHead | BagOfWordsExit | FittedBagOfWordsExit | SharedExitHead]:
        """Exit heads by the layer they follow; the last exit, the model's own head, is not among them."""
        heads = self.added[EXIT_HEADS] if EXIT_HEADS in self.added else nn.ModuleDict()
        return {int(layer): exit_head for layer, exit_head in heads.items()}  # type: ignore[operator]  # a ModuleDict

    def __call__(self, layer: int, packed: Packed) -> Tensor:
        """Return the logits of the exit after `layer`, per row or per token."""
        packed = packed.with_states(self.encoder.final(packed.states))
        logits: Tensor
        if layer < self.depth:
            logits = self.added[EXIT_HEADS][str(layer)](packed)  # type: ignore[index]  # a ModuleDict
        else:
            logits = self.added[FINAL_HEAD](packed) if FINAL_HEAD in self.added else self.model_head.apply(packed)
        return logits

    def head_spec(self, layer: int) -> HeadSpec | None:
        """Return the exit after a layer as plain data; None where it is more than that, or missing."""
        if not isinstance(self.encoder.final, nn.Identity):
            return None
        if layer < self.depth:
            head: object = self.exit_heads.get(layer)
        elif FINAL_HEAD in self.added:
            head = self.added[FINAL_HEAD]
        else:
            return self.model_head.spec
        return head.spec() if isinstance(head, DescribedHead) else None

    def exit_unit_spec(self) -> HeadSpec | None:
        """Return the learned exit unit as plain data; None where it is more than that, or missing."""
        if EXIT_UNIT not in self.added or not isinstance(self.encoder.final, nn.Identity):
            return None
        unit: object = self.added[EXIT_UNIT]
        return unit.spec() if isinstance(unit, DescribedHead) else None

    def embed_cost(self) -> HeadCost:
        """Return the MACs of the embeddings."""
        return self.encoder.embed_cost

    def layer_cost(self, layer: int) -> LayerCost:
        """Return the MACs of layer 1…L."""
        return self.encoder.layers[layer - 1].cost

    def exit_cost(self, layer: int) -> HeadCost:
        """Return the MACs of the exit after layer 0…L."""
        if layer < self.depth:
            own: HeadCost = self.added[EXIT_HEADS][str(layer)].cost  # type: ignore[index]  # a ModuleDict
            return own
        cost: HeadCost = self.added[FINAL_HEAD].cost if FINAL_HEAD in self.added else self.model_head.cost  # type: ignore[assignment]
        return cost

    @property
    def unpruned(self) -> Network:
        """The same network with the costs its layers had before parts of them were pruned."""
        layers = [layer.at_full_cost() if isinstance(layer, PrunableLayer) else layer for layer in self.encoder.layers]
        return replace(self, encoder=replace(self.encoder, layers=layers))

    def exit_unit(self, layer: int, packed: Packed) -> Tensor:
        """Return the output of the method's learned exit unit for each row: 0 certain … 1 uncertain."""  # [rows, …]
        packed = packed.with_states(self.encoder.final(packed.states))
        output: Tensor = self.added[EXIT_UNIT](layer, packed)
        return output

    def exit_unit_cost(self, layer: int) -> HeadCost:
        """Return the MACs of the exit unit."""
        cost: HeadCost = self.added[EXIT_UNIT].cost  # type: ignore[assignment]  # a module attribute
        return cost

    def predictor_cost(self, layer: int) -> HeadCost:
        """Return the MACs of the method's own predictor at a layer, from the module's `cost`."""
        cost: HeadCost = self.added[PREDICTORS][str(layer)].cost  # type: ignore[index]  # a ModuleDict
        return cost

    def predictor(self, layer: int, packed: Packed) -> Tensor:
        """Return the predictor's output for each token's state before the layer."""
        output: Tensor = self.added[PREDICTORS][str(layer)](self.encoder.final(packed.states))  # type: ignore[index]
        return output

    def prepare(self, data: Data, folder: Path) -> None:
        """Compute what fitted modules take from the training rows, or read it from the folder."""
        for module in self.added.modules():
            if isinstance(module, FittedModule):
                module.prepare(self.task, data, folder)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters: `model.…` of the Hugging Face model, `added.…` of the method's modules."""
        yield from ((f"model.{name}", p) for name, p in self.hf.named_parameters())
        yield from ((f"added.{name}", p) for name, p in self.added.named_parameters())

    def to(self, device: torch.device) -> None:
        """Move all parameters to a device, in place."""
        self.hf.to(device)  # type: ignore[arg-type]  # transformers' own annotation is narrower
        self.added.to(device)

    def train(self, backbone: bool = True, added: bool = True) -> None:
        """Set training mode (dropout) of the backbone and of the added modules."""
        self.hf.train(backbone)
        self.added.train(added)

    def eval(self) -> None:
        """Set evaluation mode of all modules."""
        self.train(False, False)


def bare_network(hf: PreTrainedModel, task: Task) -> Network:
    """Return the network of a model without a method's modules; they are put into `added` afterwards."""
    head = backbones.head(hf, task.auto_class)
    decoder = backbones.decoder(hf) if task.kind == "sequence" else None
    if decoder is not None and task.vocabulary > decoder.vocabulary:
        given = f"a tokenizer of {task.vocabulary} pieces and a model that knows {decoder.vocabulary}"
        raise OfframpError("a model and its tokenizer", given, "use the tokenizer that the model was trained with")
    return Network(hf, backbones.encoder(hf), task, head, nn.ModuleDict(), decoder=decoder)
