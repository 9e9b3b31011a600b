"""One Ray node with two processors for all tests of this folder; starting actors is what takes time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offramp.distributed.cluster import connected
from tests import factories


@pytest.fixture(scope="session")
def ray_node() -> Iterator[Any]:
    """Ray, connected to a node of its own."""
    with connected("local", cpus=2) as ray:
        yield ray


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of 100 rows with ids and labels; rows 7 and 60 have no text, line 31 is no JSON. Read only."""
    rows = [{"id": i, **row} for i, row in enumerate(factories.labelled_rows("classification", 100, 5))]
    rows[7]["text"], rows[60]["text"] = "", None
    path = tmp_path_factory.mktemp("texts") / "in.jsonl"
    lines = Path(factories.write_jsonl(path, rows)).read_text().splitlines()
    lines[31] = '{"id": 31, "text": '
    path.write_text("\n".join(lines) + "\n")
    return path
