"""The policy of encoders: where rows or words stop."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp.core.columns import EXITED_AT, ORIGIN, SCORED
from offramp.core.cost import Event
from offramp.core.loop import State
from offramp.core.policy import Policy
from offramp.decoding.exits import DecoderSettings
from offramp.errors import OfframpError
from offramp.methods.depth_adaptive.units import halting_units
from offramp.nn.confidence import row_least_confidence, tokens_of_certain_words
from offramp.nn.network import Network


class EncoderPolicy(Policy):
    """A row, or a word, stops at the first exit where there is little doubt that it should."""

    def __init__(self, network: Network, settings: DecoderSettings) -> None:
        if settings.thresholds or settings.depth or settings.beams:
            asked = "settings of depth_adaptive on an encoder"
            raise OfframpError(asked, "thresholds, depth or beams", "those are for translation; give a threshold")
        self.units, self.exits = halting_units(network), frozenset(network.exit_heads)
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
        words, left = s.packed.tokens[SCORED], s.packed.tokens.get(EXITED_AT)
        asked = words if left is None else words & (left < 0)
        sure = torch.ones_like(words)
        sure[asked] = self._uncertainty(layer, s, asked) < self.limit
        s.answer_tokens(tokens_of_certain_words(sure[words], s.packed))
        going = (s.packed.tokens[EXITED_AT] < 0).float()
        return torch.bincount(s.packed.row_of_token, weights=going, minlength=s.packed.count) == 0

    def reason(self, layer: int, s: State) -> str:
        limit = self.limit if layer in self.exits else 0.0
        if limit == 0.0:
            return ""
        if self.units.by_word:
            words = s.packed.tokens[SCORED]
            return f"{int((words & (s.packed.tokens[EXITED_AT] < 0)).sum())} of {int(words.sum())} words go on"
        uncertainty = float(self._uncertainty(layer, s, None)[0])
        return f"uncertainty {uncertainty:.3g} {'<' if uncertainty < limit else '≥'} {limit:.3g}"

    def _uncertainty(self, layer: int, s: State, asked: Tensor | None) -> Tensor:
        """Doubt that each row, or each asked token, should stop here."""  # [rows or asked]
        if self.units.form == "threshold":
            if asked is not None:
                return 1.0 - s.logits()[asked].float().softmax(-1).amax(-1)
            return row_least_confidence(
                self.task, s.logits(), s.with_dropped_tokens() if s.exit_heads.per_token else s.packed
            )
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
        s.trace.append(Event("predictor", layer, packed.rows[ORIGIN], ones, ones))
        return self.units.ask(layer, seen)
