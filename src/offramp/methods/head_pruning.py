"""Head pruning (Michel et al. 2019): heads whose gate matters least to the loss go for good, the rest is re-trained.

What it does: the model is fine-tuned; over some training rows, one at a time, the importance of every head is summed
up as |∂loss/∂gate| of a gate on its output; the least important heads of all layers together are removed until a share
`heads` is left (of every layer at least one), and what is left is fine-tuned again. With `neurons` below 1 neurons of
the feed-forward halves go in the same way, by which any share of the compute can be reached.
Modifications from the paper: all heads go in one step; re-training, which the paper leaves out; neurons.
Relations: a static baseline like `truncate` and `layerdrop`; its cost is counted against the model it was cut from. The
folder's weights are whole, with zeros where a removed head or neuron would answer, so plain transformers gives the same
answers; here the layers are narrowed when the folder is loaded, so that time is saved too. Layers that share parameters
(ALBERT) lose the same heads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offramp.backbones import PrunableLayer
from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods._base import Method, NoSettings
from offramp.nn.batches import Data, build_batch
from offramp.nn.network import Network
from offramp.nn.setting_space import FixedSpace
from offramp.training.forward import forward_all_layers
from offramp.training.losses import exit_loss
from offramp.training.stage import Stage

FILE = "importance.safetensors"


@dataclass(frozen=True)
class HeadPruningOptions:
    """How much stays, and how it is chosen."""

    heads: float = 0.5  # share of the heads that stay
    neurons: float = 1.0  # share of the feed-forward neurons that stay
    per_layer: bool = True  # importance is divided by its norm in each layer, as in the paper
    rows: int = 512  # training rows that importance is summed up over
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        for name, share in (("heads", self.heads), ("neurons", self.neurons)):
            if not 0.0 < share <= 1.0:
                raise OfframpError(f"a share of {name} to keep", f"{name}={share}", "use above 0 up to 1, e.g. 0.5")
        if self.rows < 1:
            raise OfframpError("training rows to judge heads by", f"rows={self.rows}", "use 1 or more, e.g. 512")


class Kept(nn.Module):
    """Which heads and neurons are left, saved with the model."""

    heads: Tensor  # [distinct layers, heads] bool
    neurons: Tensor  # [distinct layers, neurons] bool

    def __init__(self, layers: list[PrunableLayer]) -> None:
        super().__init__()
        wide = layers[0].output_projections()[1].in_features
        self.register_buffer("heads", torch.ones(len(layers), layers[0].heads, dtype=torch.bool))
        self.register_buffer("neurons", torch.ones(len(layers), wide, dtype=torch.bool))


def distinct(network: Network) -> list[PrunableLayer]:
    """The layers that have parameters of their own, once each."""
    found = {id(layer): layer for layer in network.encoder.layers if isinstance(layer, PrunableLayer)}
    if not found:
        asked, given = "to prune heads", f"a {network.hf.config.model_type} model, whose layers cannot be narrowed"
        raise OfframpError(asked, given, "use another backbone or method")
    return list(found.values())


def importance(network: Network, data: Data, rows: int) -> tuple[Tensor, Tensor]:
    """Σ over rows of |∂loss/∂gate| for every head and every neuron of every distinct layer.

    A gate on a head's output scales the columns it owns in the output projection, so its derivative is read off the
    gradient of those columns: no gate is ever built.
    """
    network.eval()
    layers = distinct(network)
    weights = [linear.weight.requires_grad_(True) for layer in layers for linear in layer.output_projections()]
    heads, neurons = torch.zeros(len(layers), layers[0].heads), torch.zeros(len(layers), weights[1].shape[1])
    for row in range(0, len(data.encoded), -(-len(data.encoded) // rows)):  # evenly spread: files may be sorted
        made = build_batch(network.task, data, [row], seed=0).to(network.device)
        loss = exit_loss(
            network, network.depth, forward_all_layers(network.encoder, made.packed).after(network.depth), made
        )
        grads = torch.autograd.grad(loss, weights)
        scaled = [(weight * grad).sum(0).detach().cpu() for weight, grad in zip(weights, grads, strict=True)]
        heads += torch.stack([by_column.view(heads.shape[1], -1).sum(1) for by_column in scaled[0::2]]).abs()
        neurons += torch.stack(scaled[1::2]).abs()
    return heads, neurons


def chosen(scores: Tensor, share: float, per_layer: bool) -> Tensor:
    """The most important of all layers together, and of every layer at least one."""  # [layers, n] bool
    if per_layer:
        scores = scores / scores.norm(dim=1, keepdim=True).clamp(min=1e-12)
    first = torch.zeros_like(scores).scatter(1, scores.argmax(1, keepdim=True), torch.inf)
    most = max(len(scores), round(share * scores.numel()))
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    kept[(scores + first).reshape(-1).argsort(descending=True, stable=True)[:most]] = True
    return kept.view_as(scores)


@dataclass
class Pruned(Stage):
    """Removes what matters least, then fine-tunes the rest."""

    options: HeadPruningOptions = field(kw_only=True)

    def prepare(self, data: Data, folder: Path) -> None:
        path, options = folder / FILE, self.options
        if not path.is_file():
            found = importance(self.network, data, options.rows)
            fresh = path.with_suffix(f".{os.getpid()}.new")  # several processes may make the same file
            save_file(dict(zip(("heads", "neurons"), found, strict=True)), fresh)
            fresh.replace(path)
        scores, kept = load_file(path), self.network.added["kept"]
        assert isinstance(kept, Kept)
        kept.heads.copy_(chosen(scores["heads"], options.heads, options.per_layer))
        kept.neurons.copy_(chosen(scores["neurons"], options.neurons, options.per_layer))
        silence(self.network)
        narrow(self.network)


def silence(network: Network) -> None:
    """Zeros where removed heads and neurons are projected back: the whole weights are then the pruned model's."""
    kept = network.added["kept"]
    assert isinstance(kept, Kept)
    with torch.no_grad():
        for layer, heads, neurons in zip(distinct(network), kept.heads, kept.neurons, strict=True):
            out, down = layer.output_projections()
            out.weight[:, ~heads.repeat_interleave(out.in_features // len(heads))] = 0.0
            down.weight[:, ~neurons] = 0.0


def narrow(network: Network) -> None:
    """Let layers compute only the heads and neurons that are kept."""
    kept = network.added["kept"]
    assert isinstance(kept, Kept)
    for layer, heads, neurons in zip(distinct(network), kept.heads.cpu(), kept.neurons.cpu(), strict=True):
        layer.prune(heads, neurons)


class HeadPruning(Method):
    """The least important attention heads are removed."""

    name = "head_pruning"
    settings = NoSettings
    options = HeadPruningOptions
    space = FixedSpace()

    def modules(self, network: Network, options: HeadPruningOptions) -> nn.ModuleDict:
        """The masks of what is left; everything, until it is pruned."""
        return nn.ModuleDict({"kept": Kept(distinct(network))})

    def policy(self, network: Network, settings: NoSettings) -> Policy:
        return Policy()

    def stages(self, network: Network, options: HeadPruningOptions) -> list[Stage]:
        """Fine-tune, then prune and fine-tune again."""
        return [
            Stage(network, "fine-tune", options.head_lr, fine_tuning=True),
            Pruned(network, "fine-tune pruned", options.head_lr, options=options),
        ]

    def prepare(self, network: Network, options: HeadPruningOptions) -> None:
        narrow(network)
