"""Depth-Adaptive Transformer (Elbayad et al. 2020): a halting unit learns from an oracle how many layers to use.

What it does: an exit after every layer, all trained in the same way (`aligned`), or along sampled exits with missing
states copied upward (`mixed`); then a unit is trained to stop where an oracle that knows the answer would: at the exit
that is correct, or that gives the answer the highest likelihood, minus λ for each layer, for single words smoothed over
their neighbours by σ. Forms: `multinomial` plans the exit after layer 1, `geometric` decides after every layer whether
to stop, `threshold` has no unit and uses the exit's own confidence, `sequence` plans the depth of a sentence from its
source. In translation, the paper's task, every generated token leaves the decoder at an exit of its own
(`decoding/exits.py`). In encoders each row has one depth, computed from the mean of its tokens, or each word of a
tagger has its own, and a halted word is copied upward. `form=multinomial` is the halting-unit baseline of Faster-DAT.

Modifications (ours, not the paper's):
- encoders too, with a unit of its own at every exit;
- the last exit is the model's own head, which in decoders all exits share with `tied=true` (the paper's WMT models);
- the oracle is the likelihood one by default, and the correctness oracle labels what no exit gets right with the last
  exit (`never_right=first` is the paper's): otherwise a model that is often wrong learns to stop everything at once;
- epochs are chosen at the threshold whose average exit is midway, not at the paper's setting;
- α, which the paper does not state, is 1;
- every form has a setting: stop where the uncertainty is below the threshold. The uncertainty is 1 − χ for `geometric`
  (0.5 is the paper's setting); the probability of needing more layers for `multinomial` and `sequence` (`argmax=true`
  is the paper's most likely exit, whatever the threshold); 1 − the largest probability for `threshold`.

Relations: token_exit is the threshold form with windows; BERxiT's unit estimates how wrong an exit is, not where to
stop.
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
from offramp.methods.depth_adaptive.policy import EncoderHaltingPolicy
from offramp.methods.depth_adaptive.training import ExitsAndHaltingStage
from offramp.methods.depth_adaptive.units import HaltingUnits, halting_units
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
        extra_settings=lambda network: _paper_settings(network),
    )
    needs = frozenset({"example_error"})
    decodes = True

    def modules(self, network: Network, options: DepthAdaptiveOptions) -> nn.ModuleDict:
        if network.decoder is not None:
            return decoder_modules(network, options)
        task = network.task
        if options.form == "sequence":
            raise OfframpError("a depth planned from the source", f"the task {task.name!r}", "it is for translation")
        if options.form == "threshold" and "distribution" not in task.provides:
            given = "answers without probabilities"
            raise OfframpError(
                f"confidence on the task {task.name!r}", given, "use --set form=geometric or multinomial"
            )
        if options.level == "word" and "words" not in task.provides:
            given = "one answer for a whole row"
            raise OfframpError(f"a depth for every word on the task {task.name!r}", given, "use --set level=row")
        by_word = options.level == "word" or (options.level == "auto" and "words" in task.provides)
        units = HaltingUnits(options.form, by_word, network.encoder.hidden, network.depth)
        return nn.ModuleDict(
            {EXIT_HEADS: build_exit_heads(network, ExitOptions(pool=options.pool, exit0=False)), PREDICTORS: units}
        )

    def policy(self, network: Network, settings: DecoderSettings) -> Policy:
        """Return the policy of the decoder where there is one, else of the encoder."""
        return EncoderHaltingPolicy(network, settings) if network.decoder is None else decoder_policy(network, settings)

    def stages(self, network: Network, options: DepthAdaptiveOptions) -> list[Stage]:
        """Return training of the exits, then of exits and halting units together."""
        if network.decoder is not None:
            return decoder_stages(network, options)
        lr, units = options.head_lr, options.form != "threshold"
        first = (
            []
            if units and options.together
            else [ExitsAndHaltingStage(network, "exits", lr, options=options, halting=False)]
        )
        second = (
            [ExitsAndHaltingStage(network, "exits and halting", lr, options=options, halting=True)] if units else []
        )
        return [*first, *second]


def _paper_settings(network: Network) -> list[dict[str, Any]]:
    """Return the paper's own rule, where there is a most likely exit."""
    return [{"argmax": True}] if halting_units(network).form == "multinomial" else []
