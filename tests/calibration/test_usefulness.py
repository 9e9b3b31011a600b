"""Points that mean nothing are left out or announced, and the full model is used instead."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from offramp.calibration.usefulness import keep_useful_points
from offramp.commands.calibrate import calibrate
from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.inference.operating_points import OperatingPoint, OperatingPoints, load_points
from offramp.tasks.classification import ClassificationTask
from tests import factories

TASK = ClassificationTask(("bad", "good"))
ROWS = [{"text": str(i), "label": "good" if i % 10 < 6 else "bad"} for i in range(100)]  # 60 % good


def points(*pairs: tuple[float, float]) -> OperatingPoints:
    listed = tuple(OperatingPoint({"threshold": share}, share, score, 6 * share) for share, score in pairs)
    return OperatingPoints("accuracy", True, {"name": "dev", "rows": 100, "fingerprint": "0"}, listed)


def test_points_near_or_below_the_majority_class_are_left_out() -> None:
    kept = keep_useful_points(points((0.1, 0.48), (0.2, 0.62), (0.5, 0.9), (1.0, 0.94)), TASK, ROWS)
    assert [point.mac_share for point in kept.points] == [0.5, 1.0] and kept.trusted


def test_a_budget_below_the_cheapest_useful_point_names_its_cost_and_score() -> None:
    kept = keep_useful_points(points((0.1, 0.48), (0.5, 0.9), (1.0, 0.94)), TASK, ROWS)
    with pytest.warns(UserWarning, match=r"0\.1.*0\.500 of the full compute.*accuracy 0\.9000"):
        assert kept.choose(Budget.share(0.1)).mac_share == 0.5


def test_a_model_that_gives_the_majority_label_falls_back_to_the_full_model() -> None:
    kept = keep_useful_points(points((0.0, 0.6), (1.0, 0.6)), TASK, ROWS)
    assert not kept.trusted and "most frequent answer" in kept.warnings[0]
    assert kept.choose(Budget.default()).mac_share == 1.0
    with pytest.warns(UserWarning, match="full model"):
        assert kept.choose(Budget.loss(0.1)).mac_share == 1.0


def test_eight_rows_are_announced_and_the_default_is_the_full_model() -> None:
    rows = [{"text": str(i), "label": "good" if i % 2 else "bad"} for i in range(8)]
    kept = keep_useful_points(points((0.1, 1.0), (1.0, 1.0)), TASK, rows)
    assert kept.choose(Budget.default()).mac_share == 1.0 and "8 rows" in kept.warnings[0]
    assert kept.choose(Budget.share(0.5)).mac_share == 0.1, "a budget keeps its meaning"


@pytest.mark.parametrize("other_rows", [0, 10])
def test_training_announces_dev_rows_that_are_training_rows(base: str, tmp_path: Path, other_rows: int) -> None:
    from offramp.commands.train import train

    rows = [{"text": f"a film {i % 7} {'good' if i % 2 else 'bad'} {i}", "label": str(i % 2)} for i in range(60)]
    others = [{"text": f"the man {i}", "label": str(i % 2)} for i in range(other_rows)]
    train_file = factories.write_jsonl(tmp_path / "train.jsonl", rows)
    dev_file = factories.write_jsonl(tmp_path / "dev.jsonl", [*rows[:30], *others])
    with pytest.warns(UserWarning, match="trained on"):
        run = train(
            model=base, train=train_file, dev=dev_file, out=tmp_path / "run", method="branchynet", epochs=1, lr=0.005
        )
    assert not run.points.trusted and run.points.choose().mac_share == pytest.approx(1.0)
    with pytest.warns(UserWarning, match="trained on"):
        again = calibrate(tmp_path / "run", dev_file)
    assert not again.trusted and not load_points(tmp_path / "run").trusted


def test_calibrate_refuses_far_fewer_rows_unless_forced(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    before = (run / "points.json").read_text().replace('"trusted": false', '"trusted": true')
    (run / "points.json").write_text(before)
    one = factories.write_jsonl(tmp_path / "one.jsonl", factories.labelled_rows("classification", 1, 9))
    with pytest.raises(OfframpError, match=r"1 rows(.|\n)*24 rows(.|\n)*--force"):
        calibrate(run, one)
    assert (run / "points.json").read_text() == before
    with pytest.warns(UserWarning):
        assert calibrate(run, one, force=True).data["rows"] == 1
