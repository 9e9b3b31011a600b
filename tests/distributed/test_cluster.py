"""Connecting to Ray: what is missing, unreachable or of another version is named, with the way out."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from offramp.distributed import cluster
from offramp.distributed.cluster import connected, library
from offramp.errors import OfframpError


def fake_ray(error: Exception) -> Any:
    """Return a Ray that is not connected and whose `init` fails."""

    def init(**_: Any) -> None:
        raise error

    return SimpleNamespace(is_initialized=lambda: False, init=init)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OfframpError) as raised:
        library()
    assert raised.value.fix.startswith("pip install 'offramp[ray]'")


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:9"])  # port 9: nothing listens there
def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    absent = ConnectionError("Could not find any running Ray instance.\nmore")
    monkeypatch.setattr(cluster, "library", lambda: fake_ray(absent))
    with pytest.raises(OfframpError) as raised, connected(address):
        pass
    assert address in raised.value.asked and "ray start --head" in raised.value.fix


def test_another_version_of_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mismatch = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1.0\n    Python: 3.10.1")
    monkeypatch.setattr(cluster, "library", lambda: fake_ray(mismatch))
    with pytest.raises(OfframpError) as raised, connected():
        pass
    assert "Ray: 2.1.0" in raised.value.given
