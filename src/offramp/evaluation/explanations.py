"""What happened to one input, layer by layer: dropped tokens, the prediction of each exit, and why it exited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from offramp import methods, tasks
from offramp.core import cost
from offramp.core.attention import AttentionScores
from offramp.core.columns import EXIT_LOGITS, EXITED_AT, GATE, ORIGIN
from offramp.core.loop import State, run
from offramp.core.policy import Policy, PolicyWrapper
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.nn.batches import pack_rows
from offramp.nn.network import Network

LIVE, IDLE, GONE = "live", "idle", "gone"


@dataclass(frozen=True)
class LayerStep:
    """The input after a layer (0: after the embeddings)."""

    layer: int
    token_states: list[str]  # of each original token: live, idle (attended to, not computed any more) or gone
    prediction: dict[str, Any] | None  # of the exit after this layer; None if there is no exit
    reason: str  # what the policy compared
    evaluated: bool  # whether the policy evaluated the exit head, so that its cost was counted
    answer_tokens: list[int] = field(default_factory=list)  # tokens of the prediction, if it is a span of the text


@dataclass(frozen=True)
class ExplainedPass:
    """One input at one setting."""

    settings: dict[str, Any]
    steps: list[LayerStep]
    prediction: dict[str, Any]
    exit_layer: float
    share: float  # of the full model's MACs on this input
    pieces: list[str] | None = None  # of a translation: the output, whose states the steps hold


@dataclass(frozen=True)
class Explanation:
    """An input and its passes, from the cheapest setting to the full model."""

    run: str
    method: str
    task: str
    depth: int
    inputs: dict[str, Any]
    tokens: list[str]
    words: list[int]  # the word of each token, −1 for special tokens
    truncated: int  # tokens that did not fit into the model
    full_macs: float
    passes: list[ExplainedPass]
    chosen: int  # the pass at the chosen settings

    @property
    def answer(self) -> str:
        """The field of a prediction that holds its answer."""
        return tasks.get(self.task).answer

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain JSON values."""
        return {**asdict(self), "answer": self.answer}


@dataclass
class ExplainingPolicy(PolicyWrapper):
    """Records what another policy does to a batch of one row. It keeps what it records, so it serves one run only."""

    inner: Policy
    network: Network
    size: int
    steps: list[tuple[int, list[str], Tensor | None, str, bool]] = field(default_factory=list)
    token_states: list[str] = field(default_factory=list)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        return self._record_tokens(s, self.inner.before_layer(layer, s))

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        return self._record_tokens(s, self.inner.after_attention(layer, s, scores))

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        before = len(s.trace)
        leaving = self.inner.should_exit(layer, s)
        evaluated = any(event.kind in ("head", "exit_unit") for event in s.trace[before:])
        with s.uncounted():
            reason = self.inner.reason(layer, s)
            packed = s.exit_input()
            logits = self.network(layer, packed) if layer in self.network.exit_heads else None
            if logits is not None and EXITED_AT in packed.tokens:  # a word that has exited keeps its logits
                exited = (packed.tokens[EXITED_AT] >= 0)[:, None]
                logits = torch.where(exited, packed.tokens[EXIT_LOGITS], logits)
        self._record_tokens(s, None)
        self.steps.append((layer, self.token_states, logits, reason, evaluated))
        return leaving

    def _record_tokens(self, s: State, keep: Tensor | None) -> Tensor | None:
        """Record the state of every original token; return `keep` unchanged."""
        states, tokens = [GONE] * self.size, s.packed.tokens
        gates = tokens[GATE].tolist() if GATE in tokens else [1.0] * s.packed.total
        kept = [True] * s.packed.total if keep is None else keep.tolist()
        for origin, gate, stays in zip(tokens[ORIGIN].tolist(), gates, kept, strict=True):
            states[origin] = (LIVE if gate > 0 else IDLE) if stays else GONE
        self.token_states = states
        return keep


def explain_input(predictor: Predictor, name: str, inputs: Sequence[str], settings: Any) -> Explanation:
    """Explain one input at `settings` and, for comparison, at every operating point."""
    row = _row(predictor, inputs)
    encoded = predictor.prepare([row], "the input")
    if len(encoded) != 1:
        given = f"a text of {len(encoded)} windows of {predictor.model.max_length} tokens"
        raise OfframpError("an input that fits into one window", given, "give a shorter text")
    wanted = asdict(settings)
    listed = [dict(point.settings) for point in predictor.points.points] if predictor.points else [wanted]
    explain = _explain_encoder if predictor.network.decoder is None else _explain_decoder
    passes = [explain(predictor, row, encoded[0], one) for one in listed]
    chosen = explain(predictor, row, encoded[0], wanted)
    if chosen not in passes:
        passes.append(chosen)
    passes.sort(key=lambda one: one.share)
    return Explanation(
        run=name,
        method=predictor.model.method.name,
        task=predictor.task.name,
        depth=predictor.network.depth,
        inputs=dict(row),
        tokens=list(predictor.model.tokenizer.convert_ids_to_tokens(encoded[0].ids)),
        words=encoded[0].words,
        truncated=encoded[0].cut,
        full_macs=predictor.full_macs(encoded, predictor.run(encoded, settings)),
        passes=passes,
        chosen=passes.index(chosen),
    )


def _row(predictor: Predictor, inputs: Sequence[str]) -> Mapping[str, Any]:
    """Return the texts of a command line as a row of the task."""
    columns = predictor.task.input_columns
    if len(inputs) != len(columns):
        given = f"{len(inputs)} text{'s' * (len(inputs) != 1)}"
        raise OfframpError(f"{' and '.join(columns)} to explain", given, "give one text for each, in order")
    if not all(text.strip() for text in inputs):
        raise OfframpError("a text to explain", "an empty one", 'write it in quotes: offramp explain RUN "a good film"')
    row = dict(zip(columns, inputs, strict=True))
    words = predictor.task.words
    return {words: predictor.task.words_of(row)} if words else row  # shown word by word


def _explain_encoder(
    predictor: Predictor, row: Mapping[str, Any], encoded: Encoded, given: Mapping[str, Any]
) -> ExplainedPass:
    """Explain one pass through the encoder."""
    network, method = predictor.network, predictor.model.method
    settings = methods.configure(method.settings, dict(given), method.name)
    packed = pack_rows(network.task, [encoded]).to(network.device)
    policy = ExplainingPolicy(method.policy(network, settings), network, len(encoded.ids))
    with torch.inference_mode():
        result = run(predictor.engine, network, policy, packed)
    spent, full = cost.macs(result.trace, network, 1), cost.full(network.unpruned, network.depth, packed.lengths)

    def prediction(logits: Tensor | None) -> dict[str, Any] | None:
        if logits is None:
            return None
        values = logits.float().cpu().numpy()
        return network.task.predictions([row], [encoded], [values if network.per_token else values[0]])[0]

    steps = []
    for number, states, logits, reason, evaluated in policy.steps:
        predicted = prediction(logits)
        steps.append(LayerStep(number, states, predicted, reason, evaluated, _answer_tokens(encoded, predicted)))
    final, layer = prediction(result.logits), float(result.exit_layer[0])
    assert final is not None
    if not steps or steps[-1].layer < layer:
        answer = _answer_tokens(encoded, final)
        steps.append(LayerStep(round(layer), policy.token_states, final, "the last exit", True, answer))
    return ExplainedPass(asdict(settings), steps, final, layer, float(spent[0] / full[0]))


def _answer_tokens(encoded: Encoded, prediction: Mapping[str, Any] | None) -> list[int]:
    """Return the tokens of a prediction that is a span of the text."""
    if not encoded.offsets or prediction is None or not {"start", "end"} <= prediction.keys():
        return []
    start, end = prediction["start"], prediction["end"]
    if start == end:  # the answer is ""
        return []
    return [i for i, (first, last) in enumerate(encoded.offsets) if first < end and last > start and first < last]


def _explain_decoder(
    predictor: Predictor, row: Mapping[str, Any], encoded: Encoded, given: Mapping[str, Any]
) -> ExplainedPass:
    """Explain a translation: after each decoder block, which output pieces exited and which went on."""
    method = predictor.model.method
    settings = methods.configure(method.settings, dict(given), method.name)
    outcome = predictor.run([encoded], settings)
    translation = predictor.task.predictions([row], [encoded], outcome.logits)[0]
    pieces, exits = [_readable(predictor, piece) for piece in translation["pieces"]], translation["exits"]
    steps = []
    for block in range(1, predictor.network.depth + 1):
        exiting = [piece for piece, exit_block in zip(pieces, exits, strict=True) if exit_block == block]
        states = [GONE if exit_block < block else LIVE for exit_block in exits]
        reason = f"{len(exiting)} of {len(pieces)} pieces exit here"
        prediction = {"exiting": " ".join(exiting)} if exiting else None
        steps.append(LayerStep(block, states, prediction, reason, bool(exiting)))
        if all(exit_block <= block for exit_block in exits):
            break
    share = float(outcome.macs.sum()) / predictor.full_macs([encoded], outcome)
    final = {"text": translation["text"]}
    return ExplainedPass(asdict(settings), steps, final, float(outcome.exit_layer[0]), share, pieces)


def _readable(predictor: Predictor, piece: str) -> str:
    """Return a piece without the tokenizer's mark of a word's beginning, unless it is part of a character."""
    text = str(predictor.model.tokenizer.convert_tokens_to_string([piece])).strip()
    return piece if not text or "\ufffd" in text else text
