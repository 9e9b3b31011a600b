"""The one error class says all three things, wherever it travels."""

from __future__ import annotations

import pickle

from offramp.errors import OfframpError, need


def test_it_says_what_was_asked_what_was_given_and_the_way_out() -> None:
    error = OfframpError("read a.csv", "no such file", "check the path")
    assert (error.asked, error.given, error.fix) == ("read a.csv", "no such file", "check the path")
    assert all(part in str(error) for part in error.args)


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(need("data", "pyarrow")))
    assert isinstance(error, OfframpError) and error.fix == "pip install 'offramp[data]'" and error.asked in str(error)
