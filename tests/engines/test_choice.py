"""Which engine runs, and the message where one cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import offramp
from offramp import backbones, engines
from offramp.engines import EngineOptions
from offramp.engines.openvino import runtime as _runtime
from offramp.errors import OfframpError
from tests import factories


def test_auto_is_openvino_on_a_cpu_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.choose("auto", torch.device("cpu")) == "openvino"
    assert engines.choose("auto", torch.device("cuda")) == "torch"
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert engines.choose("auto", torch.device("cpu")) == "torch"
    assert (
        engines.choose("openvino", torch.device("cpu")) == "openvino"
    )  # an engine given by name is never replaced silently


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _runtime.library.cache_clear()
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(OfframpError, match=r"pip install 'offramp\[openvino\]'"):
        engines.make("openvino", backbones.encoder(factories.hf_model("bert")))


@pytest.mark.parametrize(("how", "word"), [({"precision": "fp8"}, "int8"), ({"threads": 0}, "1 or more")])
def test_bad_settings_name_the_good_ones(how: dict[str, object], word: str) -> None:
    with pytest.raises(OfframpError, match=word):
        EngineOptions(**how)  # type: ignore[arg-type]


def test_torch_has_one_precision_on_a_cpu(trained: Path) -> None:
    with pytest.raises(OfframpError, match="--engine openvino"):
        offramp.load(trained, engine="torch", precision="bf16")


def test_nothing_phones_home() -> None:
    """The sender is absent while OpenVINO is imported, and there again for others afterwards."""
    script = """
import sys
from offramp.engines.openvino import runtime as _runtime
_runtime.library()
from openvino.tools.ovc import telemetry_utils
print(telemetry_utils.tm.__name__, "openvino_telemetry" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["openvino.tools.ovc.telemetry_stub", "False"], done.stderr
