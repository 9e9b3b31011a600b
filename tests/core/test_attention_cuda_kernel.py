"""Variable-length attention by a kernel: when it is used, and with which inputs; a CPU function replaces CUDA's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.core.attention import AttentionOptions, attend, cuda_kernel, layout
from tests.core.test_attention import HEADS, WIDTH, places

Q, K = [2, 0, 5, 1], [3, 4, 5, 1]  # queries and keys of four rows


def kernel(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, *longest: int, num_splits: int) -> Tensor:
    """What torch's kernel promises, one row at a time."""
    assert starts.dtype == ends.dtype == torch.int32 and num_splits == 1
    counts = starts.diff().tolist(), ends.diff().tolist()
    assert longest == (max(counts[0]), max(counts[1]))
    parts = zip(q.split(counts[0]), k.split(counts[1]), v.split(counts[1]), strict=True)
    blocks = [[x.transpose(0, 1) for x in part] for part in parts]  # [heads, tokens, width]
    return torch.cat([F.scaled_dot_product_attention(*block).transpose(0, 1) for block in blocks])


def query(dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> Any:
    return SimpleNamespace(dtype=dtype, is_cuda=is_cuda)


def test_cuda_kernel_serves_half_precision_on_cuda_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernel, "varlen_kernel", lambda: kernel)
    assert cuda_kernel.serves(query(), AttentionOptions(HEADS)) and cuda_kernel.serves(
        query(torch.float16), AttentionOptions(HEADS)
    )
    assert not cuda_kernel.serves(query(torch.float32), AttentionOptions(HEADS)) and not cuda_kernel.serves(
        query(is_cuda=False), AttentionOptions(HEADS)
    )
    bias = torch.zeros(3)
    for more in ({"scores": True}, {"dropout": 0.1}, {"window": 3}, {"key_bias": bias}, {"relative": bias}):
        assert not cuda_kernel.serves(query(), AttentionOptions(HEADS, **more))
    monkeypatch.setattr(cuda_kernel, "varlen_kernel", lambda: None)
    assert not cuda_kernel.serves(query(), AttentionOptions(HEADS))


def test_cuda_kernel_equals_rectangles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernel, "varlen_kernel", lambda: kernel)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(sum(Q), WIDTH), torch.randn(2, sum(K), WIDTH)
    where = layout(torch.tensor(K), places(K), torch.tensor(Q), places(Q))
    usual, _ = attend(q, k, v, where, AttentionOptions(HEADS))
    monkeypatch.setattr(cuda_kernel, "serves", lambda query, plan: True)
    for _ in range(2):  # offsets are worked out once
        found, scores = attend(q, k, v, where, AttentionOptions(HEADS))
        assert scores is None and torch.allclose(found, usual, atol=1e-5)
