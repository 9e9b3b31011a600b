"""benchmarks/papers/alberta.py: texts without those of other splits, and the study end to end without repeated work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.papers import alberta

from tests.factories import labelled_rows, write_jsonl

TINY = [
    "--vocabulary", "120", "--epochs", "1", "--batch-size", "8", "--ablation-rows", "20",
    "--shape", "hidden_size=32", "--shape", "embedding_size=16", "--shape", "intermediate_size=32",
    "--shape", "num_hidden_layers=4", "--shape", "num_hidden_groups=2",
]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with three data sets."""
    folder = tmp_path / "data"
    kinds = (("mrpc", "classification", "train"), ("conll2003", "tagging", "train"))
    for name, kind, split in (*kinds, ("sst2", "classification", "train_sentences")):
        (folder / name).mkdir(parents=True)
        write_jsonl(folder / name / f"{split}.jsonl", labelled_rows(kind, 40))
        write_jsonl(folder / name / "dev.jsonl", labelled_rows(kind, 24, 1))
    return folder


def test_texts_are_cut_and_those_of_other_splits_left_out(tmp_path: Path) -> None:
    for name in ("news", "folds"):
        (tmp_path / name).mkdir()
    long = " ".join(f"w{number}" for number in range(100))
    rows = [{"text": long}, {"text": long.upper()}, {"text": "one two three four five six"}, {"text": "short"}]
    write_jsonl(tmp_path / "news" / "train.jsonl", [*rows, {"text": "A tested text of six words!"}])
    write_jsonl(tmp_path / "news" / "dev.jsonl", [{"text": "a tested text of six words"}])
    folds = [{"text": f"the row of fold number {fold}", "fold": fold} for fold in range(4)]
    write_jsonl(tmp_path / "folds" / "all.jsonl", folds)
    alberta.main(["text", str(tmp_path), "--out", str(tmp_path / "out")])
    lines = (tmp_path / "out" / "text.jsonl").read_text().splitlines()
    found = sorted(json.loads(line)["text"] for line in lines)
    assert found == sorted(
        [
            " ".join(f"w{number}" for number in range(50)),
            " ".join(f"w{number}" for number in range(50, 100)),
            "one two three four five six",
            "the row of fold number 2",
            "the row of fold number 3",
        ]
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # too few rows to choose settings on
def test_study_pretrains_fine_tunes_and_repeats_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "study"), *TINY]
    alberta.main(["text", str(data), *out])
    alberta.main(["pretrain", str(data), *out])
    alberta.main(["cells", str(data), *out, "--only", "conll2003"])
    alberta.main(["rates", str(data), *out, "--only", "rates-0.0003"])
    alberta.main(["ablation", str(data), *out, "--only", "conll2003-no-relative"])
    alberta.main(["ablation", str(data), *out, "--only", "conll2003-no-gates"])
    cells = {path.stem for path in (tmp_path / "study" / "cells").iterdir()}
    expected = {"conll2003-gated", "conll2003-plain", "conll2003-untrained"}
    expected |= {"ablation-conll2003-no-relative", "ablation-conll2003-no-gates"}
    assert cells == {"pretrained-joint", "sst2-rates-0.0003-0.0003", *expected}
    table = tmp_path / "table.json"
    capsys.readouterr()
    alberta.main(["cells", str(data), *out, "--only", "conll2003"])
    assert not capsys.readouterr().out, "nothing is left to do"
    picture = tmp_path / "curves.png"
    written = ["--json", str(table), "--results", str(tmp_path / "results"), "--png", str(picture)]
    alberta.main(["table", str(data), *out, *written])
    assert picture.read_bytes().startswith(b"\x89PNG")
    files = {str(path.relative_to(tmp_path / "results")) for path in (tmp_path / "results").rglob("*.json")}
    folders = {"gated": "alberta", "plain": "full", "untrained": "alberta"}
    names = {f"conll2003/{method}/own-backbone/{kind}-alberta4x32-s42.json" for kind, method in folders.items()}
    assert files == names
    found = json.loads(table.read_text())["cells"]
    assert found["pretrained-joint"]["loss_curve"] and found["conll2003-gated"]["max_loss 0.01"]["exit_histogram"]
    assert found["conll2003-gated"]["full"]["curve"]
    assert found["conll2003-gated"]["full"]["metrics"].keys() >= {"entity_f1"}
    assert len(capsys.readouterr().out.splitlines()) == 7
