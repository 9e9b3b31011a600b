"""How much each token of a row matters, layer by layer, as four techniques see it; one row at a time.

Every technique gives, for each layer, shares that add up to one over the row's tokens: raw attention and attention
rollout (received from all tokens), saliency (gradient × state of the gold logit, at the states that enter the layer)
and the contribution predictors of an AdapLeR run (0 for tokens that have left).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offramp import engines
from offramp.core import policy
from offramp.core.loop import State, run
from offramp.inference.run_folder import LoadedRun
from offramp.nn.batches import Batch
from offramp.nn.network import Network
from offramp.nn.token_scorers import token_shares
from offramp.training.saliency import saliencies


def attentions(network: Network, ids: list[int]) -> Tensor:
    """Hugging Face's own attention, averaged over heads."""  # [layers, queries, keys]
    model, before = network.hf, network.hf.config._attn_implementation
    model.set_attn_implementation("eager")  # the others do not give it away
    try:
        with torch.no_grad():
            made = model(input_ids=torch.tensor([ids], device=network.device), output_attentions=True)
    finally:
        model.set_attn_implementation(before)
    return torch.stack([layer[0].mean(0) for layer in made.attentions])


def rollout(attention: Tensor) -> Tensor:
    """Attention to the input tokens through all layers below, each half itself and half what it attends to."""
    mixed = (attention + torch.eye(attention.shape[-1], device=attention.device)) / 2
    flow = [mixed[0]]
    for layer in mixed[1:]:
        flow.append(layer @ flow[-1])
    return torch.stack(flow)  # [layers, tokens, input tokens]


def salient(network: Network, row: Batch) -> Tensor:
    """Saliency of the states that enter each layer."""  # [layers, tokens]
    raw = torch.stack(saliencies(network, row, list(range(network.depth))))
    return raw / raw.sum(1, keepdim=True).clamp(min=1e-30)


@dataclass
class _Listening(policy.Policy):
    """Notes what predictors say, and lets another policy decide."""

    network: Network
    inner: policy.Policy
    tokens: int
    said: list[Tensor] = field(default_factory=list)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        share = token_shares(self.network.predictor(layer, s.packed), s.packed)
        self.said.append(share.new_zeros(self.tokens).index_copy(0, s.packed.tokens["origin"], share))
        return self.inner.before_layer(layer, s)


def predicted(model: LoadedRun, row: Batch, scale: float) -> Tensor:
    """What an AdapLeR run's predictors say before each layer, tokens leaving as they do at this scale."""
    network = model.network
    inner = model.method.policy(network, model.method.settings(scale=scale))
    listening = _Listening(network, inner, row.packed.total)
    with torch.no_grad():
        run(engines.make("torch", network.encoder), network, listening, row.packed)
    return torch.stack(listening.said)  # [layers, tokens]
