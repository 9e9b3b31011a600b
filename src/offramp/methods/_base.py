"""The contract of a method.

A method is a class in a file (or package) of this folder; its instances hold no state. `Method` is the whole contract.
`DepthMethod` is a method whose exits can also be trained by the stages of a length method, because it states its loss
as an objective; `LengthMethod` is a method that drops tokens and whose stages accept such an objective. One of
each form a `PairMethod`, named `length+depth`: tokens leave by the first, rows exit by the second.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from offramp.core.policy import PairPolicy, Policy
from offramp.nn.exit_policies import ThresholdSettings, WeightedOptions, exit_modules
from offramp.nn.keys import EXIT_HEADS
from offramp.nn.network import Network
from offramp.nn.setting_space import IntegerSpace, ProductSpace, Space, ThresholdSpace
from offramp.tasks import Task
from offramp.training.objectives import Objective, joint_stages, weighted_objective
from offramp.training.stage import Stage
from offramp.utils.merged_dataclass import merge_dataclasses


@dataclass(frozen=True)
class NoSettings:
    """Nothing can be changed at run time."""


class Method(ABC):
    """How a network is extended, trained and run adaptively."""

    name: str  # the name of the file
    settings: type[Any]  # frozen dataclass of what can be changed at run time; the defaults give the full model
    options: type[Any]  # frozen dataclass of how the method is built and trained
    space: Space  # how a budget becomes settings
    needs: frozenset[str] = frozenset()  # what a task must provide, e.g. "distribution"
    hf_equal: bool = True  # with default settings the method is the plain Hugging Face model
    of_a_task: frozenset[str] = frozenset({EXIT_HEADS})  # keys of modules that never come from an earlier run's model
    earlier_options: Mapping[str, Any] = {}  # values of options that run folders of earlier versions lack
    decodes: bool = False  # the method also serves tasks that generate text with a decoder

    @abstractmethod
    def modules(self, network: Network, options: Any) -> nn.ModuleDict:
        """Return the modules that the method adds to a network, under the keys of `nn/keys.py` where one fits."""

    @abstractmethod
    def policy(self, network: Network, settings: Any) -> Policy:
        """Return the policy that the loop consults at these settings."""

    @abstractmethod
    def stages(self, network: Network, options: Any) -> list[Stage]:
        """Return the stages of training, in order."""

    def prepare(self, network: Network, options: Any) -> None:  # noqa: B027  # most methods change nothing
        """Change a network that was just loaded, according to its added modules (such as pruned heads)."""

    def about(self, network: Network) -> dict[str, list[int]]:
        """Return numbers of each layer that a model card shows."""
        return {}

    @property
    def summary(self) -> str:
        """The first line of the docstring of the method's file."""
        return (sys.modules[type(self).__module__].__doc__ or "").strip().partition("\n")[0]

    @property
    def replays(self) -> bool:
        """Whether settings never change later states, so that one recording gives the outcome of each setting."""
        return isinstance(self.space, ThresholdSpace | IntegerSpace) and self.space.replay

    def serves(self, task: Task | type[Task]) -> bool:
        """Return whether a task provides what this method needs."""
        return self.decodes if task.kind == "sequence" else self.needs <= task.provides


class DepthMethod(Method):
    """A method whose rows exit early, trained by one objective over all exits.

    By default it adds an exit head after every layer and trains all of them with the backbone by a weighted sum of
    losses; a subclass then only has to say how rows exit.
    """

    settings: type[Any] = ThresholdSettings
    options: type[Any] = WeightedOptions
    needs = frozenset({"distribution"})

    def modules(self, network: Network, options: Any) -> nn.ModuleDict:
        return exit_modules(network, options)

    def objective(self, options: Any) -> Objective:
        """Return the loss of all exits as a function of a network, its states after every layer and a batch."""
        return weighted_objective(options)

    def stages(self, network: Network, options: Any) -> list[Stage]:
        return joint_stages(network, options)


class LengthMethod(Method):
    """A method that drops tokens, and whose training can include the exits of a depth method."""

    @abstractmethod
    def stages(self, network: Network, options: Any, objective: Objective | None = None) -> list[Stage]:
        """Return the stages of training; those after the shared fine-tuning also train by `objective`, if given, and
        then declare all parameters as trainable."""


class PairMethod(Method):
    """A length method and a depth method together: modules of both, one policy after the other, the stages of the
    length method trained by the objective of the depth method."""

    def __init__(self, length: LengthMethod, depth: DepthMethod) -> None:
        self.length, self.depth = length, depth
        self.name = f"{length.name}+{depth.name}"
        self.merged_settings = merge_dataclasses(
            "PairSettings", (length.name, length.settings), (depth.name, depth.settings), shared=False
        )
        self.merged_options = merge_dataclasses(
            "PairOptions", (length.name, length.options), (depth.name, depth.options), shared=True
        )
        self.settings, self.options = self.merged_settings.kind, self.merged_options.kind
        self.space = ProductSpace(length.space, depth.space)
        self.needs = length.needs | depth.needs
        self.of_a_task = length.of_a_task | depth.of_a_task
        self.hf_equal = length.hf_equal and depth.hf_equal
        self.earlier_options = {**length.earlier_options, **depth.earlier_options}

    @property
    def summary(self) -> str:
        return f"{self.length.summary.removesuffix('.')}; with it {self.depth.summary}"

    def modules(self, network: Network, options: Any) -> nn.ModuleDict:
        first, second = self.merged_options.split(options)
        return nn.ModuleDict({**self.length.modules(network, first), **self.depth.modules(network, second)})

    def policy(self, network: Network, settings: Any) -> Policy:
        first, second = self.merged_settings.split(settings)
        return PairPolicy(self.length.policy(network, first), self.depth.policy(network, second))

    def stages(self, network: Network, options: Any) -> list[Stage]:
        first, second = self.merged_options.split(options)
        return self.length.stages(network, first, self.depth.objective(second))

    def prepare(self, network: Network, options: Any) -> None:
        for method, part in zip((self.length, self.depth), self.merged_options.split(options), strict=True):
            method.prepare(network, part)

    def about(self, network: Network) -> dict[str, list[int]]:
        return {**self.length.about(network), **self.depth.about(network)}
