"""The plain model: ordinary fine-tuning, all layers, all tokens.

What it does: runs the model through the packed loop without any decision. Every other method is measured against it.

Relations: its training is the first stage of methods with two stages, which `--init` lets start from a run of this one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from offramp.core.policy import Policy
from offramp.decoding.training import translation_stages
from offramp.methods._base import Method, NoSettings
from offramp.nn.network import Network
from offramp.nn.setting_space import FixedSpace
from offramp.training.stage import Stage


@dataclass(frozen=True)
class FullOptions:
    """How the model is trained."""

    head_lr: float = 5e-4


class Full(Method):
    """The plain model."""

    name = "full"
    settings = NoSettings
    options = FullOptions
    space = FixedSpace()
    decodes = True

    def modules(self, network: Network, options: FullOptions) -> nn.ModuleDict:
        return nn.ModuleDict()

    def policy(self, network: Network, settings: NoSettings) -> Policy:
        return Policy()

    def stages(self, network: Network, options: FullOptions) -> list[Stage]:
        """Return fine-tuning; of a translation model, by teacher forcing."""
        if network.decoder is not None:
            return translation_stages(network, options.head_lr)
        return [Stage(network, head_lr=options.head_lr)]
