"""Depth-Adaptive Transformer (Elbayad et al. 2020): a halting unit learns from an oracle how deep to go, word by word.

What it does: an exit after every layer, all trained alike (`aligned`) or along sampled exits with missing states
copied up (`mixed`); then a unit is taught where to stop by an oracle that knows the answer: the exit that is right, or
most likely to be, minus λ a layer, for single words smoothed over their neighbours by σ. Forms: `multinomial` plans
the exit after layer 1, `geometric` says stop or go on after every layer, `threshold` has no unit and trusts the exit's
own confidence, `sequence` plans a sentence from its source. Translation, for which it was made: every word said leaves
the decoder where it may (parts/decoder_exits.py). Encoders: rows have one depth, read from the mean of their tokens;
words of a tagger each their own, and a word that stopped is copied upward. `form=multinomial` is the halting-unit
baseline of Faster-DAT.
Modifications from the paper: encoders too; the last exit is the model's own head, and in decoders all exits share it
unless `tied=false`; α, never given there, is 1; a knob for every form: stop where the doubt that one should is below
the threshold (1 − χ; for `multinomial` and `sequence` the probability of needing more layers, or with `argmax=true` the
paper's most likely exit, whatever the threshold; for `threshold` 1 − the largest probability); 0.5 is the paper's
setting of `geometric`; on encoders a unit of its own at every exit.
Relations: token_exit is the threshold form with windows; BERxiT's unit guesses how wrong an exit is, not where to stop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offramp.core.cost import Event
from offramp.core.loop import State
from offramp.core.policy import Policy
from offramp.decoding.exits import DecoderOptions, DecoderSettings, decoder_modules, decoder_policy
from offramp.decoding.training import decoder_stages
from offramp.errors import OfframpError
from offramp.methods._base import Method
from offramp.methods._shared.halting import (
    Halting,
    Oracle,
    Pass,
    aligned_losses,
    halting_loss,
    mixed_rows_loss,
    mixed_words_loss,
    through,
)
from offramp.nn.batches import Batch
from offramp.nn.confidence import row_least_confidence, whole_words
from offramp.nn.exit_heads import Pool
from offramp.nn.exit_policies import ExitOptions, build_exit_heads, exit_weights
from offramp.nn.network import Network
from offramp.nn.setting_space import Threshold
from offramp.training.stage import Backward, Stage

GRID = (0.95, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.05, 0.02)


@dataclass(frozen=True)
class DepthAdaptiveOptions(DecoderOptions):
    """How exits and halting units are built and trained; fixed once trained."""

    level: Literal["auto", "row", "word"] = "auto"  # encoders; auto: words where each has an answer, else rows
    pool: Pool = "meanmax"  # encoders


class EncoderPolicy(Policy):
    """A row, or a word, stops at the first exit where there is little doubt that it should."""

    def __init__(self, network: Network, settings: DecoderSettings) -> None:
        if settings.thresholds or settings.depth or settings.beams:
            asked = "settings of depth_adaptive on an encoder"
            raise OfframpError(asked, "thresholds, depth or beams", "those are for translation; give a threshold")
        self.units, self.exits = _units(network), frozenset(network.exit_heads)
        if settings.argmax and self.units.form in ("geometric", "threshold"):
            given = f"argmax=true for form={self.units.form}, which decides layer by layer"
            raise OfframpError("the likeliest depth", given, "use form=multinomial or sequence, or a threshold")
        self.task, self.final, self.argmax = network.task, network.encoder.final, settings.argmax
        self.limit = 0.5 if settings.argmax else settings.threshold  # the likeliest exit is doubted by 0, others by 1

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        if layer not in self.exits or self.limit == 0.0:
            return None
        if not self.units.by_word:
            return self._uncertainty(layer, s, None) < self.limit
        words, left = s.packed.tokens["scored"], s.packed.tokens.get("left")
        asked = words if left is None else words & (left < 0)
        sure = torch.ones_like(words)
        sure[asked] = self._uncertainty(layer, s, asked) < self.limit
        s.settle(whole_words(sure[words], s.packed))
        going = (s.packed.tokens["left"] < 0).float()
        return torch.bincount(s.packed.row_of_token, weights=going, minlength=s.packed.count) == 0

    def why(self, layer: int, s: State) -> str:
        limit = self.limit if layer in self.exits else 0.0
        if limit == 0.0:
            return ""
        if self.units.by_word:
            words = s.packed.tokens["scored"]
            return f"{int((words & (s.packed.tokens['left'] < 0)).sum())} of {int(words.sum())} words go on"
        uncertainty = float(self._uncertainty(layer, s, None)[0])
        return f"uncertainty {uncertainty:.3g} {'<' if uncertainty < limit else '≥'} {limit:.3g}"

    def _uncertainty(self, layer: int, s: State, asked: Tensor | None) -> Tensor:
        """Doubt that each row, or each asked token, should stop here."""  # [rows or asked]
        if self.units.form == "threshold":
            if asked is not None:
                return 1.0 - s.logits()[asked].float().softmax(-1).amax(-1)
            return row_least_confidence(self.task, s.logits(), s.whole() if s.heads.per_token else s.packed)
        if self.units.form == "geometric":
            return 1.0 - self._ask(layer, s, asked).float().sigmoid()
        if layer == 1:
            plan = self._ask(layer, s, asked).float().softmax(1)
            if asked is None:
                s.packed = s.packed.with_rows(plan=plan)
            else:
                filler = plan.new_zeros(s.packed.total, plan.shape[1])
                s.packed = s.packed.with_tokens(plan=filler.masked_scatter(asked[:, None], plan))
        plan = s.packed.rows["plan"] if asked is None else s.packed.tokens["plan"][asked]
        if self.argmax:
            return (plan.argmax(1) >= layer).float()
        return plan[:, layer:].sum(1)

    def _ask(self, layer: int, s: State, asked: Tensor | None) -> Tensor:
        """What the unit after a layer says; counted."""  # [rows or asked, …]
        packed = s.packed.with_states(self.final(s.packed.states))
        seen, ones = packed.mean() if asked is None else packed.states[asked], torch.ones_like(packed.lengths)
        if asked is not None:
            ones = torch.bincount(packed.row_of_token[asked], minlength=packed.count).cpu()
        s.trace.append(Event("predictor", layer, packed.rows["origin"], ones, ones))
        return self.units.ask(layer, seen)


@dataclass
class Adaptive(Stage):
    """Exits learn, and (where `halting`) the units with them."""

    options: DepthAdaptiveOptions = field(kw_only=True)
    halting: bool = field(kw_only=True)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        named = self.network.named_parameters()
        return [(name, p) for name, p in named if self.halting or not name.startswith("added.predictors.")]

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        options, net, units = self.options, self.network, _units(self.network)
        if not self.halting:
            loss = self._exits(batch, None)
        else:
            seen, oracle = through(net, batch), Oracle(options.oracle, options.penalty, options.sigma)
            loss = self._exits(batch, seen) + options.alpha * halting_loss(net, units, seen, oracle, options.detach)
        backward(loss)
        return {"loss": loss.detach()}

    def _exits(self, batch: Batch, seen: Pass | None) -> Tensor:
        """The loss of the exits, aligned or mixed."""
        options, net = self.options, self.network
        if options.training == "mixed" and _units(net).by_word:
            return mixed_words_loss(net, batch, options.samples)
        seen = seen or through(net, batch)
        if options.training == "mixed":
            return mixed_rows_loss(net, seen, options.samples)
        each = aligned_losses(net, seen)
        return each @ each.new_tensor(exit_weights(net.depth, options.weights))


def _published(network: Network) -> list[dict[str, Any]]:
    """The paper's own rule, where there is a most likely exit."""
    return [{"argmax": True}] if _units(network).form == "multinomial" else []


def _units(network: Network) -> Halting:
    return network.added["predictors"]  # type: ignore[return-value]  # a ModuleDict


class DepthAdaptive(Method):
    """A halting unit decides the depth of rows, words or generated tokens."""

    name = "depth_adaptive"
    settings = DecoderSettings
    options = DepthAdaptiveOptions
    space = Threshold(
        "threshold", loosest=0.0, unit="uncertainty", replay=False, grid=GRID, also=lambda net: _published(net)
    )
    needs = frozenset({"example_error"})
    decodes = True

    def modules(self, network: Network, options: DepthAdaptiveOptions) -> nn.ModuleDict:
        """An off-ramp after every layer, and the units of the form."""
        if network.decoder is not None:
            return decoder_modules(network, options)
        task = network.task
        if options.form == "sequence":
            raise OfframpError("a depth read from the source", f"the task {task.name!r}", "it is for translation")
        if options.form == "threshold" and "distribution" not in task.provides:
            given = "answers without probabilities"
            raise OfframpError(
                f"confidence on the task {task.name!r}", given, "say --set form=geometric or multinomial"
            )
        if options.level == "word" and "words" not in task.provides:
            given = "one answer for a whole row"
            raise OfframpError(f"a depth for every word on the task {task.name!r}", given, "say --set level=row")
        by_word = options.level == "word" or (options.level == "auto" and "words" in task.provides)
        units = Halting(options.form, by_word, network.encoder.hidden, network.depth)
        return nn.ModuleDict(
            {"exit_heads": build_exit_heads(network, ExitOptions(pool=options.pool, exit0=False)), "predictors": units}
        )

    def policy(self, network: Network, settings: DecoderSettings) -> Policy:
        """Of the decoder where there is one, else of the encoder."""
        return EncoderPolicy(network, settings) if network.decoder is None else decoder_policy(network, settings)

    def stages(self, network: Network, options: DepthAdaptiveOptions) -> list[Stage]:
        """The exits, then the exits and the units that choose among them."""
        if network.decoder is not None:
            return decoder_stages(network, options)
        lr, units = options.head_lr, options.form != "threshold"
        first = [] if units and options.together else [Adaptive(network, "exits", lr, options=options, halting=False)]
        second = [Adaptive(network, "exits and halting", lr, options=options, halting=True)] if units else []
        return [*first, *second]
