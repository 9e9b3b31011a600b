"""An explanation on the terminal: the text layer by layer, tokens fading as they leave, the logits of each exit."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from offramp.evaluation.explanations import GONE, IDLE, ExplainedPass, Explanation, LayerStep

STYLES = {GONE: "dim strike", IDLE: "dim"}
EIGHTHS = "▏▎▍▌▋▊▉█"
MAX_SCORES = 3  # labels shown of a distribution
AMONG_TOKENS = ("tags", "start", "end")  # fields of an answer that are marked in the text instead


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print what happened to the input at the chosen setting."""
    explained = explanation.passes[explanation.chosen]
    console.print(Rule(f"{explanation.run}: {explanation.method}, {explanation.task}", align="left"))
    if explanation.truncated:
        console.print(f"the last {explanation.truncated} tokens do not fit into the model and were not read")
    table = Table(box=None, padding=(0, 2, 1, 0), show_header=True, header_style="dim")
    for title, ratio in (("layer", None), ("tokens", 3), ("off-ramp", 2)):
        table.add_column(title, ratio=ratio, justify="right" if title == "layer" else "left")
    for step in explained.steps:
        table.add_row(str(step.layer), _tokens(explanation, explained, step, console.is_terminal), _exit(step))
    console.print(table)
    console.print(_outcome(explanation, explained))


def _tokens(explanation: Explanation, explained: ExplainedPass, step: LayerStep, styled: bool) -> Text:
    """Return the tokens as they are after the layer, of a translation those of the output; tags follow their words.

    Without styles a point stands for a token that left, round brackets for an idle one, square ones for the answer.
    """

    def by_state(piece: str, state: str) -> str:
        return piece if styled else {GONE: "·", IDLE: f"({piece})"}.get(state, piece)

    def in_answer(number: int, piece: str) -> str:
        return piece if styled or number not in step.answer_tokens else f"[{piece}]"

    if explained.pieces is not None:
        pairs = zip(explained.pieces, step.token_states, strict=True)
        return Text(" ").join(Text(by_state(piece, state), STYLES.get(state, "")) for piece, state in pairs)
    line, tags = Text(), (step.prediction or {}).get("tags", [])
    last_word = -1
    pieces = zip(explanation.tokens, explanation.words, step.token_states, strict=True)
    for number, (piece, word, state) in enumerate(pieces):
        style = f"{STYLES.get(state, '')} {'bold green' if number in step.answer_tokens else ''}".strip()
        line.append(in_answer(number, by_state(piece, state)), style)
        if tags and word not in (-1, last_word) and tags[word] != "O":
            line.append(f"/{tags[word]}", "green")
        last_word = word
        line.append(" ")
    return line


def _exit(step: LayerStep) -> RenderableType:
    """Return the answer of the exit after a layer and why rows left there or stayed."""
    if step.prediction is None:
        return Text(step.reason or "no off-ramp here", "dim")
    lines: list[RenderableType] = [
        Text(line, "" if step.evaluated else "dim") for line in _answer_lines(step.prediction)
    ]
    if step.reason or not step.evaluated:
        lines.append(Text(step.reason or "not evaluated", "italic dim"))
    return Group(*lines)


def _answer_lines(answer: dict[str, Any]) -> list[str]:
    scores = answer.get("scores")
    if not scores:
        shown = {name: "none" if value == "" else value for name, value in answer.items() if name not in AMONG_TOKENS}
        return [", ".join(f"{name}: {_short(value)}" for name, value in shown.items()) or "tags"]
    best = sorted(scores.items(), key=lambda item: -item[1])[:MAX_SCORES]
    width = max(len(str(name)) for name, _ in best)
    return [f"{name!s:{width}} {share:5.2f} {_bar(share)}" for name, share in best]


def _bar(share: float, width: int = 12) -> str:
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _outcome(explanation: Explanation, explained: ExplainedPass) -> str:
    """Return the answer, the exit layer and the cost in one line."""
    layer = (
        f"{explained.exit_layer:g}"
        if explained.exit_layer == int(explained.exit_layer)
        else f"{explained.exit_layer:.2f} (mean)"
    )
    left = sum(state == GONE for state in explained.steps[-1].token_states)
    gone = f", {left} of {len(explanation.tokens)} tokens had left" if left and explained.pieces is None else ""
    spent = f"{explained.share:.0%} of the full model's {explanation.full_macs / 1e6:.1f} million MACs"
    answer = _answer_lines(explained.prediction)[0]
    if "scores" in explained.prediction:  # of labels: the lines show how sure each is, not which were given
        given = explained.prediction[explanation.answer]
        answer = (", ".join(map(str, given)) or "none") if isinstance(given, list) else str(given)
    if "tags" in explained.prediction:
        pairs = zip(
            explanation.inputs["tokens"], explained.prediction["tags"], strict=False
        )  # words beyond the model have none
        answer = " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in pairs)
    return f"{answer.strip()}: left after layer {layer} of {explanation.depth}{gone}; {spent}"
