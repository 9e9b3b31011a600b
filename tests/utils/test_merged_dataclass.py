"""Two configurations as one: names, defaults, checks, and the way back."""

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


def test_equal_names_are_told_apart_by_their_label() -> None:
    both = merge_dataclasses("Both", ("one", One), ("two", Two), shared=False)
    assert asdict(both.kind()) == {"one_rate": 1.0, "lengths": (), "two_rate": 2.0, "name": "two"}
    assert both.split(both.kind(one_rate=5.0, lengths=(0.5,))) == (One(5.0, (0.5,)), Two())
    assert both.join({"rate": 3.0}, {"rate": 4.0, "name": "x"}) == {"one_rate": 3.0, "two_rate": 4.0, "name": "x"}
    assert both.part(1, {"one_rate": 3.0, "two_rate": 4.0}) == {"rate": 4.0}


def test_shared_names_have_one_value_and_the_second_default() -> None:
    both = merge_dataclasses("Both", ("one", One), ("two", Two), shared=True)
    assert asdict(both.kind()) == {"rate": 2.0, "lengths": (), "name": "two"}
    assert both.split(both.kind(rate=7.0)) == (One(7.0), Two(7.0))


def test_parts_check_themselves_and_values_may_be_text() -> None:
    both = merge_dataclasses("Both", ("one", One), ("two", Two), shared=True)
    with pytest.raises(OfframpError, match="less than nothing"):
        both.kind(rate=-1.0)
    assert methods.configure(both.kind, {"lengths": "0.5,0.25", "rate": "3"}, "both").lengths == (0.5, 0.25)


def test_a_pair_shows_plain_names() -> None:
    pair = methods.get("length_adaptive+branchynet")
    assert set(asdict(pair.settings())) == {"lengths", "threshold", "thresholds", "temperatures"}
    assert pair.options().head_lr == methods.get("branchynet").options().head_lr
