"""Saliency as gradient × input: how much each token's embedding moves the score of the right answer.

Tables of such numbers, one per token of every encoded row, are stored on disk so that a resumed run reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from offramp.nn.artifacts import write_tensors
from offramp.nn.batches import Batch, Data, build_batch
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers

MEASURED_ROWS = 32  # encoded rows that a table is computed from at a time


@dataclass(frozen=True)
class TokenTable:
    """Numbers for every token of every encoded row."""

    rows: tuple[Tensor, ...]  # each [tokens, …]

    def for_batch(self, batch: Batch) -> Tensor:
        """Return the numbers of a batch, packed as its tokens are."""
        return torch.cat([self.rows[i] for i in batch.indices]).to(batch.targets.device)


def token_table(network: Network, data: Data, path: Path, measure: Callable[[Network, Batch], Tensor]) -> TokenTable:
    """Return `measure` of all rows under the network's present weights, or the table that `path` already holds."""
    if not path.is_file():
        network.eval()
        total = len(data.encoded)
        chunks = [range(start, min(start + MEASURED_ROWS, total)) for start in range(0, total, MEASURED_ROWS)]
        batches = [build_batch(network.task, data, chunk, None).to(network.device) for chunk in chunks]
        write_token_table(path, torch.cat([measure(network, batch).float().cpu() for batch in batches]))
    return read_token_table(path, data)


def write_token_table(path: Path, values: Tensor) -> None:
    """Write the numbers of all tokens to one file, completely or not at all."""
    write_tensors(path, {"tokens": values})


def read_token_table(path: Path, data: Data) -> TokenTable:
    """Return the stored table of these rows."""
    return TokenTable(load_file(path)["tokens"].split([len(e.ids) for e in data.encoded]))


def saliency(network: Network, batch: Batch) -> Tensor:
    """Return ‖∂z/∂h ⊙ h‖₂ of every token, h its embedding and z the model's score of the right answer."""  # [tokens]
    return saliencies(network, batch, [0])[0]


def saliencies(network: Network, batch: Batch, layers: list[int]) -> list[Tensor]:
    """Return the same for the states after each of these layers (0: the embeddings)."""
    with torch.no_grad():
        embeddings = network.encoder.embed(batch.packed)
    embeddings.requires_grad_()
    with torch.enable_grad():
        result = forward_all_layers(replace(network.encoder, embed=lambda _: embeddings), batch.packed)
        logits = network(network.depth, result.after(network.depth))
        scores = network.task.answer_scores(logits, batch.targets, batch.packed.lengths.to(logits.device))
    states = [result.states[layer] for layer in layers]
    grads = torch.autograd.grad(scores.sum(), states)
    return [(g * h).norm(dim=1).detach() for g, h in zip(grads, states, strict=True)]
