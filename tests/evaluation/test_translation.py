"""What the translation experiments measure, on a model that has learned to copy."""

from __future__ import annotations

from pathlib import Path

import pytest

import offramp
from offramp.errors import OfframpError
from offramp.evaluation import translation as study
from tests import speaking


def test_exits_trade_off_oracles_and_pictures(spoken: Path, tmp_path: Path) -> None:
    model = offramp.load(spoken)
    data = study.prepared(model, speaking.rows(20, seed=4), "rows")
    table = study.by_exit(model, data)
    assert set(table["bleu"]) == {"1", "2", "3"} and table["bleu"]["3"] > 90 and table["uniform"] > 50
    spots = study.trade_off(model, data)
    assert spots[-1]["average_exit"] == 3.0 and spots[-1]["mac_share"] == 1.0
    assert all(1.0 <= spot["average_exit"] <= 3.0 and 0 < spot["mac_share"] <= 1.1 for spot in spots)
    study.draw({"geometric": spots}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    found = study.oracle_depths(model, data, (0.0, 0.3, 5.0), (0.0, 2.0))
    words = [one["exit"] for one in found if (one["oracle"], one["of"], one["sigma"]) == ("likelihood", "words", 0.0)]
    assert words == sorted(words, reverse=True) and words[-1] == 1.0 < words[0], "a dearer block, an earlier exit"
    assert len(found) == 2 * 3 * 3


def test_speed_and_words(spoken: Path) -> None:
    model = offramp.load(spoken)
    data = study.prepared(model, speaking.rows(6, seed=4), "rows")
    settings = {"full": model.settings(1.0), "one block": model.settings(given={"depth": 1})}
    made = study.speed(model, data, settings, (1, 3), rounds=1)
    assert [(row["setting"], row["batch_size"], row["average_exit"]) for row in made["rows"]] == [
        ("full", 1, 3.0),
        ("one block", 1, 1.0),
        ("full", 3, 3.0),
        ("one block", 3, 1.0),
    ]
    assert made["rows"][0]["speed_up"] == 1.0 and made["rows"][0]["words_per_second"] > 0
    shown = study.exits_over_words(model, ["a b c"], settings["one block"]).splitlines()
    assert shown[0].strip() == "a b c" and shown[1].split()[:3] == ["1", "1", "1"]
    assert shown[2].split() == ["a", "b", "c"]


def test_other_models_are_refused(trained: Path) -> None:
    with pytest.raises(OfframpError, match="a run for classification"):
        study.prepared(offramp.load(trained), [{"src": "a", "tgt": "b"}], "rows")
