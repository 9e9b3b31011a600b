"""Faster Depth-Adaptive Transformer (Liu et al. 2021): every word's depth is known before the model runs.

What it does: a table of word depths is computed from the training rows. With `estimation=mi` it follows from the mutual
information of a word's presence in a row and the row's label: words are divided into as many bins as there are layers,
and the most informative ones go through the fewest layers. With `estimation=reconstruction` a word's
depth is the layer after which a masked language model predicts it best, argmin of loss_n + λn, averaged over (20 of)
its occurrences. At run time a token past its depth is idle (still key and value, no longer computed), a row ends with
its deepest word, and a head reads maximum and mean of all tokens. Training runs by the same rule, through the same
loop.

Modifications (ours, not the paper's):
- λn is added (Eq. 4 prints a minus, against the paper's own text and its Table 4);
- a row stops at its own deepest word, not at the batch's;
- depths of new text are looked up (`transductive=true` is the paper's form: a masked pass for every word of the text to
  be answered, counted in its cost);
- one pass masks many words, well spaced;
- pieces share their word's depth; special tokens, and on question answering the words of the question, go with the
  row's deepest word;
- with `mi`, bins hold equal shares of the running text (published, and with `bins=width`: bins of equal width of −log
  information, of which the upper ones hold hardly any text); words that occur fewer than five times have their
  information by accident and, like unseen words, go through all layers (published: every word is in the table). The
  recipe `faster_dat/published` has the published choices;
- at run time `cap` cuts planned depths, so that one trained model gives a curve;
- tagging (labels: the tags that occur in the row; no pooling), regression (labels: quarters of the range, by rank) and
  rows with several labels (the sum over all of them);
- the model is fine-tuned with all words at full depth before it is trained at planned depths (`mixed=false`: at planned
  depths from the beginning), where it also learns its own former logits (`distil=false`: labels alone);
- with `mi`, the most informative words go deepest instead of shallowest, which did better on TREC, MR and SST-2
  (`deep=rare` is the published order);
- with `bins=width`, `least` is the smallest information that is distinguished: words with almost no information, by
  accident, make all bins wide, and a higher floor such as 1e-7 sends more words deep, at the cost of MACs.

Relations: token_exit decides on the way what this method plans; depth_adaptive is its halting-unit baseline.
"""

from __future__ import annotations

from torch import nn

from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods._base import Method
from offramp.methods.faster_dat.masked_model import MASKED_MODEL, MaskedModel, masked_model_of
from offramp.methods.faster_dat.options import FasterDATOptions, FasterDATSettings
from offramp.methods.faster_dat.policy import FasterDATPolicy, deepest_word
from offramp.methods.faster_dat.training import AllWordsDeepStage, MaskedModelStage, PlannedDepthsStage
from offramp.methods.faster_dat.word_depths import WORD_DEPTHS, WordDepths, word_depths_of
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
        """Return the table, one head for all layers and, for reconstruction, the masked model."""
        if network.task.outputs == 0:
            given = "answers as wide as a vocabulary"
            raise OfframpError(f"faster_dat for {network.task.name}", given, "use it for classification or tagging")
        if options.layers > network.depth:
            given = f"layers={options.layers}"
            raise OfframpError("a largest depth", given, f"this model has {network.depth} layers; 0 takes all")
        added = nn.ModuleDict({WORD_DEPTHS: WordDepths(options.layers or network.depth, options.penalty)})
        apply, cost = network.model_head.apply, network.model_head.cost
        if options.pool == "meanmax" and not network.per_token:
            head = MeanMaxHead(network.encoder.hidden, network.task.outputs)
            added[FINAL_HEAD], apply, cost = head, head.forward, head.cost
        numbers = [str(layer) for layer in range(1, network.depth)]
        added[EXIT_HEADS] = nn.ModuleDict({layer: SharedExitHead(apply, cost) for layer in numbers})
        if options.estimation == "reconstruction":
            added[MASKED_MODEL] = masked = MaskedModel(network.hf.config, used_at_run_time=options.transductive)
            prices = {layer: CostOnly(lambda: masked.head.cost) for layer in [*numbers, str(network.depth)]}
            added[PREDICTORS] = nn.ModuleDict(prices)
        return added

    def policy(self, network: Network, settings: FasterDATSettings) -> Policy:
        return FasterDATPolicy(network, settings)

    def stages(self, network: Network, options: FasterDATOptions) -> list[Stage]:
        """Return fine-tuning with all words deep (`mixed`), then at planned depths, for reconstruction after training
        the masked model."""
        masked, first = masked_model_of(network), list[Stage]()
        if masked is not None:
            masked.load(network.hf.name_or_path, network.base_source)
            layers = word_depths_of(network).layers
            first = [MaskedModelStage(network, "train masked model", options.head_lr, masked=masked, layers=layers)]
        if options.mixed:
            first.append(AllWordsDeepStage(network, "fine-tune", options.head_lr, fine_tuning=True))
        return [*first, PlannedDepthsStage(network, "fine-tune planned depths", options.head_lr, options=options)]
