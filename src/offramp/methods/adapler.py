"""AdapLeR (Modarressi et al. 2022): before every layer, tokens with a small predicted contribution are dropped.

What it does: before each layer a small predictor estimates every token's share in the answer. A token is kept if its
share is at least η/n, where η is learned for each layer and n is the number of tokens that the row still has; the first
token is always kept. Training has three phases: fine-tuning; saliency (gradient × input of the gold logit), averaged
over the three best epochs; length training. In length training tokens are dropped softly, by an attention mask that
sharpens (λ) over the stage; predictors learn the saliency of the remaining tokens, weighted by L − l; and a second
optimiser trades the task's loss against length through η and θ alone (θ amplifies the share of the first token).

Modifications (ours, not the paper's or its code's):
- any batch size;
- at run time `scale` multiplies every η, so that one trained model gives a curve: 0 keeps all tokens, 1 is as trained.
  A larger scale drops more tokens in sum; for a single row this is not guaranteed, because states depend on which
  tokens were there. `scales` multiply the η of every layer by a number of its own; calibration searches them;
- η is kept between 0.01 and 1;
- of the epochs of length training that lose at most `slack` on dev rows the fastest is kept;
- λ grows with steps instead of epochs (10 → 1e5 over the first four fifths of the stage, whatever its length);
- length training starts from the fine-tuned model (`start=pretrained` is what the published code does);
- `--init RUN` replaces fine-tuning, and saliency is then that of the one given model;
- thresholds learn twenty times as fast by default (`cut_lr`), because runs here are short;
- the target of a predictor is the saliency of the remaining tokens, renormalised by the soft mask, which is a constant
  there: the predictors' loss changes the mask through the predicted shares alone, not through its own target;
- tasks with an answer per token: a dropped token keeps its last state, and saliency is that of the log-likelihood of
  the answers (for regression, that of the number; with several labels, that of the sum of their logits);
- `train_with_dropping=true` adds a fourth phase, in which the model is trained with tokens really dropped, at a scale
  drawn for every batch up to `largest_scale`, by the labels and (`distillation`) by the logits of the model that length
  training began with; thresholds and predictors are frozen.

Relations: TR-BERT decides at two layers and learns by reinforcement; PoWER-BERT keeps a number of tokens by rank, the
same for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Needs, Policy
from offramp.errors import OfframpError
from offramp.methods._base import LengthMethod
from offramp.nn import row_ops as rows
from offramp.nn.artifacts import load_or_compute
from offramp.nn.batches import Batch, Data
from offramp.nn.keys import PREDICTORS
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.nn.token_scorers import TokenScorer, token_shares
from offramp.training import saliency
from offramp.training.distillation import teacher_logits
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers
from offramp.training.losses import last_exit_loss
from offramp.training.objectives import DroppingStage, Objective
from offramp.training.stage import Backward, ParameterGroups, Stage, cheapest_epoch, rank_epochs

TOKEN_THRESHOLDS = "cuts"  # key of the method's module in Network.added
GRID = (16.0, 8.0, 6.0, 4.0, 3.0, 2.5, 2.0, 1.75, 1.5, 1.25, 1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.2, 0.1)
LARGEST_SCALE = 1000.0  # long before this, a row keeps its first token only
SHARPNESS = (10.0, 1e5)  # λ at the start and at the end of length training
TABLE, PRETRAINED = "saliency.safetensors", "pretrained.safetensors"
BETA = 0.1  # slope of the soft mask above the threshold, times λ
SMALLEST_LOG_PRESENCE = -10_000.0  # of a token that is dropped


@dataclass(frozen=True)
class AdapLeRSettings:
    """What every learned threshold is multiplied by: 0 keeps all tokens, 1 is as trained, more is faster."""

    scale: float = 0.0
    scales: tuple[float, ...] = ()  # one per layer, instead of `scale`

    def __post_init__(self) -> None:
        for value in (self.scale, *self.scales):
            if not 0.0 <= value <= LARGEST_SCALE:
                fix = "use 0 (all tokens are kept), 1 (as trained) or more (faster), e.g. 1.5"
                raise OfframpError("a multiple of the learned thresholds", f"scale={value}", fix)


@dataclass(frozen=True)
class AdapLeROptions:
    """How AdapLeR is trained."""

    gamma: float = 0.1  # weight of the predictors' loss beside the task's
    phi: float = 0.01  # cost of a token in a layer; it is summed over tokens, so long rows need a smaller value
    start: Literal["fine-tuned", "pretrained"] = "fine-tuned"  # the weights that length training starts from
    best: int = 3  # epochs of fine-tuning whose saliency is averaged
    slack: float = 0.05  # how much of the metric may be lost on dev rows; of the epochs within it the fastest is kept
    length_lr: float = 0.0  # learning rate of length training, 0: that of the run
    cut_lr: float = 1e-2  # learning rate of thresholds and amplifiers (published: 5e-4, for twenty times the steps)
    head_lr: float = 5e-4
    train_with_dropping: bool = True  # add a stage that trains with tokens dropped, at scales up to `largest_scale`
    largest_scale: float = 1.5  # use less where a scale of 1 drops nearly all tokens
    distillation: float = 1.0  # weight, in that stage, of the loss against the model before length training

    def __post_init__(self) -> None:
        for name in ("gamma", "phi", "slack", "length_lr", "cut_lr", "largest_scale", "distillation"):
            if not 0.0 <= getattr(self, name) <= LARGEST_SCALE:
                raise OfframpError("options of adapler", f"{name}={getattr(self, name)}", f"use 0 to {LARGEST_SCALE:g}")
        if self.best < 1:
            raise OfframpError("a number of epochs to take saliency from", f"best={self.best}", "use 1 or more")


class TokenThresholds(nn.Module):
    """What the length loss trains: thresholds η, and factors θ that amplify the first token's share above layer 1."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.eta = nn.Parameter(torch.full((depth,), 0.25))
        self.theta = nn.Parameter(torch.ones(depth - 1))


def token_thresholds(network: Network) -> TokenThresholds:
    """Return the thresholds of a network."""
    return cast(TokenThresholds, network.added[TOKEN_THRESHOLDS])


class AdapLeRPolicy(Policy):
    """Drops tokens with a small predicted share before every layer."""

    def __init__(self, network: Network, settings: AdapLeRSettings) -> None:
        if settings.scales and len(settings.scales) != network.depth:
            given, fix = f"{len(settings.scales)}: {settings.scales}", "give one for each layer, or `scale` for all"
            raise OfframpError(f"scales for each of {network.depth} layers", given, fix)
        self.network, self.scales = network, settings.scales or (settings.scale,) * network.depth
        self.eta = token_thresholds(network).eta.detach().clamp(0.01, 1.0)

    def needs(self, layer: int) -> Needs:
        return Needs(before_layer=0 < layer <= len(self.scales) and self.scales[layer - 1] > 0.0)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        scale = self.scales[layer - 1]
        if scale == 0.0:
            return None
        packed = s.packed
        share = token_shares(s.predictor(), packed)
        count = packed.lengths.to(share.device)[packed.row_of_token]
        return (share * count >= scale * self.eta[layer - 1]) | rows.first_tokens(packed)


@dataclass
class SoftTokenMask:
    """The soft counterpart of `AdapLeRPolicy`: an attention bias that grows with depth. One object serves one pass.

    In the limit of a sharp mask it is the run-time rule: a token is kept if its predicted share is at least η/n.
    """

    network: Network
    eta: Tensor  # [layers]
    dummy: Tensor  # [layers − 1], ones that receive the gradient of θ
    sharpness: float
    mask: Tensor = field(init=False)  # [tokens] ≤ 0, the log of each token's presence
    shares: list[Tensor] = field(default_factory=list)  # for each layer [tokens], the log of the predicted share
    masks_before: list[Tensor] = field(default_factory=list)  # for each layer [tokens], the mask before its predictor
    lengths: list[Tensor] = field(default_factory=list)  # for each layer [rows], the remaining tokens

    def update(self, layer: int, states: LayerStates) -> None:
        """Extend the mask by what a layer drops; called once for each layer, in order."""
        packed = states.after(layer - 1)
        if layer == 1:
            self.mask = torch.zeros(packed.total, device=packed.device)
        first = rows.first_tokens(packed)
        logits = self.network.predictor(layer, packed) + self.mask
        if layer > 1:
            logits = logits + first * self.dummy[layer - 2].log()
        share = rows.log_softmax_by_row(logits, packed)
        present = self.mask.exp()
        limit = (self.eta[layer - 1] / rows.sum_by_row(present, packed))[packed.row_of_token]
        change = log_presence_change(share.exp(), limit, self.sharpness) * present
        self.shares.append(share)
        self.masks_before.append(self.mask)
        self.mask = self.mask + change.masked_fill(first, 0.0)
        states.present[layer] = self.mask.exp()
        self.lengths.append(rows.sum_by_row(states.present[layer], packed))

    def gate(self, layer: int, states: LayerStates) -> Tensor | None:
        """Return gates by which dropped tokens keep their state, where every token has an answer."""
        self.update(layer, states)
        return states.present[layer] if self.network.per_token else None

    def predictor_loss(self, saliency: Tensor, theta: Tensor, packed: Packed) -> Tensor:
        """Return Σ (L − l)·KL(saliency of the remaining tokens ‖ predicted shares), averaged over rows."""
        raw, first, losses = saliency.clamp(min=1e-20).log(), rows.first_tokens(packed), []
        for layer, (share, mask) in enumerate(zip(self.shares, self.masks_before, strict=True)):
            target = raw + mask.detach() + (first * theta[layer - 1].log() if layer else 0.0)
            target = rows.log_softmax_by_row(target, packed)
            losses.append((len(self.shares) - layer) * (target.exp() * (target - share)).sum() / packed.count)
        return torch.stack(losses).sum()


def log_presence_change(share: Tensor, limit: Tensor, sharpness: float) -> Tensor:
    """Return what is added to the log of tokens' presence: almost 0 above the limit, steeply falling below it."""
    below = sharpness / limit * (share - limit) - BETA / sharpness
    above = (share - 1.0) * BETA / (sharpness * (1.0 - limit).clamp(min=1e-6))
    return torch.minimum(below, above).clamp(SMALLEST_LOG_PRESENCE, 0.0)


@dataclass
class SaliencyFineTuning(Stage):
    """Phases 1 and 2: ordinary fine-tuning that stores the saliency of its best epochs."""

    options: AdapLeROptions = field(kw_only=True)
    data: Data | None = None
    folder: Path | None = None

    def prepare(self, data: Data, folder: Path) -> None:
        self.data, self.folder = data, folder
        if self.options.start == "pretrained":
            load_or_compute(
                folder / PRETRAINED, lambda: {n: t.detach().clone() for n, t in self.network.hf.state_dict().items()}
            )

    def end_epoch(self, history: Sequence[dict[str, float]]) -> None:
        assert self.data is not None and self.folder is not None
        best = {self._file(epoch) for epoch in rank_epochs(self.network, history)[: self.options.best]}
        for old in set(self.folder.glob("saliency-*.safetensors")) - best:
            old.unlink(missing_ok=True)
        current = self._file(len(history) - 1)
        if current in best:
            current.unlink(missing_ok=True)  # of an attempt that was interrupted
            saliency.token_table(self.network, self.data, current, saliency.saliency)

    def _file(self, epoch: int) -> Path:
        assert self.folder is not None
        return self.folder / f"saliency-{epoch}.safetensors"

    def mean_saliency(self) -> Tensor | None:
        """Return the mean saliency over the best epochs, of all tokens of all rows; None if this stage did not run."""
        paths = sorted(self.folder.glob("saliency-*.safetensors")) if self.folder else []
        return torch.stack([load_file(path)["tokens"] for path in paths]).mean(0) if paths else None


@dataclass
class SoftDroppingStage(Stage):
    """Phase 3: all parameters are trained under the soft token mask; η and θ by a loss and an optimiser of their own.

    Both losses come from one pass. The gradient of the second one is computed first, for η and θ alone, and passed on
    to them by a term that is linear in them; the pass itself uses copies of both, so that the first loss has no
    gradient for them.
    """

    options: AdapLeROptions = field(kw_only=True)
    first: SaliencyFineTuning | None = None
    objective: Objective = last_exit_loss
    saliencies: saliency.TokenTable | None = None
    sharpness: float = SHARPNESS[0]

    needs_reference: ClassVar[bool] = True

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def optimisers(self, lr: float) -> list[ParameterGroups]:
        own = list(token_thresholds(self.network).parameters())
        own_ids, (groups,) = {id(p) for p in own}, super().optimisers(self.options.length_lr or lr)
        body = [{**group, "params": [p for p in group["params"] if id(p) not in own_ids]} for group in groups]
        return [body, [{"params": own, "lr": self.options.cut_lr, "weight_decay": 0.0}]]

    def prepare(self, data: Data, folder: Path) -> None:
        path, before = folder / TABLE, self.first.folder if self.first else None
        if self.options.start == "pretrained" and before is None and not path.is_file():
            asked, given = "length training from the pretrained model", "--init, which brings the fine-tuned one"
            raise OfframpError(asked, given, "leave --init out, or use --set start=fine-tuned")
        mean = self.first.mean_saliency() if self.first else None
        if mean is not None and not path.is_file():
            saliency.write_token_table(path, mean)
        self.saliencies = saliency.token_table(self.network, data, path, saliency.saliency)
        if self.options.train_with_dropping and self.options.distillation > 0.0:
            teacher_logits(self.network, data, folder)  # for the phase after this one
        if self.options.start == "pretrained" and before is not None:
            self.network.hf.load_state_dict(load_file(before / PRETRAINED))

    def set_progress(self, share: float) -> None:
        self.sharpness = SHARPNESS[0] * (SHARPNESS[1] / SHARPNESS[0]) ** min(1.0, share / 0.8)

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        assert self.saliencies is not None, "prepare is called before"
        net, own = self.network, token_thresholds(self.network)
        with torch.no_grad():
            own.eta.clamp_(0.01, 1.0)
            own.theta.clamp_(min=1e-3)
        eta, dummy = own.eta.detach().clone().requires_grad_(), torch.ones_like(own.theta).requires_grad_()
        soft = SoftTokenMask(net, eta, dummy, self.sharpness)
        hooks = ForwardHooks(gate=soft.gate, key_bias=lambda *_: soft.mask)
        states = forward_all_layers(net.encoder, batch.packed, hooks)
        loss = self.objective(net, states, batch)
        length = torch.stack(soft.lengths).sum(0).mean()
        total = loss + self.options.phi * length
        # a model of one layer has no θ, so that its gradient must be materialised
        eta_grad, dummy_grad = torch.autograd.grad(total, (eta, dummy), retain_graph=True, materialize_grads=True)
        linear = (own.eta * eta_grad).sum() + (own.theta * dummy_grad / (own.theta.detach() + 1e-7)).sum()
        predictor_loss = soft.predictor_loss(self.saliencies.for_batch(batch), own.theta.detach(), batch.packed)
        backward(loss + self.options.gamma * predictor_loss + linear)
        return {"loss": loss.detach(), "length": length.detach(), "predictors": predictor_loss.detach()}

    def policy(self) -> Policy:
        return AdapLeRPolicy(self.network, AdapLeRSettings(scale=1.0))

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        return cheapest_epoch(self.network, history, self.reference, self.options.slack)


@dataclass
class RandomScaleStage(DroppingStage):
    """Phase 4, ours: tokens are dropped at a scale drawn for every batch, so that the whole curve is trained."""

    options: AdapLeROptions = field(kw_only=True)

    frozen_prefixes: ClassVar[tuple[str, ...]] = (f"added.{PREDICTORS}.", "added.cuts.")

    def training_policy(self) -> Policy:
        return AdapLeRPolicy(self.network, AdapLeRSettings(self.options.largest_scale * float(torch.rand(()))))

    def policy(self) -> Policy:
        return AdapLeRPolicy(self.network, AdapLeRSettings(scale=1.0))


class AdapLeR(LengthMethod):
    """Tokens are dropped before every layer by their predicted contribution."""

    name = "adapler"
    settings = AdapLeRSettings
    options = AdapLeROptions
    space = ThresholdSpace(
        "scale", full_value=0.0, unit="times the learned thresholds", replay=False, grid=GRID, per_layer="scales"
    )
    needs = frozenset({"example_error"})  # excludes tasks whose answers are a vocabulary
    of_a_task = LengthMethod.of_a_task | {TOKEN_THRESHOLDS}

    def modules(self, network: Network, options: AdapLeROptions) -> nn.ModuleDict:
        predictors = {str(layer): TokenScorer(network.encoder.hidden) for layer in range(1, network.depth + 1)}
        return nn.ModuleDict({PREDICTORS: nn.ModuleDict(predictors), TOKEN_THRESHOLDS: TokenThresholds(network.depth)})

    def policy(self, network: Network, settings: AdapLeRSettings) -> Policy:
        return AdapLeRPolicy(network, settings)

    def stages(self, network: Network, options: AdapLeROptions, objective: Objective | None = None) -> list[Stage]:
        """Return fine-tuning with saliency, length training and, by option, training with dropped tokens."""
        rate, loss = options.head_lr, objective or last_exit_loss
        first = SaliencyFineTuning(network, "fine-tune", rate, fine_tuning=True, options=options)
        length = SoftDroppingStage(network, "length", rate, options=options, first=first, objective=loss)
        dropping = RandomScaleStage(
            network,
            "train with dropping",
            rate,
            objective=loss,
            distillation=options.distillation,
            options=options,
        )
        return [first, length, *([dropping] if options.train_with_dropping else [])]
