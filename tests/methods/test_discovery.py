"""Methods are found by their files: names, instances, pairs, refusals, and settings from text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offramp import methods
from offramp.errors import OfframpError
from offramp.methods import DepthMethod, LengthMethod, PairMethod
from offramp.nn.exit_policies import EntropySettings, WeightedOptions

FOLDER = Path(methods.__path__[0])
METHOD = """
from offramp.core.policy import Policy
from offramp.methods import DepthMethod

class {cls}(DepthMethod):
    name = "{name}"

    def policy(self, network, settings):
        return Policy()
"""


@pytest.fixture
def add_method(tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """Return a function that adds a file to the methods for the time of a test."""
    added: list[str] = []

    def add(name: str, code: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        added.append(name)

    methods.__path__.append(str(tmp_path))
    yield add
    methods.__path__.remove(str(tmp_path))
    for name in added:
        sys.modules.pop(f"offramp.methods.{name}", None)


def test_names_are_the_files_and_packages_of_the_folder() -> None:
    files = {path.stem for path in FOLDER.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert methods.names() == sorted(name for name in files if not name.startswith("_"))


def test_get_refuses_an_unknown_name_and_lists_the_known_ones() -> None:
    for name in ("nosuch", "", "_shared", "_base"):
        with pytest.raises(OfframpError, match="adapler, alberta, attached"):
            methods.get(name)


def test_get_finds_a_file_that_was_added(add_method: Callable[[str, str], None]) -> None:
    add_method("brandnew", METHOD.format(cls="BrandNew", name="brandnew"))
    assert "brandnew" in methods.names() and isinstance(methods.get("brandnew"), DepthMethod)


@pytest.mark.parametrize(
    "code",
    [
        "x = 1\n",
        METHOD.format(cls="Other", name="other"),
        METHOD.format(cls="First", name="broken") + METHOD.format(cls="Second", name="broken"),
    ],
    ids=["no class", "another name", "two classes"],
)
def test_get_refuses_a_file_without_exactly_one_method_of_its_name(
    add_method: Callable[[str, str], None], code: str
) -> None:
    add_method("broken", code)
    with pytest.raises(OfframpError, match="one Method with name='broken'"):
        methods.get("broken")


def test_pair_has_the_parts_of_both_methods() -> None:
    pair = methods.get("power_bert+deebert")
    assert isinstance(pair, PairMethod) and pair.name == "power_bert+deebert"
    assert isinstance(pair.length, LengthMethod) and isinstance(pair.depth, DepthMethod)
    assert pair.needs == pair.length.needs | pair.depth.needs and not pair.hf_equal and not pair.replays


def test_every_pair_names_a_length_method_and_a_depth_method() -> None:
    for name in methods.pairs():
        length, depth = (methods.get(part) for part in name.split("+"))
        assert isinstance(length, LengthMethod) and isinstance(depth, DepthMethod)


def test_configure_converts_text_to_the_types_of_the_fields() -> None:
    settings = methods.configure(EntropySettings, {"threshold": "0.25", "thresholds": "0.1, 0.2"}, "branchynet")
    assert settings == EntropySettings(threshold=0.25, thresholds=(0.1, 0.2))
    options = methods.configure(WeightedOptions, {"mixed": "yes", "weights": "uniform"}, "branchynet")
    assert options.mixed is True and options.weights == "uniform"


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"treshold": "0.1"}, "known settings: threshold"),
        ({"threshold": "much"}, "float, like 0.0"),
        ({"thresholds": "a,b"}, "list of numbers"),
    ],
)
def test_configure_refuses_unknown_names_and_wrong_values(values: dict[str, str], match: str) -> None:
    with pytest.raises(OfframpError, match=match):
        methods.configure(EntropySettings, values, "branchynet")


def test_configure_refuses_a_choice_that_is_not_listed() -> None:
    with pytest.raises(OfframpError, match="use one of: index, uniform"):
        methods.configure(WeightedOptions, {"weights": "random"}, "branchynet")
