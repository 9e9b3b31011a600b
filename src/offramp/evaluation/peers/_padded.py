"""What the peers share: the Hugging Face model as a function of three padded matrices, and the way back to rows."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from offramp.evaluation.peers import BenchModel, EncodedBatch, Logits, Padded
from offramp.inference.run_folder import quiet_transformers

EXAMPLE = np.array([[5, 6, 7, 8], [5, 6, 0, 0]])  # two rows, one of them padded: what converters look at
INPUTS = ("ids", "mask", "types")


class PlainModel(nn.Module):
    """A Hugging Face model with its inputs in a fixed order and one tensor of logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.typed = "token_type_ids" in inspect.signature(model.forward).parameters

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        """Logits, [rows, outputs] or [rows, longest, outputs]; a span's two ends are two outputs."""
        more = {"token_type_ids": types} if self.typed else {}
        made = self.model(input_ids=ids, attention_mask=mask, **more)
        ends = "start_logits" in made
        logits: Tensor = torch.stack([made.start_logits, made.end_logits], -1) if ends else made.logits
        return logits


def load_plain_model(
    ground: BenchModel, attention: str | None = None, dtype: torch.dtype = torch.float32
) -> PlainModel:
    """The run folder as plain transformers opens it: with SDPA where the model has it, unless told otherwise."""
    auto = getattr(transformers, ground.auto_class)
    with quiet_transformers():
        model = auto.from_pretrained(
            ground.run, attn_implementation=attention, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    return PlainModel(model.eval()).eval()


def padding_token(ground: BenchModel) -> int:
    """The token that stands where a row has ended."""
    return int(transformers.AutoConfig.from_pretrained(ground.run).pad_token_id or 0)


def pad_batch(batch: EncodedBatch, blank: int) -> Padded:
    """Rows → rectangles as wide as the longest."""
    wide = max(len(row.ids) for row in batch)
    made = {name: np.full((len(batch), wide), blank if name == "ids" else 0, dtype=np.int64) for name in INPUTS}
    for place, row in enumerate(batch):
        n = len(row.ids)
        made["ids"][place, :n], made["mask"][place, :n], made["types"][place, :n] = row.ids, 1, row.types
    return made


def unpad_logits(logits: NDArray[Any], batch: EncodedBatch) -> Logits:
    """Rectangles → rows, filler left out where every token answers."""
    if logits.ndim == 2:
        return list(logits)
    return [part[: len(row.ids)] for part, row in zip(logits, batch, strict=True)]


def padded_tensors(padded: Padded) -> tuple[Tensor, Tensor, Tensor]:
    """The same as PyTorch takes it, without a copy."""
    ids, mask, types = (torch.from_numpy(padded[name]) for name in INPUTS)
    return ids, mask, types


def example_inputs(blank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs for a converter to trace."""
    mask = (EXAMPLE > 0).astype(np.int64)
    return padded_tensors({"ids": np.where(mask > 0, EXAMPLE, blank), "mask": mask, "types": np.zeros_like(mask)})


@contextmanager
def silence_converters() -> Iterator[None]:
    """Converters warn of every shape they trace; we check their answers instead."""
    told = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), quiet_transformers():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(told)
