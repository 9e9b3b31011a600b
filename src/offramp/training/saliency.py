"""Gradient × input: how much each token's embedding moves the right answer. Kept on disk by row, for resuming."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offramp.nn.batches import Batch, Data, build_batch
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers


@dataclass(frozen=True)
class TokenTable:
    """Numbers for every token of every encoded row."""

    rows: tuple[Tensor, ...]  # each [tokens, …]

    def for_batch(self, some: Batch) -> Tensor:
        """The numbers of a batch, packed as its tokens are."""
        return torch.cat([self.rows[i] for i in some.indices]).to(some.targets.device)


def token_table(network: Network, data: Data, path: Path, measure: Callable[[Network, Batch], Tensor]) -> TokenTable:
    """What `measure` says of all rows to the network as it stands now, or what was kept from before."""
    if not path.is_file():
        network.eval()
        size, total = 32, len(data.encoded)
        chunks = [range(start, min(start + size, total)) for start in range(0, total, size)]
        made = [build_batch(network.task, data, chunk, None).to(network.device) for chunk in chunks]
        write_token_table(path, torch.cat([measure(network, one).float().cpu() for one in made]))
    return read_token_table(path, data)


def write_token_table(path: Path, values: Tensor) -> None:
    """All tokens' numbers in one file, whole or not at all."""
    fresh = path.with_suffix(f".{os.getpid()}.new")  # several processes may make the same file
    save_file({"tokens": values.contiguous()}, fresh)
    fresh.replace(path)


def read_token_table(path: Path, data: Data) -> TokenTable:
    """A kept table of these rows."""
    return TokenTable(load_file(path)["tokens"].split([len(e.ids) for e in data.encoded]))


def saliency(network: Network, some: Batch) -> Tensor:
    """‖∂z/∂h ⊙ h‖₂ of every token, h the embedding and z what the model says for the gold answer."""  # [tokens]
    return saliencies(network, some, [0])[0]


def saliencies(network: Network, some: Batch, layers: list[int]) -> list[Tensor]:
    """The same for the states after each of these layers (0: the embeddings)."""
    with torch.no_grad():
        leaf = network.encoder.embed(some.packed)
    leaf.requires_grad_()
    with torch.enable_grad():
        made = forward_all_layers(replace(network.encoder, embed=lambda _: leaf), some.packed)
        said = gold_scores(network, network(network.depth, made.after(network.depth)), some)
    states = [made.states[layer] for layer in layers]
    grads = torch.autograd.grad(said.sum(), states)
    return [(g * h).norm(dim=1).detach() for g, h in zip(grads, states, strict=True)]


def gold_scores(network: Network, logits: Tensor, some: Batch) -> Tensor:
    """What the model says for the right answer of each row: its logit, the number itself where the answer is one,
    and where a row has many answers (tags, spans) their log-likelihood."""  # [rows]
    task = network.task
    if task.kind == "row":
        return logits.gather(1, some.targets[:, None])[:, 0] if "distribution" in task.provides else logits[:, 0]
    return -task.loss(logits, some.targets, some.packed.lengths.to(logits.device), "rows")
