"""ALBERTa (Li et al. 2024): after a short prefix a small network predicts how many layers each row needs.

What it does: the first `prefix` layers run for every row, by default those of the first hidden group. From their pooled
output a predictor gives, by softmax, the probability of each number of further layers, and by RevPC (reverse,
cumulative sum, reverse) the probability p that each later layer is needed: 1 for the first one, never rising. In
training both halves of every later layer are multiplied by p, so that the task's loss alone trains the predictor and
one mini-batch trains many depths. At run time a row goes on while p ≥ γ: its depth is known before the layers run, and
the model's own head is applied where it ends. Executed layers keep their p, as in training; `hard=true` runs them at
full strength, which is another model.

Modifications (ours, not the paper's):
- `x + p·(half(x) − x)` replaces `x + p·f(LN(x))`: the same on pre-norm layers and right on post-norm ones, so that any
  pretrained model can be used;
- the predictor starts with most of its weight on full depth (`start`: a larger value begins nearer to the plain model,
  but its saturated softmax hardly learns), and reads mean and maximum over tokens (`pool=first` is the paper's) after a
  norm;
- one vector over all later layers, not one for each hidden group;
- `penalty` on the expected share of layers, which grows linearly during training;
- `cut` also cuts rows in training at depths drawn from their own distribution, and a share of them (`explore`) at any
  depth, so that short stacks are trained as they run;
- `head` gives each earlier depth an exit head of its own, where the model's head reads one token;
- `mixed` fine-tunes the model before it is trained through gates, and by `distil` rows then also learn its logits.

`penalty`, `cut`, `explore`, `head`, `mixed` and `distil` are on by default: without them short stacks of a pretrained
model answer by chance. `--recipe alberta/published` turns them off; then, as in the paper, only γ asks for fewer
layers.

The poster trains the predictor with the backbone from the first step of masked-language pretraining on: `offramp train
--task masked_lm --recipe alberta/published --model alberta --from-scratch`; fine-tuning from that run (`--model`)
continues with its predictor.

Relations: BERxiT decides at every exit, this method once; it is PALBERT's Q-exit with q = 1 − γ. `gamma=0` is the
paper's "no early exit", `revpc=false` its raw softmax; positions are left out in the configuration of the `alberta`
backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from offramp.backbones import linear_macs
from offramp.core.columns import Column
from offramp.core.cost import HeadCost
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Policy
from offramp.errors import OfframpError
from offramp.methods._base import Method
from offramp.nn.batches import Batch
from offramp.nn.exit_heads import WIDTH, ExitHead, Pool, SharedExitHead, pool_states
from offramp.nn.exit_policies import UncertaintyPolicy
from offramp.nn.keys import EXIT_HEADS, EXIT_UNIT
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.training.distillation import distillation_loss
from offramp.training.forward import ForwardHooks, LayerStates
from offramp.training.losses import exit_loss
from offramp.training.objectives import JointStage, after_fine_tuning
from offramp.training.stage import Stage

FIRST_GROUP = -1
LAYER_NEEDS = Column("layer_needs", torch.float32, None, "probability that each gated layer is needed, [rows, gated]")
PLANNED_DEPTH = Column("planned_depth", torch.int64, None, "layers that a row goes through")
EXECUTED = Column("executed", torch.bool, None, "whether each gated layer runs in this training step, [rows, gated]")


@dataclass(frozen=True)
class ALBERTaSettings:
    """γ, the probability of being needed from which on a layer runs; 0 runs all layers."""

    gamma: float = 0.0
    hard: bool = False  # run layers at full strength instead of p, which is not how they were trained

    largest_threshold: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            fix = "use 0 (all layers) up to 1 (as few as possible), e.g. 0.8"
            raise OfframpError("γ, the probability below which layers are left out", f"gamma={self.gamma}", fix)


@dataclass(frozen=True)
class ALBERTaOptions:
    """How ALBERTa is built and trained."""

    prefix: int = FIRST_GROUP  # layers that always run, before the depth is predicted; −1: the first hidden group
    pool: Pool = "meanmax"  # what the predictor reads
    revpc: bool = True
    start: float = 2.0  # initial logit of full depth, above those of other depths
    penalty: float = 0.2  # weight of the expected share of gated layers in the loss
    cut: bool = True  # cut rows in training at depths drawn from their distribution
    explore: float = 0.5  # share of rows cut at a uniformly drawn depth instead, so that shallow exits are trained too
    head: Literal["own", "first", "mean", "meanmax"] = "meanmax"  # the head of rows that end early (not of words)
    mixed: bool = True  # fine-tune the backbone alone first
    distil: bool = True  # mixed: rows learn the logits of the fine-tuned model beside the labels
    dropout: bool = True  # of the backbone, while it is trained through gates; ALBERT is pretrained without
    head_lr: float = 5e-4

    def __post_init__(self) -> None:
        if self.prefix < FIRST_GROUP:
            fix = "use 0 or more, or −1 for the first hidden group"
            raise OfframpError("a number of layers before the depth is predicted", f"prefix={self.prefix}", fix)
        if not self.penalty >= 0.0:
            raise OfframpError("a depth penalty", f"penalty={self.penalty}", "use 0 (none) or more, e.g. 0.1")
        if not 0.0 <= self.explore <= 1.0 or (self.explore > 0.0 and not self.cut):
            fix = "use 0 to 1 with cut=true, or explore=0 with cut=false"
            raise OfframpError("a share of rows cut at any depth", f"explore={self.explore}, cut={self.cut}", fix)
        if self.head != "own" and not self.cut:
            fix = "use cut=true (it trains them), or head=own"
            raise OfframpError("exit heads below the last layer", f"head={self.head} with cut=false", fix)


def prefix_length(network: Network, options: ALBERTaOptions) -> int:
    """Return how many layers always run: as many as stated, or the first layers that share their parameters.

    Where all layers share one block (ALBERT), no group ends before the last layer, and the prefix is one layer.
    """
    if options.prefix != FIRST_GROUP:
        return options.prefix
    first_parameters = [next(iter(layer.parameters())) for layer in network.encoder.layers]
    group = next((place for place, own in enumerate(first_parameters) if own is not first_parameters[0]), 1)
    return min(group, max(0, network.depth - 2))


class StructurePredictor(nn.Module):
    """Predicts from pooled states after the prefix the probability that each later layer is needed."""

    def __init__(self, network: Network, options: ALBERTaOptions) -> None:
        super().__init__()
        self.prefix, self.pool, self.revpc = prefix_length(network, options), options.pool, options.revpc
        hidden, gated = network.encoder.hidden, network.depth - self.prefix
        wide = WIDTH[options.pool] * hidden
        self.norm, self.first, self.last = nn.LayerNorm(wide), nn.Linear(wide, hidden), nn.Linear(hidden, gated)
        nn.init.normal_(self.last.weight, std=0.02)
        nn.init.zeros_(self.last.bias)
        if options.revpc:  # without RevPC the softmax itself gates, and no initial value gives all layers full strength
            self.last.bias.data[-1] = options.start
        self.cost = HeadCost(linear_macs(self), 0)

    def forward(self, layer: int, packed: Packed) -> Tensor:
        """Return the probability that each gated layer is needed."""  # [rows, gated layers]
        logits = self.last(torch.tanh(self.first(self.norm(pool_states(packed, self.pool)))))
        probs: Tensor = logits.float().softmax(-1)
        return revpc(probs) if self.revpc else probs


def revpc(probs: Tensor) -> Tensor:
    """Return P(depth ≥ i) from P(depth = i): reverse, cumulative sum, reverse; exactly 1 for the first."""  # [rows, n]
    summed = probs.flip(-1).cumsum(-1).flip(-1)
    return summed / summed[..., :1]


def executed(needs: Tensor, gamma: float | Tensor) -> Tensor:
    """Return which gated layers run: all before the first whose probability is below γ."""  # [rows, n] bool
    return (needs >= gamma).cumprod(-1).bool()


class ALBERTaPolicy(UncertaintyPolicy):
    """Plans the depth of every row at the end of the prefix; rows then exit at their planned depth."""

    def __init__(self, network: Network, settings: ALBERTaSettings) -> None:
        unit = network.added[EXIT_UNIT]
        assert isinstance(unit, StructurePredictor)
        self.prefix, self.settings = unit.prefix, settings

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        if layer > self.prefix and not self.settings.hard:
            need = s.packed.rows[LAYER_NEEDS][:, layer - self.prefix - 1]
            s.packed = s.packed.with_tokens(gate=need[s.packed.row_of_token])
        return None

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        if layer < self.prefix:
            return None
        if layer == self.prefix:
            needs = s.exit_unit()
            depth = self.prefix + executed(needs, self.settings.gamma).sum(-1)
            s.packed = s.packed.with_rows(layer_needs=needs, planned_depth=depth.cpu())
        return s.packed.rows[PLANNED_DEPTH] <= layer

    def reason(self, layer: int, s: State) -> str:
        if layer < self.prefix:
            return ""
        need, gamma = float(s.packed.rows[LAYER_NEEDS][0, layer - self.prefix]), self.settings.gamma
        return f"next layer needed: {need:.6g} {'≥' if need >= gamma else '<'} {gamma:.6g}"

    def uncertainty(self, layer: int, s: State) -> Tensor:
        """Return the probability that the next layer is needed."""  # [rows]
        return s.exit_heads.exit_unit(self.prefix, s.packed)[:, layer - self.prefix]


@dataclass
class GatedStage(JointStage):
    """Trains all parameters through the gates; with a growing penalty the last epoch is the one that is meant."""

    penalty: float = 0.0
    weight: float = 0.0  # of the penalty at this step
    dropout: bool = True

    def set_train_mode(self) -> None:
        self.network.train(backbone=self.dropout, added=True)

    def set_progress(self, share: float) -> None:
        self.weight = self.penalty * share

    def policy(self) -> Policy:
        return ALBERTaPolicy(self.network, ALBERTaSettings())

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        return len(history) - 1 if self.penalty > 0.0 else super().best_epoch(history)


def draw_executed(needs: Tensor, options: ALBERTaOptions) -> Tensor:
    """Return which gated layers run in training: all, or with `cut` as many as a drawn depth."""  # [rows, gated] bool
    if not options.cut:
        return executed(needs, 0.0)
    own = executed(needs, torch.rand(len(needs), 1, device=needs.device))
    if options.explore == 0.0:
        return own
    gated = needs.shape[1]
    fewest = int(options.revpc)  # with RevPC the first gated layer is always needed: no row ends before it
    uniform = torch.arange(gated) < torch.randint(fewest, gated + 1, (len(needs), 1))
    explores = torch.rand(len(needs), 1, device=needs.device) < options.explore
    return torch.where(explores, uniform.to(needs.device), own)


def _logits_at_cut(net: Network, states: LayerStates, prefix: int) -> Tensor:
    """Return the logits of every row by the exit of the depth it was cut to."""  # [rows, outputs]
    last, depth = states.after(net.depth), prefix + states.packed.rows[EXECUTED].sum(-1)
    groups = [(d, (depth == d)) for d in depth.unique().tolist()]
    logits = torch.cat([net(d, last.keep_rows(mask)).float() for d, mask in groups])
    return logits[torch.cat([mask.nonzero().squeeze(1) for _, mask in groups]).argsort()]


class ALBERTa(Method):
    """A predictor plans the depth of every row after a short prefix."""

    name = "alberta"
    settings = ALBERTaSettings
    options = ALBERTaOptions
    space = ThresholdSpace("gamma", full_value=0.0, unit="need", per_exit=False)
    hf_equal = False

    def modules(self, network: Network, options: ALBERTaOptions) -> nn.ModuleDict:
        prefix = prefix_length(network, options)
        if prefix > network.depth - 2:
            fix = f"use 0 to {network.depth - 2} for this model: at least two layers must be left to choose from"
            raise OfframpError("a number of layers before the depth is predicted", f"prefix={prefix}", fix)
        exits: dict[str, nn.Module] = {
            str(layer): SharedExitHead(network.model_head.apply, network.model_head.cost)
            for layer in range(prefix, network.depth)
        }
        if options.head != "own" and not network.per_token:
            hidden, outputs = network.encoder.hidden, network.task.outputs
            later = [layer for layer in exits if int(layer) > prefix]
            exits.update({layer: ExitHead(hidden, outputs, options.head) for layer in later})
        return nn.ModuleDict({EXIT_HEADS: nn.ModuleDict(exits), EXIT_UNIT: StructurePredictor(network, options)})

    def policy(self, network: Network, settings: ALBERTaSettings) -> Policy:
        return ALBERTaPolicy(network, settings)

    def stages(self, network: Network, options: ALBERTaOptions) -> list[Stage]:
        """Return the stage of the task's loss through soft gates, by option after plain fine-tuning."""
        prefix = prefix_length(network, options)

        def gate(layer: int, states: LayerStates) -> Tensor | None:
            if layer <= prefix:
                return None
            if layer == prefix + 1:
                needs = network.exit_unit(prefix, states.after(prefix))
                runs = draw_executed(needs, options)
                states.packed = states.packed.with_rows(layer_needs=needs, executed=runs)
            place = layer - prefix - 1
            needs, runs = (states.packed.rows[name][:, place] for name in (LAYER_NEEDS, EXECUTED))
            # a layer that was cut is a copy, but its p gets the gradient of running it (straight through)
            return torch.where(runs, needs, needs - needs.detach())[states.packed.row_of_token]

        def objective(net: Network, states: LayerStates, batch: Batch) -> Tensor:
            penalty = stage.weight * states.packed.rows[LAYER_NEEDS].mean()
            if options.head == "own" or net.per_token:
                return exit_loss(net, net.depth, states.after(net.depth), batch) + penalty
            logits = _logits_at_cut(net, states, prefix)
            loss = net.task.loss(logits, batch.targets, batch.packed.lengths.to(net.device)) + penalty
            if batch.teacher is None:
                return loss
            return loss + distillation_loss(net, logits, batch.teacher, batch.packed)

        stage = GatedStage(
            network,
            "gated",
            options.head_lr,
            objective=objective,
            hooks=ForwardHooks(gate=gate),
            penalty=options.penalty,
            distil=options.distil,
            dropout=options.dropout,
        )
        return after_fine_tuning(options.mixed, stage)
