"""`OfframpError` carries what was asked, what was given and how to fix it, also between processes."""

from __future__ import annotations

import pickle

from offramp.errors import OfframpError, missing_package


def test_the_message_has_all_three_parts() -> None:
    error = OfframpError("read a.csv", "no such file", "check the path")
    assert (error.asked, error.given, error.fix) == ("read a.csv", "no such file", "check the path")
    assert all(part in str(error) for part in error.args)


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(missing_package("data", "pyarrow")))
    assert (
        isinstance(error, OfframpError)
        and error.fix.startswith("pip install 'offramp[data]'")
        and error.asked in str(error)
    )
