"""The trainer of all methods: runs stages on a schedule, saves checkpoints, resumes, logs and reports progress.

The order of rows and every random number depend on (seed, stage, epoch, step) alone, so a run that was killed and
resumed ends in the same result. With several processes each computes its share of every batch and gradients are
averaged: the result is that of one process with the whole batch, up to dropout, which each process draws itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from offramp.core.policy import Policy
from offramp.nn.batches import Batch, Data, build_batch, epoch_batches
from offramp.nn.network import Network
from offramp.training import checkpoint
from offramp.training.checkpoint import TrainingProgress
from offramp.training.schedule import Schedule
from offramp.training.sparse_embeddings import SparseEmbeddings, sparse_gradients
from offramp.training.stage import Stage, with_embedding_rate
from offramp.utils.hardware import best_precision

Scorer = Callable[[Network, Policy, Data], dict[str, float]]  # metrics of a policy on rows, and its `mac_share`


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM while training, raised after the state was saved; the same command resumes."""


class Trainer:
    """Runs a method's stages over the data, resumably.

    `scorer` measures a policy on dev rows after every epoch. It is passed in, because `inference`, which runs policies
    over rows, may import this package but not the other way round.
    """

    def __init__(
        self, network: Network, schedule: Schedule, folder: Path, scorer: Scorer, report: Callable[..., None]
    ) -> None:
        self.network, self.schedule, self.folder = network, schedule, folder
        self.scorer, self.report = scorer, report
        self.precision = best_precision() if schedule.precision == "auto" else schedule.precision
        # accelerate fixes its precision once per process; with our own autocast one process may train in both
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        network.to(self.accelerator.device)
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.stop, self.tables = False, SparseEmbeddings(network.hf)

    def fit(self, stages: list[Stage], train: Data, dev: Data) -> TrainingProgress:
        """Run all stages, from where an earlier attempt stopped."""
        self.accelerator.wait_for_everyone()
        stored = checkpoint.read_progress(self.folder)
        progress, resumed = stored or TrainingProgress(), stored is not None
        in_main_thread = threading.current_thread() is threading.main_thread()
        handled = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
        previous = {number: signal.signal(number, self._interrupt) for number in handled}
        try:
            self.network.prepare(train, self.folder)
            for number in range(progress.stage, len(stages)):
                progress.stage = number
                self._run_stage(stages[number], train, dev, progress, resumed)
                resumed = False
                progress.epoch, progress.step, progress.history = 0, 0, []
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        self.network.eval()
        return progress

    def _run_stage(self, stage: Stage, train: Data, dev: Data, progress: TrainingProgress, resumed: bool) -> None:
        torch.manual_seed(self._seed(progress, 0))
        artifacts = self.folder / f"stage-{progress.stage}"
        artifacts.mkdir(parents=True, exist_ok=True)
        if not resumed:
            progress.reference = self._score(Policy(), dev) if stage.needs_reference else {}
        stage.reference = progress.reference
        with self._autocast():
            stage.prepare(train, artifacts)
        for _, parameter in self.network.named_parameters():
            parameter.requires_grad_(False)
        for _, parameter in stage.trainable():
            parameter.requires_grad_(True)
        rate = self.schedule.embedding_lr
        groups_by_optimiser = stage.optimisers(self.schedule.lr_of(stage.follows_fine_tuning, stage.later_share))
        optimisers = [self._optimiser(with_embedding_rate(self.network, one, rate)) for one in groups_by_optimiser]
        if resumed:
            checkpoint.read_checkpoint(self.folder, self.network, optimisers)
        best = artifacts / "best.safetensors"
        with sparse_gradients(self.network.hf) as self.tables:
            for epoch in range(progress.epoch, self.schedule.epochs):
                progress.epoch = epoch
                self._run_epoch(stage, train, progress, optimisers)
                self._finish_epoch(stage, dev, progress, best)
                progress.epoch, progress.step, progress.loss_sum = epoch + 1, 0, 0.0
                self._save(optimisers, progress)
                if self._stopping():
                    raise TrainingInterrupted
        self.accelerator.wait_for_everyone()
        checkpoint.read_weights(best, self.network)

    def _run_epoch(
        self, stage: Stage, train: Data, progress: TrainingProgress, optimisers: list[torch.optim.Optimizer]
    ) -> None:
        """Run one pass over the rows, from the step that an earlier attempt reached."""
        stage.set_train_mode()
        stage.begin_epoch(progress.epoch, self.schedule.epochs, progress.step)
        batches = epoch_batches(self.network.task, train, self.schedule.batch_size, self._seed(progress, -1))
        steps = len(batches)
        saved = time.monotonic()
        for step in range(progress.step, steps):
            started = time.monotonic()
            stage.set_progress((progress.epoch + step / steps) / self.schedule.epochs)
            loss = self._step(stage, train, batches[step], progress, optimisers, steps)
            progress.step, progress.loss_sum = step + 1, progress.loss_sum + loss
            progress.add_to_curve(loss, (progress.epoch * steps + step) / (steps * self.schedule.epochs))
            progress.seconds += time.monotonic() - started
            self.report(stage=stage.name, epoch=progress.epoch, step=step + 1, steps=steps,
                        loss=progress.loss_sum / (step + 1))  # fmt: skip
            stopping = self._stopping()
            if stopping or time.monotonic() - saved >= self.schedule.save_seconds:
                self._save(optimisers, progress)
                saved = time.monotonic()
            if stopping:
                raise TrainingInterrupted

    def _step(
        self,
        stage: Stage,
        train: Data,
        indices: list[int],
        progress: TrainingProgress,
        optimisers: list[torch.optim.Optimizer],
        steps: int,
    ) -> float:
        """Update the parameters once and return the mean loss over the whole batch."""
        own = self._own_rows(train, indices)
        rate = self.schedule.rate(progress.epoch * steps + progress.step, steps * self.schedule.epochs)
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = group["base_lr"] * rate
        logged, items = torch.zeros((), device=self.network.device), 0
        if own:
            batch = build_batch(self.network.task, train, own, self._seed(progress, -1)).to(self.network.device)
            items = _loss_items(batch, self.network.task.kind) if self.world > 1 else 1
            torch.manual_seed(self._seed(progress, progress.step + 1) + self.rank)
            with self._autocast():
                out = stage.step(batch, lambda loss: (loss * items).backward())
            self.tables.densify_gradients()
            logged = out["loss"].float()
        parameters = [p for _, p in stage.trainable()]
        if self.world > 1:
            logged = self._average(parameters, logged * items, items)
        for optimiser in optimisers:
            if self.schedule.clip > 0:  # each alone: a second optimiser's loss may have another scale
                clipped = [p for group in optimiser.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(clipped, self.schedule.clip)
            optimiser.step()
        for parameter in parameters:  # fused AdamW does not, but backbones cache fused Q, K and V by version
            torch.autograd.graph.increment_version(parameter)
        return float(logged)

    def _own_rows(self, train: Data, indices: list[int]) -> list[int]:
        """Return the rows of a batch that this process trains on: every process gets short and long ones alike, because
        all wait for the one with the most tokens."""
        if self.world == 1:
            return indices
        return sorted(indices, key=lambda i: len(train.encoded[i].ids))[self.rank :: self.world]

    def _average(self, parameters: list[torch.nn.Parameter], loss: Tensor, items: int) -> Tensor:
        """Turn sums over a process's own items into means over the whole batch; a parameter without a gradient in any
        process keeps none."""
        flat = [(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters]
        used = [float(p.grad is not None) for p in parameters]
        joined = self.accelerator.reduce(torch.cat([*flat, loss.new_tensor([*used, float(loss), items])]), "sum")
        *grads, totals = joined.split([*(p.numel() for p in parameters), len(used) + 2])
        for p, part, somewhere in zip(parameters, grads, totals.tolist(), strict=False):
            p.grad = part.view_as(p) / totals[-1] if somewhere else None
        return totals[-2] / totals[-1]

    def _stopping(self) -> bool:
        """Return whether any process was interrupted: all stop after the same step."""
        if self.world == 1:
            return self.stop
        return bool(self.accelerator.reduce(torch.tensor(float(self.stop), device=self.network.device), "sum") > 0)

    def _finish_epoch(self, stage: Stage, dev: Data, progress: TrainingProgress, best: Path) -> None:
        metrics = self._score(stage.policy(), dev)
        steps = max(1, progress.step)
        progress.history.append(metrics)
        entry = {"stage": stage.name, "epoch": progress.epoch + 1, "loss": progress.loss_sum / steps, **metrics}
        progress.log.append(entry)
        if self.accelerator.is_main_process and stage.best_epoch(progress.history) == len(progress.history) - 1:
            checkpoint.write_weights(best, self.network)
        if self.accelerator.is_main_process and self.schedule.keeps_snapshot(progress.epoch):
            name = checkpoint.snapshot_name(progress.stage, progress.epoch + 1)
            checkpoint.write_weights(self.folder / checkpoint.SNAPSHOTS / name, self.network)
        with self._autocast():
            stage.end_epoch(progress.history)
        self.report(**entry, done=True)

    def _score(self, policy: Policy, dev: Data) -> dict[str, float]:
        self.network.eval()
        with self._autocast():
            return self.scorer(self.network, policy, dev)

    def _optimiser(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        with_base = [{**group, "base_lr": group["lr"]} for group in groups]
        return torch.optim.AdamW(with_base, weight_decay=self.schedule.weight_decay, fused=True)

    def _seed(self, progress: TrainingProgress, step: int) -> int:
        return hash((self.schedule.seed, progress.stage, progress.epoch, step)) % 2**31

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _save(self, optimisers: list[torch.optim.Optimizer], progress: TrainingProgress) -> None:
        if self.accelerator.is_main_process:
            checkpoint.write_checkpoint(self.folder, self.network, optimisers, progress)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        """On the first Ctrl-C or SIGTERM save after this step and stop; on the second stop at once."""
        if self.stop:
            os._exit(130)
        self.stop = True


def _loss_items(batch: Batch, kind: str) -> int:
    """Return how many items the mean loss of a batch is over: labelled tokens, or rows (a span has two targets)."""
    per_target = kind == "sequence" or (kind == "token" and batch.targets.dim() == 1)
    if not batch.targets.numel():  # rows without labels
        return batch.packed.total if kind == "token" else batch.packed.count
    return int((batch.targets >= 0).sum()) if per_target else batch.packed.count
