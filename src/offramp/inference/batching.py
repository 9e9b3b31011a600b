"""Encoded rows through the loop in batches, results back in their order. No text and no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from offramp import engines
from offramp.core import cost
from offramp.core.loop import Engine, ExitHeads, rule_for_arrays, run
from offramp.core.packed import Packed, arrays_of_rows
from offramp.core.policy import Policy
from offramp.core.rules import rule_macs, rule_tokens_fed
from offramp.data.tokenization import Encoded
from offramp.decoding.translate import translate_encoded
from offramp.nn.batches import LARGEST_FACTOR, TYPICAL_LENGTH, Data, batches_by_length, build_batch, pack_rows
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
    "score_for_training",
    "score_policy",
]
VOCABULARY_BATCH = 8  # rows in a batch if every token's output is a whole vocabulary


def run_packed(
    network: Network, engine: Engine, policy: Policy, packed: Packed, heads: ExitHeads | None = None
) -> RunOutput:
    """Run one batch through the loop. `heads` replaces the network's own exit heads when a recording is replayed."""
    if heads is None:
        packed = packed.to(network.device)  # a recording lies on the CPU
    with torch.inference_mode():
        result = run(engine, heads or engine.compile_heads(network), policy, packed)
    logits = result.logits.cpu().numpy()  # [rows, outputs] or [tokens, outputs]
    return RunOutput(
        np.split(logits, np.cumsum(packed.lengths.numpy())[:-1]) if network.per_token else list(logits),
        result.exit_layer.numpy(),
        cost.macs(result.trace, network, packed.count).numpy(),
        cost.tokens_kept(result.trace, network.depth, packed.count).numpy(),
        cost.tokens_fed(result.trace, network.depth).numpy(),
    )


def run_rows(network: Network, engine: Engine, policy: Policy, encoded: Sequence[Encoded]) -> RunOutput:
    """Run rows in one batch: as plain arrays where the policy is a rule that the engine runs whole, else packed."""
    heads = engine.compile_heads(network)
    rule = rule_for_arrays(engine, heads, policy)
    if rule is None:
        return run_packed(network, engine, policy, pack_rows(network.task, encoded))
    rows, depth = arrays_of_rows([e.ids for e in encoded], [e.types for e in encoded]), network.depth
    logits, layers = engine.run_rule_arrays(rule, heads, rows)
    return RunOutput(
        list(logits),
        layers.astype(np.float64),
        lambda: rule_macs(rule, network, depth, rows.lengths, layers),
        lambda: rows.lengths * layers / depth,
        lambda: rule_tokens_fed(depth, rows.lengths, layers),
        finite=bool(np.isfinite(logits).all()),
    )


def run_encoded(
    network: Network,
    engine: Engine,
    policy: Policy,
    encoded: Sequence[Encoded],
    batch_size: int = 32,
    expected_share: Callable[[int], float] | None = None,
) -> RunOutput:
    """Run rows in batches of similar length and return the results in the order given.

    `expected_share` predicts from the length of a row which share of the full model's work it takes: batches of rows
    that leave early then hold more of them.
    """
    if network.decoder is not None:
        return translate_encoded(network, engine, policy, encoded, batch_size)
    if len(encoded) == 1 or fits_one_batch(encoded, batch_size, expected_share):
        output = run_rows(network, engine, policy, encoded)
        report_progress(len(encoded), len(encoded))
        return output
    parts: list[tuple[list[int], RunOutput]] = []
    done = 0
    for index in batches_by_length([len(e.ids) for e in encoded], batch_size, expected_share):
        parts.append((index, run_rows(network, engine, policy, [encoded[i] for i in index])))
        done += len(index)
        report_progress(done, len(encoded))
    return _in_order(parts, len(encoded), network.depth)


def _in_order(parts: Sequence[tuple[list[int], RunOutput]], count: int, depth: int) -> RunOutput:
    """Return the outputs of batches, given with the numbers of their rows, as one; costs are joined when read."""

    def column(read: Callable[[RunOutput], Array]) -> Array:
        values = np.zeros(count)
        for index, output in parts:
            values[index] = read(output)
        return values

    logits: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * count
    for index, output in parts:
        for i, row_logits in zip(index, output.logits, strict=True):
            logits[i] = row_logits
    fed = [output for _, output in parts]
    return RunOutput(
        logits,
        column(lambda output: output.exit_layer),
        lambda: column(lambda output: output.macs),
        lambda: column(lambda output: output.tokens_kept),
        lambda: sum((one.tokens_by_layer for one in fed if one.tokens_by_layer is not None), np.zeros(depth)),
        finite=all(output.finite for _, output in parts),
    )


def fits_one_batch(encoded: Sequence[Encoded], batch_size: int, expected_share: Callable[[int], float] | None) -> bool:
    """Return whether `batches_by_length` would put all rows into one batch; rows are then run in the order given."""
    if expected_share is not None or batch_size == 1 or not 0 < len(encoded) <= batch_size * LARGEST_FACTOR:
        return False
    return sum(len(e.ids) for e in encoded) <= batch_size * TYPICAL_LENGTH


def score_policy(
    network: Network, engine: Engine, policy: Policy, data: Data, batch_size: int = 32
) -> tuple[dict[str, float], RunOutput]:
    """Return the metrics of a policy on labelled rows, and its outputs."""
    task = network.task
    if task.scores_by_loss:
        return _score_policy_by_loss(network, engine, policy, data, batch_size)
    output = run_encoded(network, engine, policy, data.encoded, batch_size)
    return task.metrics(data.rows, task.predictions(data.rows, data.encoded, output.logits)), output


def _score_policy_by_loss(
    network: Network, engine: Engine, policy: Policy, data: Data, batch_size: int
) -> tuple[dict[str, float], RunOutput]:
    """Return the metrics of a task that is scored by its loss per masked token; masks depend on the row alone."""
    token_losses: list[float] = []
    batch_size = min(batch_size, VOCABULARY_BATCH)
    outputs: list[RunOutput] = []
    for start in range(0, len(data.encoded), batch_size):
        rows = build_batch(network.task, data, range(start, min(start + batch_size, len(data.encoded))), seed=None)
        output = run_packed(network, engine, policy, rows.packed)
        logits = torch.from_numpy(np.concatenate(output.logits))
        row_losses = network.task.loss(logits, rows.targets, rows.packed.lengths, "rows").tolist()
        masked = [int((targets >= 0).sum()) for targets in rows.targets.split(rows.packed.lengths.tolist())]
        token_losses += [loss for loss, count in zip(row_losses, masked, strict=True) for _ in range(count)]
        outputs.append(RunOutput([], output.exit_layer, output.macs, output.tokens_kept))
        report_progress(start + rows.packed.count, len(data.encoded))
    columns = [np.concatenate([getattr(o, name) for o in outputs]) for name in ("exit_layer", "macs", "tokens_kept")]
    return network.task.metrics_from_losses(token_losses), RunOutput([], *columns)


def score_for_training(network: Network, policy: Policy, data: Data) -> dict[str, float]:
    """Return a policy's metrics on dev rows and its share of the full model's MACs: the trainer's scorer."""
    metrics, output = score_policy(network, engines.make("torch", network.encoder), policy, data)
    share = float(output.macs.sum() / full_macs(network, data.encoded, output).sum())
    return {**metrics, "mac_share": round(share, 6)}


def per_input_row(output: RunOutput, encoded: Sequence[Encoded], rows: int) -> tuple[Array, Array, Array]:
    """Return exit layer, tokens kept and MACs of each input row: the mean layer and the sums over its windows."""
    row_of_window = np.array([e.example for e in encoded])
    columns = (output.exit_layer, output.tokens_kept, output.macs)
    layers, kept, macs = (np.bincount(row_of_window, column, rows).astype(np.float64) for column in columns)
    return layers / np.bincount(row_of_window, minlength=rows), kept, macs


def full_macs(network: Network, encoded: Sequence[Encoded], output: RunOutput | None = None) -> Array:
    """Return the MACs of the unpruned full model on each row; of a decoder, for the generated tokens of `output`."""
    if output is not None and output.full_macs is not None:
        return output.full_macs
    lengths = torch.tensor([len(e.ids) for e in encoded])
    return np.asarray(cost.full(network.unpruned, network.depth, lengths).numpy())
