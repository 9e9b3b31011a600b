"""Head pruning (Michel et al. 2019): attention heads that matter least are removed, and the rest is trained again.

What it does: the model is fine-tuned; over some training rows, one at a time, the importance of every head is summed as
|∂loss/∂gate| of a gate on its output; the least important heads of all layers together are removed until a share
`heads` is left (at least one in every layer), and what is left is fine-tuned again. With `neurons` below 1, neurons of
the feed-forward halves are removed in the same way, so that any share of the compute can be reached.

Modifications (ours, not the paper's): all heads are removed in one step; training afterwards, which the paper leaves
out; neurons.

Relations: a static baseline like `truncate` and `layerdrop`; its cost is counted against the model it was cut from. The
folder holds the weights of all heads, with zeros where a removed head or neuron is projected back, so that plain
transformers gives the same answers; here layers are narrowed when the folder is loaded, so that time is saved too.
Layers that share parameters (ALBERT) lose the same heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from offramp.backbones import PrunableLayer
from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods._base import Method, NoSettings
from offramp.nn.artifacts import load_or_compute
from offramp.nn.batches import Data, build_batch
from offramp.nn.network import Network
from offramp.nn.setting_space import FixedSpace
from offramp.training.forward import forward_all_layers
from offramp.training.losses import exit_loss
from offramp.training.stage import Stage

FILE = "importance.safetensors"
KEPT_HEADS = "kept"  # key of the method's module in Network.added


@dataclass(frozen=True)
class HeadPruningOptions:
    """How much is kept, and how it is chosen."""

    heads: float = 0.5  # share of the heads that are kept
    neurons: float = 1.0  # share of the feed-forward neurons that are kept
    per_layer: bool = True  # divide importance by its norm in each layer, as in the paper
    rows: int = 512  # training rows over which importance is summed
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        for name, share in (("heads", self.heads), ("neurons", self.neurons)):
            if not 0.0 < share <= 1.0:
                raise OfframpError(f"a share of {name} to keep", f"{name}={share}", "use above 0 up to 1, e.g. 0.5")
        if self.rows < 1:
            raise OfframpError(
                "a number of training rows to measure importance on", f"rows={self.rows}", "use 1 or more, e.g. 512"
            )


class KeptHeads(nn.Module):
    """Which heads and neurons are kept; saved with the model."""

    heads: Tensor  # [distinct layers, heads] bool
    neurons: Tensor  # [distinct layers, neurons] bool

    def __init__(self, layers: list[PrunableLayer]) -> None:
        super().__init__()
        wide = layers[0].output_projections()[1].in_features
        self.register_buffer("heads", torch.ones(len(layers), layers[0].heads, dtype=torch.bool))
        self.register_buffer("neurons", torch.ones(len(layers), wide, dtype=torch.bool))


def distinct_layers(network: Network) -> list[PrunableLayer]:
    """Return the layers that have parameters of their own, once each."""
    found = {id(layer): layer for layer in network.encoder.layers if isinstance(layer, PrunableLayer)}
    if not found:
        asked, given = "to prune heads", f"a {network.hf.config.model_type} model, whose layers cannot be narrowed"
        raise OfframpError(asked, given, "use another backbone or method")
    return list(found.values())


def importance(network: Network, data: Data, rows: int) -> tuple[Tensor, Tensor]:
    """Return Σ over rows of |∂loss/∂gate| for every head and every neuron of every distinct layer.

    A gate on a head's output scales the head's columns of the output projection, so that its derivative follows from
    the gradient of those columns, and no gate has to be built.
    """
    network.eval()
    layers = distinct_layers(network)
    weights = [linear.weight.requires_grad_(True) for layer in layers for linear in layer.output_projections()]
    heads, neurons = torch.zeros(len(layers), layers[0].heads), torch.zeros(len(layers), weights[1].shape[1])
    for row in range(0, len(data.encoded), -(-len(data.encoded) // rows)):  # evenly spread: files may be sorted
        batch = build_batch(network.task, data, [row], seed=0).to(network.device)
        loss = exit_loss(
            network, network.depth, forward_all_layers(network.encoder, batch.packed).after(network.depth), batch
        )
        grads = torch.autograd.grad(loss, weights)
        scaled = [(weight * grad).sum(0).detach().cpu() for weight, grad in zip(weights, grads, strict=True)]
        heads += torch.stack([by_column.view(heads.shape[1], -1).sum(1) for by_column in scaled[0::2]]).abs()
        neurons += torch.stack(scaled[1::2]).abs()
    return heads, neurons


def most_important(scores: Tensor, share: float, per_layer: bool) -> Tensor:
    """Return the most important heads of all layers together, at least one in every layer."""  # [layers, n] bool
    if per_layer:
        scores = scores / scores.norm(dim=1, keepdim=True).clamp(min=1e-12)
    first = torch.zeros_like(scores).scatter(1, scores.argmax(1, keepdim=True), torch.inf)
    count = max(len(scores), round(share * scores.numel()))
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    kept[(scores + first).reshape(-1).argsort(descending=True, stable=True)[:count]] = True
    return kept.view_as(scores)


@dataclass
class PrunedStage(Stage):
    """Removes the least important heads and neurons, then fine-tunes the rest."""

    options: HeadPruningOptions = field(kw_only=True)

    def prepare(self, data: Data, folder: Path) -> None:
        options = self.options

        def compute() -> dict[str, Tensor]:
            return dict(zip(("heads", "neurons"), importance(self.network, data, options.rows), strict=True))

        scores, kept = load_or_compute(folder / FILE, compute), self.network.added[KEPT_HEADS]
        assert isinstance(kept, KeptHeads)
        kept.heads.copy_(most_important(scores["heads"], options.heads, options.per_layer))
        kept.neurons.copy_(most_important(scores["neurons"], options.neurons, options.per_layer))
        zero_removed(self.network)
        narrow(self.network)


def zero_removed(network: Network) -> None:
    """Set the output weights of removed heads and neurons to zero, so that the whole weights give the same model."""
    kept = network.added[KEPT_HEADS]
    assert isinstance(kept, KeptHeads)
    with torch.no_grad():
        for layer, heads, neurons in zip(distinct_layers(network), kept.heads, kept.neurons, strict=True):
            out, down = layer.output_projections()
            out.weight[:, ~heads.repeat_interleave(out.in_features // len(heads))] = 0.0
            down.weight[:, ~neurons] = 0.0


def narrow(network: Network) -> None:
    """Let layers compute only the heads and neurons that are kept."""
    kept = network.added[KEPT_HEADS]
    assert isinstance(kept, KeptHeads)
    for layer, heads, neurons in zip(distinct_layers(network), kept.heads.cpu(), kept.neurons.cpu(), strict=True):
        layer.prune(heads, neurons)


class HeadPruning(Method):
    """The least important attention heads are removed."""

    name = "head_pruning"
    settings = NoSettings
    options = HeadPruningOptions
    space = FixedSpace()

    def modules(self, network: Network, options: HeadPruningOptions) -> nn.ModuleDict:
        return nn.ModuleDict({KEPT_HEADS: KeptHeads(distinct_layers(network))})

    def policy(self, network: Network, settings: NoSettings) -> Policy:
        return Policy()

    def stages(self, network: Network, options: HeadPruningOptions) -> list[Stage]:
        """Return fine-tuning, then pruning with further fine-tuning."""
        return [
            Stage(network, "fine-tune", options.head_lr, fine_tuning=True),
            PrunedStage(network, "fine-tune pruned", options.head_lr, options=options),
        ]

    def prepare(self, network: Network, options: HeadPruningOptions) -> None:
        narrow(network)
