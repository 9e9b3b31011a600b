"""Which engine runs, and the message where one cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import offramp
from offramp import backbones, engines
from offramp.engines import EngineOptions, native
from offramp.engines.openvino import runtime as _runtime
from offramp.errors import OfframpError
from tests import factories


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let only these packages look installed."""
    monkeypatch.setattr(engines, "find_spec", lambda name: name if name in packages else None)


def test_auto_is_the_fastest_engine_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "import_native", lambda: None)
    for packages, expected in (
        (("offramp_native", "openvino"), "native"),
        (("offramp_native",), "native"),
        (("openvino",), "openvino"),
        ((), "torch"),
    ):
        install(monkeypatch, *packages)
        assert engines.choose("auto", torch.device("cpu")) == expected
        assert engines.choose("auto", torch.device("cuda")) == "torch"


def test_auto_passes_over_a_native_package_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    native.import_native.cache_clear()
    monkeypatch.setitem(sys.modules, "offramp_native", None)
    install(monkeypatch, "offramp_native", "openvino")
    engine, reason = engines.explain_choice("auto", torch.device("cpu"))
    assert engine == "openvino" and "offramp-native" in reason


def test_the_choice_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    engine, reason = engines.explain_choice("auto", torch.device("cpu"))
    assert engine == "torch" and "offramp-native" in reason and "openvino" in reason


def test_an_engine_given_by_name_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert (
        engines.choose("openvino", torch.device("cpu")) == "openvino"
    )  # an engine given by name is never replaced silently


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _runtime.import_openvino.cache_clear()
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(OfframpError, match=r"pip install 'offramp\[openvino\]'"):
        engines.make("openvino", backbones.encoder(factories.hf_model("bert")))


@pytest.mark.parametrize(
    ("how", "word"), [({"precision": "fp8"}, "int8"), ({"threads": 0}, "1 or more"), ({"threads": "2"}, "threads='2'")]
)
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
_runtime.import_openvino()
from openvino.tools.ovc import telemetry_utils
print(telemetry_utils.tm.__name__, "openvino_telemetry" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["openvino.tools.ovc.telemetry_stub", "False"], done.stderr
