"""Every script under benchmarks/ explains itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [path.relative_to(ROOT) for path in sorted((ROOT / "benchmarks").rglob("*.py"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_script_has_help(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(".".join(script.with_suffix("").parts))
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])
    assert stop.value.code == 0 and f"python {script}" in capsys.readouterr().out
