"""The policy of encoders: where rows or words stop."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp.core.columns import EXITED_AT, ORIGIN, SCORED, Column
from offramp.core.cost import Event
from offramp.core.loop import State
from offramp.core.policy import Policy
from offramp.decoding.exits import DecoderSettings
from offramp.errors import OfframpError
from offramp.methods.depth_adaptive.units import halting_units
from offramp.nn.confidence import row_least_confidence, tokens_of_certain_words
from offramp.nn.network import Network

EXIT_PLAN = Column(
    "exit_plan", torch.float32, None, "probability of every exit, planned after layer 1; of rows or tokens"
)


class EncoderHaltingPolicy(Policy):
    """Stops a row, or a word, at the first exit where the uncertainty about stopping is below the threshold."""

    def __init__(self, network: Network, settings: DecoderSettings) -> None:
        if settings.thresholds or settings.depth or settings.beams:
            asked = "settings of depth_adaptive on an encoder"
            raise OfframpError(asked, "thresholds, depth or beams", "those are for translation; give a threshold")
        self.units, self.exits = halting_units(network), frozenset(network.exit_heads)
        if settings.argmax and self.units.form in ("geometric", "threshold"):
            given = f"argmax=true for form={self.units.form}, which decides layer by layer"
            raise OfframpError("the most likely depth", given, "use form=multinomial or sequence, or a threshold")
        self.task, self.final, self.argmax = network.task, network.encoder.final, settings.argmax
        self.limit = 0.5 if settings.argmax else settings.threshold  # with argmax the uncertainty is 0 or 1

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        if layer not in self.exits or self.limit == 0.0:
            return None
        if not self.units.by_word:
            return self._uncertainty(layer, s, None) < self.limit
        words, exited_at = s.packed.tokens[SCORED], s.packed.tokens.get(EXITED_AT)
        going_words = words if exited_at is None else words & (exited_at < 0)
        stops = torch.ones_like(words)
        stops[going_words] = self._uncertainty(layer, s, going_words) < self.limit
        s.answer_tokens(tokens_of_certain_words(stops[words], s.packed))
        going = (s.packed.tokens[EXITED_AT] < 0).float()
        return torch.bincount(s.packed.row_of_token, weights=going, minlength=s.packed.count) == 0

    def reason(self, layer: int, s: State) -> str:
        limit = self.limit if layer in self.exits else 0.0
        if limit == 0.0:
            return ""
        if self.units.by_word:
            words = s.packed.tokens[SCORED]
            return f"{int((words & (s.packed.tokens[EXITED_AT] < 0)).sum())} of {int(words.sum())} words go on"
        uncertainty = self._uncertainty(layer, s, None)[0]
        return f"uncertainty {float(uncertainty):.3g} {'<' if bool(uncertainty < limit) else '≥'} {limit:.3g}"

    def _uncertainty(self, layer: int, s: State, tokens: Tensor | None) -> Tensor:
        """Return the uncertainty about stopping of every row, or of the tokens of a mask."""  # [rows or tokens]
        if self.units.form == "threshold":
            if tokens is not None:
                return 1.0 - s.logits()[tokens].float().softmax(-1).amax(-1)
            return row_least_confidence(
                self.task, s.logits(), s.with_dropped_tokens() if s.exit_heads.per_token else s.packed
            )
        if self.units.form == "geometric":
            return 1.0 - self._unit_logits(layer, s, tokens).float().sigmoid()
        if layer == 1:
            plan = self._unit_logits(layer, s, tokens).float().softmax(1)
            if tokens is None:
                s.packed = s.packed.with_rows(exit_plan=plan)
            else:
                filler = plan.new_zeros(s.packed.total, plan.shape[1])
                s.packed = s.packed.with_tokens(exit_plan=filler.masked_scatter(tokens[:, None], plan))
        plan = s.packed.rows[EXIT_PLAN] if tokens is None else s.packed.tokens[EXIT_PLAN][tokens]
        if self.argmax:
            return (plan.argmax(1) >= layer).float()
        return plan[:, layer:].sum(1)

    def _unit_logits(self, layer: int, s: State, tokens: Tensor | None) -> Tensor:
        """Return the logits of the unit after a layer, and record its cost."""  # [rows or tokens, …]
        packed = s.packed.with_states(self.final(s.packed.states))
        states, counts = packed.mean() if tokens is None else packed.states[tokens], torch.ones_like(packed.lengths)
        if tokens is not None:
            counts = torch.bincount(packed.row_of_token[tokens], minlength=packed.count).cpu()
        s.trace.append(Event("predictor", layer, packed.rows[ORIGIN], counts, counts))
        return self.units.unit_logits(layer, states)
