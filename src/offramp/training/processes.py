"""Several processes that train together (accelerate launch, torchrun): which is the main one, and waiting for all.

What one process may do alone (learning a tokenizer, attaching exits) can take longer than the minutes after which a
collective operation of the default group gives up, so waiting has a group of its own.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from accelerate import PartialState

LONGEST_WAIT = timedelta(days=7)


def is_main_process() -> bool:
    """Return whether this process writes files; alone it always does."""
    return int(os.environ.get("RANK", "0")) == 0


def wait_for_everyone() -> None:
    """Wait until every process has come here; alone, go on."""
    if PartialState(cpu=not torch.cuda.is_available()).num_processes > 1:
        torch.distributed.barrier(torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT))
