"""No adaptivity: ordinary fine-tuning, all layers, all tokens.

What it does: the plain model through the packed loop. Every other method is measured against it.
Relations: the first stage of the two-stage methods; `--init` lets them start from a run of this one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from offramp.core import policy
from offramp.decoding.training import plain_stages
from offramp.nn.network import Network
from offramp.nn.setting_space import Fixed
from offramp.training.stage import Stage

SPACE = Fixed()
HF_EQUAL = True
NEEDS: tuple[str, ...] = ()
DECODES = True


@dataclass(frozen=True)
class Settings:
    """Nothing to turn."""


@dataclass(frozen=True)
class Options:
    """How it is trained."""

    head_lr: float = 5e-4


def modules(network: Network, options: Options) -> nn.ModuleDict:
    """Nothing is added."""
    return nn.ModuleDict()


class Policy(policy.Policy):
    """Never says a word."""

    def __init__(self, network: Network, settings: Settings) -> None:
        super().__init__()


def stages(network: Network, options: Options) -> list[Stage]:
    """One: fine-tune, or for a task that says sentences teach them word by word."""
    if network.decoder is not None:
        return plain_stages(network, options.head_lr)
    return [Stage(network, head_lr=options.head_lr)]
