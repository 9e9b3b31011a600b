"""The stages of Faster-DAT: a masked model learns to predict words; the network is fine-tuned at planned depths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offramp import engines
from offramp.core.loop import run
from offramp.core.policy import Policy
from offramp.methods.faster_dat.masked_model import MaskedModel, masked_model_loss, masked_model_of
from offramp.methods.faster_dat.mutual_information import depths_by_information
from offramp.methods.faster_dat.options import FasterDATOptions, FasterDATSettings
from offramp.methods.faster_dat.policy import FasterDATPolicy, KnownDepthsPolicy
from offramp.methods.faster_dat.reconstruction import ReconstructionOptions, depths_by_reconstruction, select_rows
from offramp.methods.faster_dat.word_depths import interpolate_depths, word_depths_of
from offramp.nn.artifacts import load_or_compute
from offramp.nn.batches import Batch, Data
from offramp.nn.keys import FINAL_HEAD
from offramp.training.distillation import TeacherLogits, distillation_loss, teacher_logits
from offramp.training.forward import forward_all_layers
from offramp.training.losses import exit_loss
from offramp.training.stage import Backward, ParameterGroups, Stage


@dataclass
class MaskedModelStage(Stage):
    """Trains the masked model to predict masked words after every layer; the network itself is not changed."""

    masked: MaskedModel = field(kw_only=True)
    layers: int = field(kw_only=True)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.network.named_parameters() if name.startswith("added.masked.")]

    def optimisers(self, lr: float) -> list[ParameterGroups]:
        base = {id(p) for p in self.masked.model.base_model.parameters()}
        body, head = ([p for _, p in self.trainable() if (id(p) in base) is inside] for inside in (True, False))
        rate = max(lr, self.head_lr) if self.masked.has_new_head else lr
        return [[{"params": body, "lr": lr}, *([{"params": head, "lr": rate}] if head else [])]]

    def set_train_mode(self) -> None:
        self.network.train(backbone=False, added=True)

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = masked_model_loss(self.masked, batch.packed, self.layers)
        backward(loss)
        return {"loss": loss.detach()}

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        return len(history) - 1  # dev scores are those of the unchanged network


@dataclass
class AllWordsDeepStage(Stage):
    """Plain fine-tuning of the layers and the head that planned depths use: every word goes through all of them."""

    def is_done_in(self, run: Mapping[str, Any]) -> bool:
        """Return whether an earlier run has fine-tuned the same head."""
        return FINAL_HEAD not in self.network.added and super().is_done_in(run)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        net, layers = self.network, word_depths_of(self.network).layers
        above = {id(p) for layer in net.encoder.layers[layers:] for p in layer.parameters()}
        above -= {id(p) for layer in net.encoder.layers[:layers] for p in layer.parameters()}
        base = {id(p) for name, p in net.hf.base_model.named_parameters() if "pooler" not in name} - above
        every = list(net.named_parameters())
        if FINAL_HEAD not in net.added:
            return [(name, p) for name, p in every if name.startswith("model.") and id(p) not in above]
        return [(name, p) for name, p in every if id(p) in base or name.startswith(f"added.{FINAL_HEAD}.")]

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        layers = word_depths_of(self.network).layers
        loss = exit_loss(
            self.network, layers, forward_all_layers(self.network.encoder, batch.packed).after(layers), batch
        )
        backward(loss)
        return {"loss": loss.detach()}


@dataclass
class PlannedDepthsStage(AllWordsDeepStage):
    """Fine-tunes through the loop, by the rule of run time, at depths that are planned beforehand."""

    options: FasterDATOptions = field(kw_only=True)
    own: tuple[Tensor, ...] = ()  # transductive: for each training row the depths of its words
    teacher: TeacherLogits | None = None  # the model with all words at full depth

    def prepare(self, data: Data, folder: Path) -> None:
        all_layers = word_depths_of(self.network).layers == self.network.depth
        if self.options.distil and self.follows_fine_tuning and all_layers:
            self.teacher = teacher_logits(self.network, data, folder)
        table = load_or_compute(folder / "depths.safetensors", lambda: self._plan(data))
        word_depths_of(self.network).fill({name: tensor.to(self.network.device) for name, tensor in table.items()})
        if self.options.transductive:
            depths = interpolate_depths(table["own"], table["penalties"], self.options.penalty)
            self.own = depths.split(table["words"].tolist())
        masked = masked_model_of(self.network)
        if masked is not None and not self.options.transductive:
            masked.clear()

    def _plan(self, data: Data) -> dict[str, Tensor]:
        """Return the table and, for the transductive form, the depths of every word of every row."""
        options, layers, masked = self.options, word_depths_of(self.network).layers, masked_model_of(self.network)
        scope = options.table_scope(layers)
        if masked is None:
            informative_deep = options.deep == "telling"
            smoothing, least = options.smoothing, options.least if options.bins == "width" else None
            return depths_by_information(self.network.task, data, scope, smoothing, informative_deep, least)
        how = ReconstructionOptions(options.spacing, options.penalty, options.occurrences)
        if options.transductive:
            return depths_by_reconstruction(
                self.network, masked, data, scope, ReconstructionOptions(0, options.penalty)
            )
        return depths_by_reconstruction(self.network, masked, select_rows(data, options.rows), scope, how)

    def policy(self) -> Policy:
        return FasterDATPolicy(self.network, FasterDATSettings())

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        rule = FasterDATPolicy(self.network, FasterDATSettings())
        if self.own:
            rule = KnownDepthsPolicy(self.network, torch.cat([self.own[i] for i in batch.indices]))
        result = run(engines.make("torch", self.network.encoder), self.network, rule, batch.packed)
        lengths = batch.packed.lengths.to(result.logits.device)
        loss = self.network.task.loss(result.logits, batch.targets, lengths)
        if self.teacher is not None:
            known = self.teacher.for_batch(batch)
            loss = loss + distillation_loss(self.network, result.logits, known, batch.packed)
        backward(loss)
        return {"loss": loss.detach()}
