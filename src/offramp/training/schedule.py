"""Epochs, batch size, learning rate and precision of training, the same for every stage of a method."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.errors import OfframpError

PRECISIONS = ("auto", "bf16", "fp32")
# Stages after fine-tuning see the same rows again, and on small sets a lower rate kept the full model better. A stage
# may have another share; where most tokens are dropped, the full rate is better (docs/papers/adapler.md).
LATER_LR_SHARE = 0.3
LARGEST_SEED = 2**32 - 1  # that every generator of random numbers takes


@dataclass(frozen=True)
class Schedule:
    """The values that a user may choose; invalid ones raise an error."""

    epochs: int = 3
    batch_size: int = 32
    lr: float = 5e-5
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 42
    precision: str = "auto"  # auto, bf16 or fp32
    later_lr: float = 0.0  # in stages that follow plain fine-tuning; 0: the stage's share of lr
    embedding_lr: float = 0.0  # of embedding tables; 0: that of the other pretrained parameters
    save_seconds: float = 120.0
    snapshots: int = 0  # how many times in each stage the weights are kept beside the run

    def __post_init__(self) -> None:
        for name, valid, fix in (
            ("epochs", self.epochs >= 1, "1 or more"),
            ("batch_size", self.batch_size >= 1, "1 or more"),
            ("lr", 0.0 < self.lr < 1.0, "a number above 0 and below 1, e.g. 5e-5"),
            ("later_lr", 0.0 <= self.later_lr < 1.0, "0 (a share of --lr) up to below 1, e.g. 2e-5"),
            ("embedding_lr", 0.0 <= self.embedding_lr < 1.0, "0 (as the others) up to below 1, e.g. 2e-3"),
            ("seed", isinstance(self.seed, int) and 0 <= self.seed <= LARGEST_SEED, f"0 to {LARGEST_SEED}"),
            ("snapshots", self.snapshots >= 0, "0 (none) or more, e.g. 4: after every quarter of a stage"),
            ("precision", self.precision in PRECISIONS, f"one of: {', '.join(PRECISIONS)}"),
        ):
            if not valid:
                given = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise OfframpError("a training schedule", given, f"give {fix}")

    def lr_of(self, follows_fine_tuning: bool, later_share: float = LATER_LR_SHARE) -> float:
        """Return the learning rate of the pretrained part in a stage."""
        return (self.later_lr or later_share * self.lr) if follows_fine_tuning else self.lr

    def keeps_snapshot(self, epoch: int) -> bool:
        """Return whether the weights after this epoch (from 0) are kept: the first that ends one of equal parts."""
        return (epoch + 1) * self.snapshots // self.epochs > epoch * self.snapshots // self.epochs

    def rate(self, step: int, total: int) -> float:
        """Return the factor of the learning rate at a step: linear warm-up, then linear decay to zero."""
        warm = max(1, int(self.warmup * total))
        return (step + 1) / warm if step < warm else max(0.0, (total - step) / max(1, total - warm))
