"""The one trainer: stages, schedule, resume, log, progress.

The order of rows and every random number depend on (seed, stage, epoch, step) alone, so a run that was killed and
started again goes on to the same result. With several processes each takes its share of every batch and gradients are
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

from offramp import engines
from offramp.core.policy import Policy
from offramp.inference.batching import full_macs, score_policy
from offramp.nn.batches import Batch, Data, build_batch, epoch_batches
from offramp.nn.network import Network
from offramp.training import checkpoint
from offramp.training.checkpoint import TrainingProgress
from offramp.training.schedule import Schedule
from offramp.training.sparse_embeddings import SparseEmbeddings, sparse_gradients
from offramp.training.stage import Stage
from offramp.utils.hardware import best_precision


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C while training, after the state was saved; the same command goes on."""


class Trainer:
    """Runs a method's stages over the data, resumably."""

    def __init__(self, network: Network, schedule: Schedule, folder: Path, report: Callable[..., None]) -> None:
        self.network, self.schedule, self.folder, self.report = network, schedule, folder, report
        self.precision = best_precision() if schedule.precision == "auto" else schedule.precision
        # accelerate fixes its precision once a process; autocast is ours, so that one process may train in both
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        network.to(self.accelerator.device)
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.stop, self.tables = False, SparseEmbeddings(network.hf)

    def fit(self, stages: list[Stage], train: Data, dev: Data) -> TrainingProgress:
        """All stages, from wherever an earlier attempt stopped."""
        self.accelerator.wait_for_everyone()
        found = checkpoint.read_progress(self.folder)
        progress, resumed = found or TrainingProgress(), found is not None
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, self._interrupt) if in_main_thread else None
        self.network.prepare(train, self.folder)
        try:
            for number in range(progress.stage, len(stages)):
                progress.stage = number
                self._run_stage(stages[number], train, dev, progress, resumed)
                resumed = False
                progress.epoch, progress.step, progress.history = 0, 0, []
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)
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
        optimisers = [self._optimiser(groups) for groups in stage.optimisers(self.schedule.lr)]
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
        """One pass over the rows, from the step an earlier attempt reached."""
        stage.set_train_mode()
        stage.begin_epoch(progress.epoch, self.schedule.epochs, progress.step)
        groups = epoch_batches(self.network.task, train, self.schedule.batch_size, self._seed(progress, -1))
        steps = len(groups)
        saved = time.monotonic()
        for step in range(progress.step, steps):
            started = time.monotonic()
            stage.set_progress((progress.epoch + step / steps) / self.schedule.epochs)
            loss = self._step(stage, train, groups[step], progress, optimisers, steps)
            progress.step, progress.loss_sum = step + 1, progress.loss_sum + loss
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
        ids: list[int],
        progress: TrainingProgress,
        optimisers: list[torch.optim.Optimizer],
        steps: int,
    ) -> float:
        """One update; returns the loss over the whole batch."""
        mine = ids[self.rank :: self.world]
        rate = self.schedule.rate(progress.epoch * steps + progress.step, steps * self.schedule.epochs)
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = group["base_lr"] * rate
        logged, items = torch.zeros((), device=self.network.device), 0
        if mine:
            made = build_batch(self.network.task, train, mine, self._seed(progress, -1)).to(self.network.device)
            items = _items(made, self.network.task.kind) if self.world > 1 else 1
            torch.manual_seed(self._seed(progress, progress.step + 1) + self.rank)
            with self._autocast():
                out = stage.step(made, lambda loss: (loss * items).backward())
            self.tables.densify_gradients()
            logged = out["loss"].float()
        parameters = [p for _, p in stage.trainable()]
        if self.world > 1:
            logged = self._average(parameters, logged * items, items)
        for optimiser in optimisers:
            if self.schedule.clip > 0:  # each by itself: a second optimiser's loss may live on another scale
                own = [p for group in optimiser.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(own, self.schedule.clip)
            optimiser.step()
        for parameter in parameters:  # fused AdamW tells nobody, but backbones fuse Q, K and V by version
            torch.autograd.graph.increment_version(parameter)
        return float(logged)

    def _average(self, parameters: list[torch.nn.Parameter], loss: Tensor, items: int) -> Tensor:
        """Sums over a process's own items → means over the whole batch; what has no gradient anywhere keeps none."""
        flat = [(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters]
        used = [float(p.grad is not None) for p in parameters]
        joined = self.accelerator.reduce(torch.cat([*flat, loss.new_tensor([*used, float(loss), items])]), "sum")
        *grads, notes = joined.split([*(p.numel() for p in parameters), len(used) + 2])
        for p, part, somewhere in zip(parameters, grads, notes.tolist(), strict=False):
            p.grad = part.view_as(p) / notes[-1] if somewhere else None
        return notes[-2] / notes[-1]

    def _stopping(self) -> bool:
        """Whether anybody was told to stop: all processes stop after the same step."""
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
        with self._autocast():
            stage.end_epoch(progress.history)
        self.report(**entry, done=True)

    def _score(self, policy: Policy, dev: Data) -> dict[str, float]:
        """Metrics on dev rows, and the share of the full model's compute they took."""
        self.network.eval()
        with self._autocast():
            metrics, outcome = score_policy(self.network, engines.make("torch", self.network.encoder), policy, dev)
        share = float(outcome.macs.sum() / full_macs(self.network, dev.encoded, outcome).sum())
        return {**metrics, "mac_share": round(share, 6)}

    def _optimiser(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        marked = [{**group, "base_lr": group["lr"]} for group in groups]
        return torch.optim.AdamW(marked, weight_decay=self.schedule.weight_decay, fused=True)

    def _seed(self, progress: TrainingProgress, step: int) -> int:
        return hash((self.schedule.seed, progress.stage, progress.epoch, step)) % 2**31

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _save(self, optimisers: list[torch.optim.Optimizer], progress: TrainingProgress) -> None:
        if self.accelerator.is_main_process:
            checkpoint.write_checkpoint(self.folder, self.network, optimisers, progress)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        """First Ctrl-C: save after this step and stop. Second: stop now; the last checkpoint stands."""
        if self.stop:
            os._exit(130)
        self.stop = True


def _items(made: Batch, kind: str) -> int:
    """How many answers the mean loss of a batch is over: labelled tokens, or rows (spans have two targets a row)."""
    counted = kind == "sequence" or (kind == "token" and made.targets.dim() == 1)
    if not made.targets.numel():  # rows without labels
        return made.packed.total if kind == "token" else made.packed.count
    return int((made.targets >= 0).sum()) if counted else made.packed.count
