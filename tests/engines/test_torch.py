"""The torch engine in bfloat16: for CUDA devices, tried here on a CPU by building it by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offramp import backbones, engines
from offramp.core.attention import AttentionOptions, cuda_kernel, layout
from offramp.core.packed import pack
from offramp.engines import EngineOptions
from offramp.engines.torch import TorchEngine
from offramp.errors import OfframpError
from tests import factories
from tests.core.test_attention import places
from tests.core.test_attention_cuda_kernel import kernel

LENGTHS = [3, 9, 1]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_low_precision_is_refused_on_a_cpu(precision: Any) -> None:
    with pytest.raises(OfframpError, match=rf"precision {precision} on cpu(.|\n)*--engine openvino on a CPU"):
        engines.make("torch", backbones.encoder(factories.hf_model("bert")), EngineOptions(precision))


def test_bfloat16_is_taken_on_a_cuda_device() -> None:
    there = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    engine = engines.make("torch", SimpleNamespace(layers=[there]), EngineOptions("bf16"))  # type: ignore[arg-type]  # a device
    assert isinstance(engine, TorchEngine) and engine.half
    with pytest.raises(OfframpError, match="int8 on cuda"):
        engines.make("torch", SimpleNamespace(layers=[there]), EngineOptions("int8"))  # type: ignore[arg-type]  # a device


@pytest.mark.parametrize("backbone", factories.BACKBONES)
def test_half_layers_in_bfloat16_are_near_and_come_back_in_float32(backbone: str) -> None:
    encoder = backbones.encoder(factories.hf_model(backbone))
    exact, half = TorchEngine(encoder), TorchEngine(encoder, half=True)
    torch.manual_seed(0)
    x, where = torch.randn(sum(LENGTHS), encoder.hidden), layout(torch.tensor(LENGTHS), places(LENGTHS))
    with torch.inference_mode():
        for scores in (False, True):
            pair = [engine.attend(1, x, x, where, scores) for engine in (exact, half)]
            outs, scores_pair = zip(*pair, strict=True)
            near(*outs)
            if scores:
                near(scores_pair[0].columns, scores_pair[1].columns)
                near(scores_pair[0].diagonal, scores_pair[1].diagonal)
        near(exact.feed(1, x), half.feed(1, x))
        packed = pack(factories.token_ids(LENGTHS)).with_states(x)
        near(*(engine.run_segment(1, 2, None, packed).states for engine in (exact, half)))  # type: ignore[arg-type]


def near(exact: torch.Tensor, half: torch.Tensor) -> None:
    assert half.dtype == torch.float32 and not torch.equal(exact, half)
    assert torch.allclose(exact, half, atol=0.3)


def test_bfloat16_reaches_the_variable_length_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, calls = backbones.encoder(factories.hf_model("bert")), []
    serves = cuda_kernel.serves

    def as_if_cuda(query: torch.Tensor, plan: AttentionOptions) -> bool:
        calls.append(serves(SimpleNamespace(is_cuda=True, dtype=query.dtype), plan))  # type: ignore[arg-type]  # as on a GPU
        return calls[-1]

    monkeypatch.setattr(cuda_kernel, "varlen_kernel", lambda: kernel)
    monkeypatch.setattr(cuda_kernel, "serves", as_if_cuda)
    torch.manual_seed(0)
    x, where = torch.randn(sum(LENGTHS), encoder.hidden), layout(torch.tensor(LENGTHS), places(LENGTHS))
    with torch.inference_mode():
        exact, half = (TorchEngine(encoder, low).attend(1, x, x, where, False)[0] for low in (False, True))
    assert calls == [False, True]
    near(exact, half)
