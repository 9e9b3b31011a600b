"""Faster Depth-Adaptive Transformer (Liu et al. 2021): every word's depth is known before the model runs.

What it does: a table of word depths is made from the training rows. `mi`: mutual information of a word's presence and
the label, −log, as many bins of equal width as layers: what tells most goes least deep. `reconstruction`: the layer
after which a masked language model guesses the word best, argmin of loss_n + λn, averaged over (20 of) its occurrences.
At run time a token past its depth goes idle (still key and value, no longer computed), a row ends with its deepest
word, and a head reads maximum and mean of all tokens. Training runs by the same rule, through the same loop.
Modifications from the paper: λn is added (Eq. 4 prints a minus, against its own text and Table 4); a row stops at its
own deepest word, not at the batch's; depths of new text are looked up (`transductive=true` is the paper's form, a
masked pass for every word of the text to be answered, counted in its cost); many well-spaced masks a pass; pieces share
their word's depth, words never seen get the median of those seen, special tokens go with the row's deepest word (and
so do, on spans, the words of the question); tagging (labels: the tags that occur in the row; no pooling) and numbers
(labels: quarters of their range by rank) too. `deep=telling` turns the table of `mi` round: what tells most goes
deepest. `least` is the smallest information told apart: words that tell next to nothing by accident make all bins wide,
and a higher floor, such as 1e-7, sends more words deep, at the cost of MACs.
Relations: token_exit decides on the way what this one plans; depth_adaptive is its halting-unit baseline.
"""

from __future__ import annotations

from torch import nn

from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods._base import Method
from offramp.methods.faster_dat.masked_model import MaskedModel, masked_model_of
from offramp.methods.faster_dat.options import FasterDATOptions, FasterDATSettings
from offramp.methods.faster_dat.policy import FasterDATPolicy, deepest_word
from offramp.methods.faster_dat.training import GuessWords, Planned
from offramp.methods.faster_dat.word_depths import WordDepths, word_depths_of
from offramp.nn.exit_heads import CostOnly, MeanMaxHead, SharedExitHead
from offramp.nn.keys import EXIT_HEADS, FINAL_HEAD, PREDICTORS
from offramp.nn.network import Network
from offramp.nn.setting_space import IntegerSpace
from offramp.training.stage import Stage


class FasterDAT(Method):
    """The depth of every word is looked up before the model runs."""

    name = "faster_dat"
    settings = FasterDATSettings
    options = FasterDATOptions
    space = IntegerSpace("cap", full_value=0, replay=False, largest=lambda network: deepest_word(network) - 1)
    hf_equal = False

    def modules(self, network: Network, options: FasterDATOptions) -> nn.ModuleDict:
        """The table, one head for all layers, and the masked model where depths are estimated by it."""
        if network.task.outputs == 0:
            given = "answers as wide as a vocabulary"
            raise OfframpError(f"faster_dat for {network.task.name}", given, "use it for classification or tagging")
        if options.layers > network.depth:
            given = f"layers={options.layers}"
            raise OfframpError("a largest depth", given, f"this model has {network.depth} layers; 0 takes all")
        added = nn.ModuleDict({"depths": WordDepths(options.layers or network.depth, options.penalty)})
        apply, cost = network.model_head.apply, network.model_head.cost
        if options.pool == "meanmax" and not network.per_token:
            head = MeanMaxHead(network.encoder.hidden, network.task.outputs)
            added[FINAL_HEAD], apply, cost = head, head.forward, head.cost
        numbers = [str(layer) for layer in range(1, network.depth)]
        added[EXIT_HEADS] = nn.ModuleDict({layer: SharedExitHead(apply, cost) for layer in numbers})
        if options.estimation == "reconstruction":
            added["masked"] = masked = MaskedModel(network.hf.config, stays=options.transductive)
            prices = {layer: CostOnly(lambda: masked.head.cost) for layer in [*numbers, str(network.depth)]}
            added[PREDICTORS] = nn.ModuleDict(prices)
        return added

    def policy(self, network: Network, settings: FasterDATSettings) -> Policy:
        return FasterDATPolicy(network, settings)

    def stages(self, network: Network, options: FasterDATOptions) -> list[Stage]:
        """Fine-tune over planned depths; before that, for reconstruction, teach the masked model."""
        masked, first = masked_model_of(network), list[Stage]()
        if masked is not None:
            masked.load(network.hf.name_or_path)
            layers = word_depths_of(network).layers
            first = [GuessWords(network, "guess hidden words", options.head_lr, masked=masked, layers=layers)]
        return [*first, Planned(network, "fine-tune planned depths", options.head_lr, options=options)]
