"""Encoded rows through the loop, in batches; answers back in their order. No text, no files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from offramp import engines
from offramp.core import cost
from offramp.core.loop import Engine, ExitHeads, run
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.data.tokenization import Encoded
from offramp.decoding.translate import translate_encoded
from offramp.nn.batches import Data, build_batch, pack_rows
from offramp.nn.network import Network
from offramp.nn.outputs import Array, RunOutput
from offramp.utils.progress import report_progress

__all__ = [
    "Array",
    "RunOutput",
    "full_macs",
    "per_input_row",
    "run_encoded",
    "run_packed",
    "score_policy",
    "score_policy_by_loss",
]
USUAL, MOST = 64, 8  # tokens of a row that batch sizes are told for; how many times more short ones may be


def run_packed(
    network: Network, engine: Engine, policy: Policy, packed: Packed, heads: ExitHeads | None = None
) -> RunOutput:
    """One batch through the loop. `heads` stands in for the network's own exits when a recording is replayed."""
    if heads is None:
        packed = packed.to(network.device)  # a recording lies on the CPU
    with torch.inference_mode():
        made = run(engine, heads or engine.compile_heads(network), policy, packed)
    answers = made.logits.cpu().numpy()
    parts = np.split(answers, np.cumsum(packed.lengths.numpy())[:-1]) if network.per_token else list(answers)
    return RunOutput(
        parts,
        made.exit_layer.numpy(),
        cost.macs(made.trace, network, packed.count).numpy(),
        cost.tokens_kept(made.trace, network.depth, packed.count).numpy(),
        cost.tokens_fed(made.trace, network.depth).numpy(),
    )


def run_encoded(
    network: Network, engine: Engine, policy: Policy, encoded: Sequence[Encoded], batch_size: int = 32
) -> RunOutput:
    """Rows sorted by length into batches, answers in the order given."""
    if network.decoder is not None:
        return translate_encoded(network, engine, policy, encoded, batch_size)
    logits: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(encoded)
    exits, macs, kept = (np.zeros(len(encoded)) for _ in range(3))
    done, fed = 0, np.zeros(network.depth)
    for index in batches_by_length([len(e.ids) for e in encoded], batch_size):
        made = run_packed(network, engine, policy, pack_rows(network.task, [encoded[i] for i in index]))
        for i, part in zip(index, made.logits, strict=True):
            logits[i] = part
        exits[index], macs[index], kept[index] = made.exit_layer, made.macs, made.tokens_kept
        fed += 0.0 if made.tokens_by_layer is None else made.tokens_by_layer
        done += len(index)
        report_progress(done, len(encoded))
    return RunOutput(logits, exits, macs, kept, fed)


def batches_by_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Indices of rows to run together, shortest first, by total tokens: as many as `batch_size` rows of `USUAL` have.

    Short rows come in larger batches (`MOST` times as many rows at most), long ones in smaller; 1 is one row at a time.
    """
    most = batch_size * MOST if batch_size > 1 else 1
    index: list[int] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        tokens += lengths[i]
        if index and (len(index) == most or tokens > batch_size * USUAL):
            yield index
            index, tokens = [], lengths[i]
        index.append(i)
    if index:
        yield index


def score_policy_by_loss(
    network: Network, engine: Engine, policy: Policy, data: Data, batch_size: int = 32
) -> tuple[dict[str, float], RunOutput]:
    """Metrics of tasks that are scored by their loss per answer (perplexity); masking depends on the row alone."""
    losses: list[float] = []  # one per masked token
    batch_size = min(batch_size, 8)  # every token answers with a whole vocabulary
    parts: list[RunOutput] = []
    for start in range(0, len(data.encoded), batch_size):
        made = build_batch(network.task, data, range(start, min(start + batch_size, len(data.encoded))), seed=None)
        outcome = run_packed(network, engine, policy, made.packed)
        logits = torch.from_numpy(np.concatenate(outcome.logits))
        rows = network.task.loss(logits, made.targets, made.packed.lengths, "rows").tolist()
        asked = [int((part >= 0).sum()) for part in made.targets.split(made.packed.lengths.tolist())]
        losses += [loss for loss, count in zip(rows, asked, strict=True) for _ in range(count)]
        parts.append(RunOutput([], outcome.exit_layer, outcome.macs, outcome.tokens_kept))
        report_progress(start + made.packed.count, len(data.encoded))
    joined = [np.concatenate([getattr(p, name) for p in parts]) for name in ("exit_layer", "macs", "tokens_kept")]
    return network.task.metrics_from_losses(losses), RunOutput([], *joined)


def per_input_row(outcome: RunOutput, encoded: Sequence[Encoded], rows: int) -> tuple[Array, Array, Array]:
    """Exit layer, tokens kept and MACs of each input row: windows of one row share the mean and add up the rest."""
    owner = np.array([e.example for e in encoded])
    spent = (outcome.exit_layer, outcome.tokens_kept, outcome.macs)
    layers, kept, macs = (np.bincount(owner, column, rows).astype(np.float64) for column in spent)
    return layers / np.bincount(owner, minlength=rows), kept, macs


def full_macs(network: Network, encoded: Sequence[Encoded], outcome: RunOutput | None = None) -> Array:
    """What the full model, with nothing cut off, would spend on each row; for the same words, where words are said."""
    if outcome is not None and outcome.full_macs is not None:
        return outcome.full_macs
    lengths = torch.tensor([len(e.ids) for e in encoded])
    return np.asarray(cost.full(network.unpruned, network.depth, lengths).numpy())


def score_policy(
    network: Network, engine: Engine, policy: Policy, data: Data, batch_size: int = 32
) -> tuple[dict[str, float], RunOutput]:
    """Metrics of a policy on labelled rows, and what happened to each."""
    task = network.task
    if task.scores_by_loss:
        return score_policy_by_loss(network, engine, policy, data, batch_size)
    outcome = run_encoded(network, engine, policy, data.encoded, batch_size)
    return task.metrics(data.rows, task.predictions(data.rows, data.encoded, outcome.logits)), outcome


def score_for_training(network: Network, policy: Policy, data: Data) -> dict[str, float]:
    """Return a policy's metrics on dev rows and its share of the full model's MACs: the trainer's scorer."""
    metrics, outcome = score_policy(network, engines.make("torch", network.encoder), policy, data)
    share = float(outcome.macs.sum() / full_macs(network, data.encoded, outcome).sum())
    return {**metrics, "mac_share": round(share, 6)}
