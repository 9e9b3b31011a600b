"""What happened to one input, layer by layer: tokens that left, what each off-ramp said, where it stopped and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from offramp import methods
from offramp.core import cost, policy
from offramp.core.attention import AttentionScores
from offramp.core.columns import EXIT_LOGITS, EXITED_AT, GATE, ORIGIN
from offramp.core.loop import State, run
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from offramp.nn.batches import pack_rows
from offramp.nn.network import Network

LIVE, IDLE, GONE = "live", "idle", "gone"


@dataclass(frozen=True)
class LayerStep:
    """After a layer (0: after the embeddings)."""

    layer: int
    tokens: list[str]  # each original token: live, idle (visible, no longer computed) or gone
    answer: dict[str, Any] | None  # what the off-ramp here says; None where there is none
    why: str  # what the policy looked at
    asked: bool  # whether the policy evaluated the off-ramp, so that it was paid for
    within: list[int] = field(default_factory=list)  # tokens of the answer, where that is a stretch of the text


@dataclass(frozen=True)
class ExplainedPass:
    """One input at one setting."""

    settings: dict[str, Any]
    steps: list[LayerStep]
    answer: dict[str, Any]
    exit_layer: float
    share: float  # of the full model's MACs on this input
    pieces: list[str] | None = None  # where the model says words: these are the tokens of the steps, not the input's


@dataclass(frozen=True)
class Explanation:
    """An input and its stories, from the cheapest setting to the full model."""

    run: str
    method: str
    task: str
    depth: int
    texts: dict[str, Any]
    tokens: list[str]
    words: list[int]  # the word of each token, −1 for special ones
    cut: int  # tokens that did not fit into the model
    full_macs: float
    stories: list[ExplainedPass]
    chosen: int  # which story was asked for

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return asdict(self)


@dataclass
class _Watch(policy.PolicyWrapper):
    """Looks over a policy's shoulder at a batch of one row. Unlike a policy it remembers: it serves one run only."""

    inner: policy.Policy
    network: Network
    size: int
    steps: list[tuple[int, list[str], Tensor | None, str, bool]] = field(default_factory=list)
    last: list[str] = field(default_factory=list)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        return self._kept(s, self.inner.before_layer(layer, s))

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        return self._kept(s, self.inner.after_attention(layer, s, scores))

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        before = len(s.trace)
        done = self.inner.should_exit(layer, s)
        asked = any(event.kind in ("head", "exit_unit") for event in s.trace[before:])
        with s.uncounted():
            why = self.inner.reason(layer, s)
            whole = s.exit_input()
            said = self.network(layer, whole) if layer in self.network.exit_heads else None
            if said is not None and EXITED_AT in whole.tokens:  # a word that has its tag keeps it
                said = torch.where((whole.tokens[EXITED_AT] >= 0)[:, None], whole.tokens[EXIT_LOGITS], said)
        self._kept(s, None)
        self.steps.append((layer, self.last, said, why, asked))
        return done

    def _kept(self, s: State, keep: Tensor | None) -> Tensor | None:
        """Remember what has become of every token."""
        states, tokens = [GONE] * self.size, s.packed.tokens
        gates = tokens[GATE].tolist() if GATE in tokens else [1.0] * s.packed.total
        stays = [True] * s.packed.total if keep is None else keep.tolist()
        for origin, gate, stay in zip(tokens[ORIGIN].tolist(), gates, stays, strict=True):
            states[origin] = (LIVE if gate > 0 else IDLE) if stay else GONE
        self.last = states
        return keep


def explain_input(predictor: Predictor, name: str, inputs: Sequence[str], settings: Any) -> Explanation:
    """The story of one input at `settings` and, for comparison, at every operating point."""
    row = _row(predictor, inputs)
    encoded = predictor.prepare([row], "the input")
    if len(encoded) != 1:
        given = f"a text of {len(encoded)} windows of {predictor.model.max_length} tokens"
        raise OfframpError("an input that fits into one window", given, "give a shorter text")
    wanted = asdict(settings)
    listed = [dict(point.settings) for point in predictor.points.points] if predictor.points else [wanted]
    tell = _story if predictor.network.decoder is None else _spoken
    stories = [tell(predictor, row, encoded[0], one) for one in listed]
    mine = tell(predictor, row, encoded[0], wanted)
    if mine not in stories:
        stories.append(mine)
    stories.sort(key=lambda story: story.share)
    network = predictor.network
    full = predictor.full_macs(encoded, predictor.run(encoded, settings))
    pieces = predictor.model.tokenizer.convert_ids_to_tokens(encoded[0].ids)
    about = (name, predictor.model.method.name, predictor.task.name, network.depth, dict(row))
    shape = (list(pieces), encoded[0].words, encoded[0].cut, full)
    return Explanation(*about, *shape, stories, stories.index(mine))


def _spoken(predictor: Predictor, row: Mapping[str, Any], encoded: Encoded, given: Mapping[str, Any]) -> ExplainedPass:
    """A sentence that is said: after each block of the decoder, which words had left and which went on."""
    method = predictor.model.method
    settings = methods.configure(method.settings, dict(given), method.name)
    outcome = predictor.run([encoded], settings)
    said = predictor.task.predictions([row], [encoded], outcome.logits)[0]
    pieces, exits = [_readable(predictor, piece) for piece in said["pieces"]], said["exits"]
    steps = []
    for block in range(1, predictor.network.depth + 1):
        left = [piece for piece, exit_ in zip(pieces, exits, strict=True) if exit_ == block]
        tokens = [GONE if exit_ < block else LIVE for exit_ in exits]
        why = f"{len(left)} of {len(pieces)} pieces leave here"
        steps.append(LayerStep(block, tokens, {"said": " ".join(left)} if left else None, why, bool(left)))
        if all(exit_ <= block for exit_ in exits):
            break
    share = float(outcome.macs.sum()) / predictor.full_macs([encoded], outcome)
    return ExplainedPass(asdict(settings), steps, {"text": said["text"]}, float(outcome.exit_layer[0]), share, pieces)


def _readable(predictor: Predictor, piece: str) -> str:
    """A piece without the tokenizer's mark of a word's beginning, unless it is half a letter."""
    text = str(predictor.model.tokenizer.convert_tokens_to_string([piece])).strip()
    return piece if not text or "\ufffd" in text else text


def _row(predictor: Predictor, inputs: Sequence[str]) -> Mapping[str, Any]:
    """The texts of a command line as a row of the task."""
    columns = predictor.task.input_columns
    if len(inputs) != len(columns):
        given = f"{len(inputs)} text{'s' * (len(inputs) != 1)}"
        raise OfframpError(f"{' and '.join(columns)} to explain", given, "give one text for each, in order")
    if not all(text.strip() for text in inputs):
        raise OfframpError("a text to explain", "an empty one", 'write it in quotes: offramp explain RUN "a fine film"')
    split = predictor.task.name == "tagging"  # words, not a text
    return {name: text.split() if split else text for name, text in zip(columns, inputs, strict=True)}


def _story(predictor: Predictor, row: Mapping[str, Any], encoded: Encoded, given: Mapping[str, Any]) -> ExplainedPass:
    network, method = predictor.network, predictor.model.method
    settings = methods.configure(method.settings, dict(given), method.name)
    packed = pack_rows(network.task, [encoded]).to(network.device)
    watch = _Watch(method.policy(network, settings), network, len(encoded.ids))
    with torch.inference_mode():
        made = run(predictor.engine, network, watch, packed)
    spent, full = cost.macs(made.trace, network, 1), cost.full(network.unpruned, network.depth, packed.lengths)

    def answer(logits: Tensor | None) -> dict[str, Any] | None:
        if logits is None:
            return None
        part = logits.float().cpu().numpy()
        return network.task.predictions([row], [encoded], [part if network.per_token else part[0]])[0]

    def step(layer: int, tokens: list[str], said: dict[str, Any] | None, why: str, asked: bool) -> LayerStep:
        return LayerStep(layer, tokens, said, why, asked, _within(encoded, said))

    steps = [step(layer, tokens, answer(said), why, asked) for layer, tokens, said, why, asked in watch.steps]
    final, layer = answer(made.logits), float(made.exit_layer[0])
    assert final is not None
    if not steps or steps[-1].layer < layer:
        steps.append(step(round(layer), watch.last, final, "the last exit", True))
    share = float(spent[0] / full[0])
    return ExplainedPass(asdict(settings), steps, final, layer, share)


def _within(encoded: Encoded, answer: Mapping[str, Any] | None) -> list[int]:
    """The tokens of an answer that is a stretch of the text."""
    if not encoded.offsets or answer is None or not answer.get("answer"):
        return []
    start, end = answer["start"], answer["end"]
    return [i for i, (first, last) in enumerate(encoded.offsets) if first < end and last > start and first < last]
