"""The run folder as a plain Hugging Face model of three padded matrices, with padding and unpadding, for the peers."""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from offramp.evaluation.peers import BenchModel, EncodedBatch, Logits, Padded
from offramp.inference.run_folder import quiet_transformers

EXAMPLE = np.array([[5, 6, 7, 8], [5, 6, 0, 0]])  # two rows, one of them padded: the example that converters trace
PADDED_INPUTS = ("ids", "mask", "types")


class PlainModel(nn.Module):
    """A Hugging Face model with its inputs in a fixed order and one tensor of logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.typed = "token_type_ids" in inspect.signature(model.forward).parameters

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        """Return logits, [rows, outputs] or [rows, longest, outputs]; the two ends of a span are two outputs."""
        more = {"token_type_ids": types} if self.typed else {}
        output = self.model(input_ids=ids, attention_mask=mask, **more)
        ends = "start_logits" in output
        logits: Tensor = torch.stack([output.start_logits, output.end_logits], -1) if ends else output.logits
        return logits


def load_plain_model(model: BenchModel, attention: str | None = None, dtype: torch.dtype = torch.float32) -> PlainModel:
    """Load the run folder with plain transformers; with SDPA if the model has it and no other attention is given."""
    auto = getattr(transformers, model.auto_class)
    with quiet_transformers():
        loaded = auto.from_pretrained(
            model.run, attn_implementation=attention, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    return PlainModel(loaded.eval()).eval()


def padding_token(model: BenchModel) -> int:
    """Return the padding token of a run."""
    return int(transformers.AutoConfig.from_pretrained(model.run).pad_token_id or 0)


def pad_batch(batch: EncodedBatch, padding: int) -> Padded:
    """Pad rows to the length of the longest."""
    longest = max(len(row.ids) for row in batch)
    padded = {
        name: np.full((len(batch), longest), padding if name == "ids" else 0, dtype=np.int64) for name in PADDED_INPUTS
    }
    for number, row in enumerate(batch):
        n = len(row.ids)
        padded["ids"][number, :n], padded["mask"][number, :n], padded["types"][number, :n] = row.ids, 1, row.types
    return padded


def unpad_logits(logits: NDArray[Any], batch: EncodedBatch) -> Logits:
    """Split padded logits into rows; padding is cut off if there are logits for every token."""
    if logits.ndim == 2:
        return list(logits)
    return [part[: len(row.ids)] for part, row in zip(logits, batch, strict=True)]


def padded_tensors(padded: Padded) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded arrays as tensors, without a copy."""
    ids, mask, types = (torch.from_numpy(padded[name]) for name in PADDED_INPUTS)
    return ids, mask, types


def example_inputs(padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs for a converter to trace."""
    mask = (EXAMPLE > 0).astype(np.int64)
    return padded_tensors({"ids": np.where(mask > 0, EXAMPLE, padding), "mask": mask, "types": np.zeros_like(mask)})


@contextmanager
def silence_converters() -> Iterator[None]:
    """Silence the warnings of converters about every shape they trace, and their progress bars.

    Tests compare the logits of what was converted instead.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), quiet_transformers(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
