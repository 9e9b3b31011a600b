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

from typing import Any

from torch import nn

from offramp.core.policy import Policy
from offramp.decoding.exits import DecoderSettings, decoder_modules, decoder_policy
from offramp.decoding.training import decoder_stages
from offramp.errors import OfframpError
from offramp.methods._base import Method
from offramp.methods.depth_adaptive.options import DepthAdaptiveOptions
from offramp.methods.depth_adaptive.policy import EncoderPolicy
from offramp.methods.depth_adaptive.training import Adaptive
from offramp.methods.depth_adaptive.units import Halting, halting_units
from offramp.nn.exit_policies import ExitOptions, build_exit_heads
from offramp.nn.keys import EXIT_HEADS, PREDICTORS
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.training.stage import Stage

GRID = (0.95, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.05, 0.02)


class DepthAdaptive(Method):
    """A halting unit decides the depth of rows, words or generated tokens."""

    name = "depth_adaptive"
    settings = DecoderSettings
    options = DepthAdaptiveOptions
    space = ThresholdSpace(
        "threshold",
        full_value=0.0,
        unit="uncertainty",
        replay=False,
        grid=GRID,
        extra_settings=lambda net: _published(net),
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
            {EXIT_HEADS: build_exit_heads(network, ExitOptions(pool=options.pool, exit0=False)), PREDICTORS: units}
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


def _published(network: Network) -> list[dict[str, Any]]:
    """The paper's own rule, where there is a most likely exit."""
    return [{"argmax": True}] if halting_units(network).form == "multinomial" else []
