"""Recipes: every file is understood by its method, the published numbers stand in them, flags win."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from offramp import cli, methods, tasks
from offramp.commands import recipes
from offramp.commands.recipes import Recipe
from offramp.errors import OfframpError
from offramp.training.schedule import Schedule
from tests import runs


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_one_its_method_understands(name: str) -> None:
    made = recipes.load(name)
    method = methods.get(made.method)
    assert name.startswith(made.method + "/")
    options = methods.configure(method.options, dict(made.options), method.name)
    for key, value in made.options.items():
        assert getattr(options, key) == value and type(getattr(options, key)) is type(value), key
    assert method.needs <= tasks.get(made.task).provides
    Schedule(made.epochs, made.batch_size, made.lr, made.warmup, made.weight_decay)


def test_the_published_numbers() -> None:
    agnews, imdb = recipes.load("adapler/agnews"), recipes.load("adapler/imdb")
    assert (agnews.options["gamma"], agnews.options["phi"], agnews.epochs, agnews.max_length) == (0.1, 0.1, 5, 128)
    assert (imdb.options["gamma"], imdb.options["phi"], imdb.batch_size, imdb.max_length) == (5e-3, 5e-4, 16, 512)
    assert imdb.lr == 2e-5 and imdb.options["length_lr"] == 3e-5
    yelp = recipes.load("tr_bert/yelp_full")
    assert (yelp.options["alpha"], yelp.options["alpha_both"]) == (2.0, 0.5)


def test_what_is_said_wins_over_the_recipe() -> None:
    made = recipes.load("adapler/agnews").override({"epochs": 2}, {"phi": "0.5"})
    assert (made.epochs, made.lr, made.options["phi"], made.options["gamma"]) == (2, 2e-5, "0.5", 0.1)
    assert recipes.load("adapler/agnews").override({"method": "adapler+branchynet"}, {}).method == "adapler+branchynet"
    with pytest.raises(OfframpError, match="leave --method out"):
        recipes.load("adapler/agnews").override({"method": "full"}, {})


def test_a_pair_keeps_its_own_rate_for_what_is_added() -> None:
    recipe = recipes.load("adapler/agnews")
    alone, pair = recipe.override({}, {}), recipe.override({"method": "adapler+branchynet"}, {})
    assert alone.options == {**pair.options, "head_lr": 3e-5} and "head_lr" not in pair.options
    said = recipe.override({"method": "adapler+branchynet"}, {"head_lr": "1e-4"})
    assert said.options["head_lr"] == "1e-4"


def test_tr_bert_has_one_rate() -> None:
    for name in recipes.names():
        made = recipes.load(name)
        if made.method == "tr_bert":
            assert made.lr == made.options["head_lr"] == made.options["select_lr"], name


def test_an_unknown_recipe_lists_what_there_is() -> None:
    with pytest.raises(OfframpError, match=r"adapler/agnews.*adapler/sst2"):
        recipes.load("adapler/nothing")
    with pytest.raises(OfframpError, match=r"adapler/.*tr_bert/"):
        recipes.load("../secret")


def test_a_recipe_with_unknown_entries_is_refused() -> None:
    made = recipes.parse("epochs: 2\noptions: {phi: 0.1}\n", "adapler")
    assert made == Recipe("adapler", epochs=2, options={"phi": 0.1})
    with pytest.raises(OfframpError, match="speed"):
        recipes.parse("speed: 3\n", "adapler")


def test_train_by_recipe(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own recipe.yaml tells what was used: the recipe's values, but for flags that were typed."""
    train = runs.jsonl(tmp_path / "train.jsonl", runs.rows("classification", 24))
    words = ["train", "--recipe", "deebert/glue", "--model", base, "--train", train, "--out", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", ["offramp", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--epochs", "1", "--batch-size", "12", "--set", "pool=mean"])
    assert not stop.value.code
    used = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert used["method"] == "deebert" and used["max_length"] == 128
    assert used["options"] == {"pool": "mean", "exit0": False, "head_lr": 2e-5}
    assert (used["schedule"]["epochs"], used["schedule"]["batch_size"], used["schedule"]["lr"]) == (1, 12, 2e-5)
