"""Data sets of the `datasets` library, against a stand-in for it: no test needs the network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from offramp.data.readers import read_rows
from offramp.errors import OfframpError


def refusal(source: str) -> str:
    with pytest.raises(OfframpError) as caught:
        read_rows(source)
    return str(caught.value)


class FakeDatasets(ModuleType):
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
        data.features = features  # type: ignore[attr-defined]  # a list that stands for a data set
        return data


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDatasets:
    module = FakeDatasets("datasets")
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setitem(
        sys.modules, "datasets.exceptions", SimpleNamespace(DatasetNotFoundError=FakeDatasets.DatasetNotFoundError)
    )
    monkeypatch.chdir(tmp_path)
    return module


@pytest.mark.parametrize(
    ("source", "loaded"),
    [
        ("glue/sst2:validation", "glue sst2 validation"),
        ("glue/sst2", "glue sst2 train"),
        ("owner/imdb:test[:10%]", "owner/imdb None test[:10%]"),
        ("conll:train", "conll None train"),
    ],
)
def test_read_rows_loads_data_sets_by_name_config_and_split(hub: FakeDatasets, source: str, loaded: str) -> None:
    assert read_rows(source, columns={"text": "sentence"}) == [{"text": loaded, "tags": ["O", "B-PER"]}]


def test_data_sets_that_do_not_load_and_paths_that_are_no_names_are_refused(hub: FakeDatasets, tmp_path: Path) -> None:
    assert "Couldn't reach the Hub" in refusal("unreachable:train")
    assert "NAME/CONFIG:SPLIT" in refusal("glue/cola")
    (tmp_path / "data").mkdir()
    for path in ("data/train", "train.csv", "./glue", "/glue", "train.xml"):
        assert "datasets" not in refusal(path)


def test_a_missing_datasets_library_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'offramp[data]'" in refusal("glue/sst2:validation")
