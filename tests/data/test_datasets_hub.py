"""Names of the `datasets` library, against a stand-in for it: no test needs the network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from offramp.data.readers import read_rows
from offramp.errors import OfframpError


def refused(source: str) -> str:
    with pytest.raises(OfframpError) as caught:
        read_rows(source)
    return str(caught.value)


class Hub(ModuleType):
    """A stand-in for `datasets` that knows two data sets."""

    class ClassLabel:
        names = ("O", "B-PER")

        def int2str(self, index: int) -> str:
            return self.names[index]

    class List:
        def __init__(self, feature: object) -> None:
            self.feature = feature

    class DatasetNotFoundError(FileNotFoundError):
        pass

    def load_dataset(self, name: str, config: str | None = None, split: str = "") -> Any:
        if name == "unreachable":
            raise ConnectionError("Couldn't reach the Hub")
        if (name, config) not in [("glue", "sst2"), ("owner/imdb", None), ("conll", None)]:
            raise self.DatasetNotFoundError(f"no {name} {config}")
        rows = [{"sentence": f"{name} {config} {split}", "tags": [0, 1]}]
        features = {"sentence": object(), "tags": self.List(self.ClassLabel())}

        class Data(list[dict[str, Any]]):
            pass

        data = Data(rows)
        data.features = features  # type: ignore[attr-defined]  # a list that plays a data set
        return data


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    made = Hub("datasets")
    monkeypatch.setitem(sys.modules, "datasets", made)
    monkeypatch.setitem(
        sys.modules, "datasets.exceptions", SimpleNamespace(DatasetNotFoundError=Hub.DatasetNotFoundError)
    )
    monkeypatch.chdir(tmp_path)
    return made


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("glue/sst2:validation", "glue sst2 validation"),
        ("glue/sst2", "glue sst2 train"),
        ("owner/imdb:test[:10%]", "owner/imdb None test[:10%]"),
        ("conll:train", "conll None train"),
    ],
)
def test_names_of_datasets(hub: Hub, source: str, asked: str) -> None:
    assert read_rows(source, columns={"text": "sentence"}) == [{"text": asked, "tags": ["O", "B-PER"]}]


def test_a_dataset_that_does_not_load(hub: Hub, tmp_path: Path) -> None:
    assert "Couldn't reach the Hub" in refused("unreachable:train")
    assert "NAME/CONFIG:SPLIT" in refused("glue/cola")
    (tmp_path / "data").mkdir()
    for path in ("data/train", "train.csv", "./glue", "/glue", "train.xml"):
        assert "datasets" not in refused(path)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'offramp[data]'" in refused("glue/sst2:validation")
