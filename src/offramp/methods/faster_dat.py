"""Faster Depth-Adaptive Transformer (Liu et al. 2021): every word's depth is known before the model runs.

What it does: a table of word depths is made from the training rows. `mi`: mutual information of a word's presence and
the label, −log, as many bins of equal width as layers: what tells most goes least deep. `reconstruction`: the layer
after which a masked language model guesses the word best, argmin of loss_n + λn, averaged over (20 of) its occurrences.
At run time a token past its depth goes idle (still key and value, no longer computed), a row ends with its deepest
word, and a head reads maximum and mean of all tokens. Training runs by the same rule, through the same loop.
Modifications from the paper: λn is added (Eq. 4 prints a minus, against its own text and Table 4); a row stops at its
own deepest word, not at the batch's; depths of new text are looked up (`transductive=true` is the paper's form, a
masked pass for every word of the text to be answered, counted in its cost); many well-spaced masks a pass; pieces share
their word's depth, words never seen get the median of those seen, special tokens go with the row's deepest word (and
so do, on spans, the words of the question); tagging (labels: the tags that occur in the row; no pooling) and numbers
(labels: quarters of their range by rank) too. `deep=telling` turns the table of `mi` round: what tells most goes
deepest. `least` is the smallest information told apart: words that tell next to nothing by accident make all bins wide,
and a higher floor, such as 1e-7, sends more words deep, at the cost of MACs.
Relations: token_exit decides on the way what this one plans; depth_adaptive is its halting-unit baseline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from offramp import engines
from offramp.core.loop import State, run
from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods._base import Method
from offramp.methods._shared.guessed import Passes, count, estimate
from offramp.methods._shared.masked import MaskedModel
from offramp.methods._shared.plans import (
    PENALTIES,
    Extent,
    Guessing,
    GuessWords,
    by_information,
    by_reconstruction,
    some_of,
)
from offramp.nn.artifacts import kept
from offramp.nn.batches import Batch, Data
from offramp.nn.exit_heads import CostOnly, MeanMaxHead, SharedExitHead
from offramp.nn.mutual_information import LEAST
from offramp.nn.network import Network
from offramp.nn.setting_space import Integer
from offramp.nn.words import WordDepths, Words, depths_at, spread_out, words_of
from offramp.training.stage import Backward, Stage


@dataclass(frozen=True)
class FasterDATSettings:
    """`cap`: nobody goes deeper (0: as planned). `penalty`: another λ than trained with (−1), for reconstruction."""

    cap: int = 0
    penalty: float = -1.0

    def __post_init__(self) -> None:
        if self.cap < 0:
            raise OfframpError("a largest depth", f"cap={self.cap}", "use 1, 2, …; 0 leaves depths as planned")
        if self.penalty != -1.0 and not 0.0 <= self.penalty <= PENALTIES[-1]:
            raise OfframpError("a penalty λ for depth", f"penalty={self.penalty}", f"use 0 to {PENALTIES[-1]:g}")


@dataclass(frozen=True)
class FasterDATOptions:
    """How depths are estimated and the model is built; fixed once trained."""

    estimation: Literal["mi", "reconstruction"] = "mi"
    layers: int = 0  # the largest depth N; 0: all the layers there are
    deep: Literal["rare", "telling"] = "rare"  # mi: which words go deep: those that tell little (as published), or much
    smoothing: float = 0.1  # mi: added to every count
    least: float = LEAST  # mi: what tells less counts as telling this much
    penalty: float = 0.1  # reconstruction: λ
    spacing: int = 8  # reconstruction: words from one mask to the next; 0: one mask a pass
    occurrences: int = 20  # reconstruction: of each word, as many are looked at, spread over the rows; 0: all
    rows: int = 5000  # reconstruction: training rows the table is made from; 0: all
    transductive: bool = False  # reconstruction: a pass for every word of the text to be answered, no table
    least_count: int = 1  # words that occur less often count as unseen
    unseen: int = 0  # the depth of unseen words; 0: the median of the seen ones
    pool: Literal["meanmax", "own"] = "meanmax"  # what the head reads; own: the model's own head
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        for name, fine, fix in (
            ("layers", self.layers >= 0, "1, 2, …, or 0 for all layers"),
            ("smoothing", self.smoothing > 0.0, "a number above 0, e.g. 0.1"),
            ("least", 0.0 < self.least < 1.0, "a number above 0 and below 1, e.g. 1e-7"),
            ("penalty", 0.0 <= self.penalty <= PENALTIES[-1], f"0 to {PENALTIES[-1]:g}, e.g. 0.1"),
            ("spacing", self.spacing == 0 or self.spacing >= 2, "2 or more words, or 0 for one mask a pass"),
            ("occurrences", self.occurrences >= 0, "a number of occurrences, or 0 for all"),
            ("rows", self.rows >= 0, "a number of rows, or 0 for all"),
            ("unseen", self.unseen >= 0, "a depth, or 0 for the median"),
            ("transductive", not self.transductive or self.estimation == "reconstruction",
             "false; or say estimation=reconstruction"),
        ):  # fmt: skip
            if not fine:
                raise OfframpError("options of faster_dat", f"{name}={getattr(self, name)}", f"use {fix}")


class FasterDATPolicy(Policy):
    """Looks depths up, lets tokens past theirs idle, and ends a row with its deepest word."""

    def __init__(self, network: Network, settings: FasterDATSettings) -> None:
        self.table, self.masked = _table(network), _masked(network)
        self.cap = settings.cap or self.table.layers
        self.penalty = self.table.penalty if settings.penalty < 0.0 else settings.penalty
        if settings.penalty >= 0.0 and self.masked is None:
            given = f"penalty={settings.penalty} for depths by mutual information"
            raise OfframpError("another penalty λ", given, "use cap, or train with --set estimation=reconstruction")

    def on_embeddings(self, s: State) -> None:
        words = words_of(s.packed)
        tokens, last = spread_out(words, self.depths(words, s).clamp(max=self.cap), s.packed, self.cap)
        s.packed = s.packed.with_tokens(depth=tokens).with_rows(last=last)

    def depths(self, words: Words, s: State) -> Tensor:
        """How deep each word goes."""  # [words]
        if self.masked is None or not self.masked.stays:
            return self.table.look_up(words, self.penalty)
        penalties, note = torch.tensor([self.penalty]), partial(count, s, self.table.layers)
        return estimate(self.masked, s.packed, Passes(self.table.layers, 0), penalties, note).squeeze(1).long()

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        going = s.packed.tokens["depth"] >= layer
        if not bool(going.all()):
            s.packed = s.packed.with_tokens(gate=going.float())
        return None

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        return s.packed.rows["last"] <= layer if layer else None

    def why(self, layer: int, s: State) -> str:
        return f"its deepest word goes through {int(s.packed.rows['last'][0])} layers" if layer else ""


def _table(network: Network) -> WordDepths:
    return network.added["depths"]  # type: ignore[return-value]  # a ModuleDict


def _masked(network: Network) -> MaskedModel | None:
    found = "masked" in network.added
    return network.added["masked"] if found else None  # type: ignore[return-value]  # a ModuleDict


def _deepest(network: Network) -> int:
    """The largest depth that any word has."""
    table, masked = _table(network), _masked(network)
    return table.layers if masked is not None and masked.stays else table.deepest


@dataclass
class _Given(FasterDATPolicy):
    """Depths of the words of one batch, estimated before."""

    network: Network
    given: Tensor  # [words]

    def __post_init__(self) -> None:
        super().__init__(self.network, FasterDATSettings())

    def depths(self, words: Words, s: State) -> Tensor:
        return self.given.to(words.key.device)


@dataclass
class Planned(Stage):
    """Fine-tuning by the rule of run time, through the loop, over depths planned beforehand."""

    options: FasterDATOptions = field(kw_only=True)
    own: tuple[Tensor, ...] = ()  # transductive: the depths of each training row's words

    def prepare(self, data: Data, folder: Path) -> None:
        made = kept(folder / "depths.safetensors", lambda: self._plan(data))
        _table(self.network).fill({name: tensor.to(self.network.device) for name, tensor in made.items()})
        if self.options.transductive:
            depths = depths_at(made["own"], made["penalties"], self.options.penalty)
            self.own = depths.split(made["words"].tolist())
        masked = _masked(self.network)
        if masked is not None and not self.options.transductive:
            masked.clear()

    def _plan(self, data: Data) -> dict[str, Tensor]:
        """The table, and for the transductive form the depths of every word of every row."""
        options, layers, masked = self.options, _table(self.network).layers, _masked(self.network)
        extent = Extent(layers, options.least_count, options.unseen)
        if masked is None:
            telling = options.deep == "telling"
            return by_information(self.network.task, data, extent, options.smoothing, telling, options.least)
        how, some = Guessing(options.spacing, options.penalty, options.occurrences), some_of(data, options.rows)
        if options.transductive:
            how, some = Guessing(0, options.penalty), data
        return by_reconstruction(self.network, masked, some, extent, how)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        net, layers = self.network, _table(self.network).layers
        above = {id(p) for layer in net.encoder.layers[layers:] for p in layer.parameters()}
        above -= {id(p) for layer in net.encoder.layers[:layers] for p in layer.parameters()}
        base = {id(p) for name, p in net.hf.base_model.named_parameters() if "pooler" not in name} - above
        every = list(net.named_parameters())
        if "final_head" not in net.added:
            return [(name, p) for name, p in every if name.startswith("model.") and id(p) not in above]
        return [(name, p) for name, p in every if id(p) in base or name.startswith("added.final_head.")]

    def policy(self) -> Policy:
        return FasterDATPolicy(self.network, FasterDATSettings())

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        rule = FasterDATPolicy(self.network, FasterDATSettings())
        if self.own:
            rule = _Given(self.network, torch.cat([self.own[i] for i in batch.ids]))
        made = run(engines.make("torch", self.network.encoder), self.network, rule, batch.packed)
        lengths = batch.packed.lengths.to(made.logits.device)
        loss = self.network.task.loss(made.logits, batch.targets, lengths)
        backward(loss)
        return {"loss": loss.detach()}


class FasterDAT(Method):
    """The depth of every word is looked up before the model runs."""

    name = "faster_dat"
    settings = FasterDATSettings
    options = FasterDATOptions
    space = Integer("cap", loosest=0, replay=False, most=lambda network: _deepest(network) - 1)
    hf_equal = False

    def modules(self, network: Network, options: FasterDATOptions) -> nn.ModuleDict:
        """The table, one head for all layers, and the masked model where depths are estimated by it."""
        if network.task.outputs == 0:
            given = "answers as wide as a vocabulary"
            raise OfframpError(f"faster_dat for {network.task.name}", given, "use it for classification or tagging")
        if options.layers > network.depth:
            given = f"layers={options.layers}"
            raise OfframpError("a largest depth", given, f"this model has {network.depth} layers; 0 takes all")
        added = nn.ModuleDict({"depths": WordDepths(options.layers or network.depth, options.penalty)})
        apply, cost = network.last.apply, network.last.cost
        if options.pool == "meanmax" and not network.per_token:
            head = MeanMaxHead(network.encoder.hidden, network.task.outputs)
            added["final_head"], apply, cost = head, head.forward, head.cost
        numbers = [str(layer) for layer in range(1, network.depth)]
        added["exit_heads"] = nn.ModuleDict({layer: SharedExitHead(apply, cost) for layer in numbers})
        if options.estimation == "reconstruction":
            added["masked"] = masked = MaskedModel(network.hf.config, stays=options.transductive)
            prices = {layer: CostOnly(lambda: masked.head.cost) for layer in [*numbers, str(network.depth)]}
            added["predictors"] = nn.ModuleDict(prices)
        return added

    def policy(self, network: Network, settings: FasterDATSettings) -> Policy:
        return FasterDATPolicy(network, settings)

    def stages(self, network: Network, options: FasterDATOptions) -> list[Stage]:
        """Fine-tune over planned depths; before that, for reconstruction, teach the masked model."""
        masked, first = _masked(network), list[Stage]()
        if masked is not None:
            masked.load(network.hf.name_or_path)
            layers = _table(network).layers
            first = [GuessWords(network, "guess hidden words", options.head_lr, masked=masked, layers=layers)]
        return [*first, Planned(network, "fine-tune planned depths", options.head_lr, options=options)]
