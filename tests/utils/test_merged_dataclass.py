"""Merged dataclasses: names, defaults, checks, and splitting them again."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pytest

from offramp import methods
from offramp.errors import OfframpError
from offramp.utils.merged_dataclass import merge_dataclasses


@dataclass(frozen=True)
class One:
    rate: float = 1.0
    lengths: tuple[float, ...] = ()


@dataclass(frozen=True)
class Two:
    rate: float = 2.0
    name: str = "two"

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise OfframpError("a rate", "less than nothing", "more")


def test_fields_of_one_name_get_their_label_unless_shared() -> None:
    merged = merge_dataclasses("Merged", ("one", One), ("two", Two), shared=False)
    assert asdict(merged.kind()) == {"one_rate": 1.0, "lengths": (), "two_rate": 2.0, "name": "two"}
    assert merged.split(merged.kind(one_rate=5.0, lengths=(0.5,))) == (One(5.0, (0.5,)), Two())
    assert merged.join({"rate": 3.0}, {"rate": 4.0, "name": "x"}) == {"one_rate": 3.0, "two_rate": 4.0, "name": "x"}
    assert merged.part(1, {"one_rate": 3.0, "two_rate": 4.0}) == {"rate": 4.0}


def test_shared_fields_have_one_value_and_the_second_default() -> None:
    merged = merge_dataclasses("Merged", ("one", One), ("two", Two), shared=True)
    assert asdict(merged.kind()) == {"rate": 2.0, "lengths": (), "name": "two"}
    assert merged.split(merged.kind(rate=7.0)) == (One(7.0), Two(7.0))


def test_parts_check_their_values_and_values_may_be_text() -> None:
    merged = merge_dataclasses("Merged", ("one", One), ("two", Two), shared=True)
    with pytest.raises(OfframpError, match="less than nothing"):
        merged.kind(rate=-1.0)
    assert methods.configure(merged.kind, {"lengths": "0.5,0.25", "rate": "3"}, "merged").lengths == (0.5, 0.25)


def test_settings_of_a_pair_keep_plain_names_where_they_are_unique() -> None:
    pair = methods.get("length_adaptive+branchynet")
    assert set(asdict(pair.settings())) == {"lengths", "threshold", "thresholds", "temperatures"}
    assert pair.options().head_lr == methods.get("branchynet").options().head_lr
