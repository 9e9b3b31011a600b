"""AdapLeR (Modarressi et al. 2022): before every layer, tokens that contribute too little leave.

What it does: a small predictor per layer estimates each token's share in the answer. A token goes on if its share is
at least η/n, η learned for each layer and n the row's tokens left; the first token never leaves. Three phases:
fine-tune; saliency (gradient × input of the gold logit) averaged over the three best epochs; length training, in which
tokens fade by a soft mask that sharpens (λ) over the whole stage, predictors learn the saliency of the tokens left,
weighted by L − l, and a second optimiser trades the task's loss for length through η and θ (how much the first token's
share is amplified) alone.
`scale` multiplies every η at run time, so that one trained model gives a curve; 0 lets everybody stay, 1 is as trained.
The dearer setting is not provably dearer for each single row (states change with who was there), only in sum.
Modifications from the paper and its code: any batch size; λ grows by steps, not epochs (10 → 1e5 over the first four
fifths of the stage, whatever its length); length training starts from the fine-tuned model (`start=pretrained` is the
published code's way); `--init RUN` replaces phase 1, and saliency is then that one model's; thresholds learn twenty
times as fast by default (`cut_lr`), because runs here are short; per-token tasks work: a token that left keeps its last
state (saliency is then that of the answers' log-likelihood, for regression that of the number).
Extension, off by default: `settle=true` adds a fourth phase, in which the model learns with tokens really gone, at a
scale drawn anew for every batch up to `reach`; thresholds and predictors rest. A run sees no soft tokens.
Relations: TR-BERT decides at two layers by reinforcement; PoWER-BERT by ranks, with one count for all rows.
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
from offramp.nn.network import Network
from offramp.nn.setting_space import ThresholdSpace
from offramp.nn.token_scorers import TokenScorer, token_shares
from offramp.training import saliency
from offramp.training.forward import ForwardHooks, LayerStates, forward_all_layers
from offramp.training.losses import last_exit_loss
from offramp.training.objectives import DroppingStage, Objective
from offramp.training.stage import Backward, ParameterGroups, Stage, cheapest_epoch, rank_epochs

GRID = (16.0, 8.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25, 0.1)
MOST = 1000.0  # times the learned thresholds: nobody is left long before
SHARP = (10.0, 1e5)  # λ at the start and at the end
TABLE, PRETRAINED = "saliency.safetensors", "pretrained.safetensors"
BETA = 0.1  # slope of the soft mask above the threshold, times λ
FAINTEST = -10_000.0


@dataclass(frozen=True)
class AdapLeRSettings:
    """Every learned threshold is multiplied by this: 0 lets nobody leave, 1 is as trained, more is faster."""

    scale: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.scale <= MOST:
            fix = "use 0 (nobody leaves), 1 (as trained) or more (faster), e.g. 1.5"
            raise OfframpError("a multiple of the learned thresholds", f"scale={self.scale}", fix)


@dataclass(frozen=True)
class AdapLeROptions:
    """How it is trained."""

    gamma: float = 0.05  # how much predictors count beside the task
    phi: float = 0.01  # how much a token in a layer costs; it adds up over tokens, so long rows want less
    start: Literal["fine-tuned", "pretrained"] = "fine-tuned"  # where length training begins
    best: int = 3  # epochs of phase 1 whose saliency is averaged
    slack: float = 0.01  # what the metric may lose on dev rows; the fastest epoch within it is kept
    length_lr: float = 0.0  # learning rate of length training, 0: that of the run
    cut_lr: float = 1e-2  # learning rate of thresholds and amplifiers (published: 5e-4, for twenty times the steps)
    head_lr: float = 5e-4
    settle: bool = False  # whether the model then learns with tokens gone, at scales up to the next
    reach: float = 1.5  # less where a scale of 1 leaves next to nobody

    def __post_init__(self) -> None:
        for name in ("gamma", "phi", "slack", "length_lr", "cut_lr", "reach"):
            if not 0.0 <= getattr(self, name) <= MOST:
                raise OfframpError("options of adapler", f"{name}={getattr(self, name)}", f"use 0 to {MOST:g}")
        if self.best < 1:
            raise OfframpError("a number of epochs to take saliency from", f"best={self.best}", "use 1 or more")


class Cuts(nn.Module):
    """What the length loss moves: thresholds, and how much the first token's share is amplified above layer 1."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.eta = nn.Parameter(torch.full((depth,), 0.25))
        self.theta = nn.Parameter(torch.ones(depth - 1))


def cuts(network: Network) -> Cuts:
    """The thresholds in a network."""
    return cast(Cuts, network.added["cuts"])


class AdapLeRPolicy(Policy):
    """Drops what contributes too little, before every layer."""

    def __init__(self, network: Network, settings: AdapLeRSettings) -> None:
        self.network, self.scale = network, settings.scale
        self.eta = cuts(network).eta.detach().clamp(0.01, 1.0)

    def needs(self, layer: int) -> Needs:
        return Needs(before_layer=self.scale > 0.0)

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        if self.scale == 0.0:
            return None
        packed = s.packed
        share = token_shares(s.predictor(), packed)
        count = packed.lengths.to(share.device)[packed.row_of_token]
        return (share * count >= self.scale * self.eta[layer - 1]) | rows.first_tokens(packed)


@dataclass
class Fading:
    """The soft counterpart of `Policy`: an additive attention mask that grows with depth. One object a pass."""

    network: Network
    eta: Tensor  # [layers]
    dummy: Tensor  # [layers − 1], ones: takes the gradient of the amplifiers
    sharpness: float
    mask: Tensor = field(init=False)  # [tokens] ≤ 0, log of how present a token is
    shares: list[Tensor] = field(default_factory=list)  # log of the predicted share, a layer each
    before: list[Tensor] = field(default_factory=list)  # the mask that each layer's predictor found
    lengths: list[Tensor] = field(default_factory=list)  # [rows] tokens left in each layer

    def enter(self, layer: int, made: LayerStates) -> Tensor:
        """The attention mask of a layer, called once a layer and in order."""  # [tokens]
        packed = made.after(layer - 1)
        if layer == 1:
            self.mask = torch.zeros(packed.total, device=packed.device)
        first = rows.first_tokens(packed)
        logits = self.network.predictor(layer, packed) + self.mask
        if layer > 1:
            logits = logits + first * self.dummy[layer - 2].log()
        share = rows.log_softmax_by_row(logits, packed)
        present = self.mask.exp()
        limit = (self.eta[layer - 1] / rows.sum_by_row(present, packed))[packed.row_of_token]
        edit = fade(share.exp(), limit, self.sharpness) * present
        self.shares.append(share)
        self.before.append(self.mask)
        self.mask = self.mask + edit.masked_fill(first, 0.0)
        made.present[layer] = self.mask.exp()
        self.lengths.append(rows.sum_by_row(made.present[layer], packed))
        return self.mask

    def gate(self, layer: int, made: LayerStates) -> Tensor | None:
        """Where every token has an answer, those that left keep their state."""
        self.enter(layer, made)
        return made.present[layer] if self.network.per_token else None

    def predictor_loss(self, saliency: Tensor, theta: Tensor, packed: Packed) -> Tensor:
        """Σ (L − l)·KL(saliency of the tokens left ‖ predicted shares), averaged over rows."""
        raw, first, losses = saliency.clamp(min=1e-20).log(), rows.first_tokens(packed), []
        for layer, (share, mask) in enumerate(zip(self.shares, self.before, strict=True)):
            wanted = raw + mask.detach() + (first * theta[layer - 1].log() if layer else 0.0)
            wanted = rows.log_softmax_by_row(wanted, packed)
            losses.append((len(self.shares) - layer) * (wanted.exp() * (wanted - share)).sum() / packed.count)
        return torch.stack(losses).sum()


def fade(share: Tensor, limit: Tensor, sharpness: float) -> Tensor:
    """What is added to the log-presence of tokens: next to nothing above the limit, steeply falling below it."""
    below = sharpness / limit * (share - limit) - BETA / sharpness
    above = (share - 1.0) * BETA / (sharpness * (1.0 - limit).clamp(min=1e-6))
    return torch.minimum(below, above).clamp(FAINTEST, 0.0)


@dataclass
class FineTune(Stage):
    """Phase 1 (and 2): ordinary fine-tuning that leaves behind the saliency of its best epochs."""

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
        here = self._file(len(history) - 1)
        if here in best:
            here.unlink(missing_ok=True)  # of an attempt that was killed here
            saliency.token_table(self.network, self.data, here, saliency.saliency)

    def _file(self, epoch: int) -> Path:
        assert self.folder is not None
        return self.folder / f"saliency-{epoch}.safetensors"

    def averaged(self) -> Tensor | None:
        """The mean saliency over the best epochs, all tokens in a row; None if this stage did not run."""
        kept = sorted(self.folder.glob("saliency-*.safetensors")) if self.folder else []
        return torch.stack([load_file(path)["tokens"] for path in kept]).mean(0) if kept else None


@dataclass
class LengthTraining(Stage):
    """Phase 3: everything learns while tokens fade; thresholds and amplifiers by a loss and an optimiser of their own.

    Both losses come from one pass. The second one's gradient is taken first, for thresholds and amplifiers alone, and
    then carried to them by a term that is linear in them; the pass itself sees copies, so the first loss cannot.
    """

    options: AdapLeROptions = field(kw_only=True)
    first: FineTune | None = None
    objective: Objective = last_exit_loss
    taught: saliency.TokenTable | None = None
    sharpness: float = SHARP[0]

    needs_reference: ClassVar[bool] = True

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def optimisers(self, lr: float) -> list[ParameterGroups]:
        own = list(cuts(self.network).parameters())
        mine, (groups,) = {id(p) for p in own}, super().optimisers(self.options.length_lr or lr)
        body = [{**group, "params": [p for p in group["params"] if id(p) not in mine]} for group in groups]
        return [body, [{"params": own, "lr": self.options.cut_lr, "weight_decay": 0.0}]]

    def prepare(self, data: Data, folder: Path) -> None:
        path, before = folder / TABLE, self.first.folder if self.first else None
        if self.options.start == "pretrained" and before is None and not path.is_file():
            asked, given = "length training from the pretrained model", "--init, which brings the fine-tuned one"
            raise OfframpError(asked, given, "leave --init out, or use --set start=fine-tuned")
        averaged = self.first.averaged() if self.first else None
        if averaged is not None and not path.is_file():
            saliency.write_token_table(path, averaged)
        self.taught = saliency.token_table(self.network, data, path, saliency.saliency)
        if self.options.start == "pretrained" and before is not None:
            self.network.hf.load_state_dict(load_file(before / PRETRAINED))

    def set_progress(self, share: float) -> None:
        self.sharpness = SHARP[0] * (SHARP[1] / SHARP[0]) ** min(1.0, share / 0.8)

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        assert self.taught is not None, "prepare comes first"
        net, own = self.network, cuts(self.network)
        with torch.no_grad():
            own.eta.clamp_(0.01, 1.0)
            own.theta.clamp_(min=1e-3)
        eta, dummy = own.eta.detach().clone().requires_grad_(), torch.ones_like(own.theta).requires_grad_()
        fading = Fading(net, eta, dummy, self.sharpness)
        made = forward_all_layers(
            net.encoder, batch.packed, ForwardHooks(gate=fading.gate, key_bias=lambda *_: fading.mask)
        )
        loss = self.objective(net, made, batch)
        length = torch.stack(fading.lengths).sum(0).mean()
        aim = loss + self.options.phi * length  # where there is one layer only, nobody is amplified: materialize
        for_eta, for_dummy = torch.autograd.grad(aim, (eta, dummy), retain_graph=True, materialize_grads=True)
        carried = (own.eta * for_eta).sum() + (own.theta * for_dummy / (own.theta.detach() + 1e-7)).sum()
        shape = fading.predictor_loss(self.taught.for_batch(batch), own.theta.detach(), batch.packed)
        backward(loss + self.options.gamma * shape + carried)
        return {"loss": loss.detach(), "length": length.detach(), "predictors": shape.detach()}

    def policy(self) -> Policy:
        return AdapLeRPolicy(self.network, AdapLeRSettings(scale=1.0))

    def best_epoch(self, history: Sequence[dict[str, float]]) -> int:
        return cheapest_epoch(self.network, history, self.reference, self.options.slack)


@dataclass
class Settle(DroppingStage):
    """Phase 4, ours: a scale for every batch, so that the whole curve is learned."""

    reach: float = field(kw_only=True)

    frozen_prefixes: ClassVar[tuple[str, ...]] = ("added.predictors.", "added.cuts.")

    def training_policy(self) -> Policy:
        return AdapLeRPolicy(self.network, AdapLeRSettings(self.reach * float(torch.rand(()))))

    def policy(self) -> Policy:
        return AdapLeRPolicy(self.network, AdapLeRSettings(scale=1.0))


class AdapLeR(LengthMethod):
    """Tokens leave before every layer by their predicted contribution."""

    name = "adapler"
    settings = AdapLeRSettings
    options = AdapLeROptions
    space = ThresholdSpace("scale", full_value=0.0, unit="times the learned thresholds", replay=False, grid=GRID)
    needs = frozenset({"example_error"})  # answers of its own, not a vocabulary

    def modules(self, network: Network, options: AdapLeROptions) -> nn.ModuleDict:
        """A contribution predictor before every layer, and the thresholds."""
        predictors = {str(layer): TokenScorer(network.encoder.hidden) for layer in range(1, network.depth + 1)}
        return nn.ModuleDict({"predictors": nn.ModuleDict(predictors), "cuts": Cuts(network.depth)})

    def policy(self, network: Network, settings: AdapLeRSettings) -> Policy:
        return AdapLeRPolicy(network, settings)

    def stages(self, network: Network, options: AdapLeROptions, objective: Objective | None = None) -> list[Stage]:
        """Fine-tune (keeping saliency), then length training, in which `objective` may replace the loss."""
        rate, aim = options.head_lr, objective or last_exit_loss
        first = FineTune(network, "fine-tune", rate, fine_tuning=True, options=options)
        length = LengthTraining(network, "length", rate, options=options, first=first, objective=aim)
        last = Settle(network, "settle", rate, objective=aim, reach=options.reach)
        return [first, length, *([last] if options.settle else [])]
