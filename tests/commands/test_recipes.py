"""Recipes: every file fits its method, holds the published numbers, and options win over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from offramp import cli, methods, tasks
from offramp.commands import recipes
from offramp.commands.recipes import Recipe
from offramp.errors import OfframpError
from offramp.training.schedule import Schedule
from tests import factories


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_every_recipe_fits_its_method(name: str) -> None:
    recipe = recipes.load_recipe(name)
    method = methods.get(recipe.method)
    assert name.startswith(recipe.method + "/")
    options = methods.configure(method.options, dict(recipe.options), method.name)
    for key, value in recipe.options.items():
        assert getattr(options, key) == value and type(getattr(options, key)) is type(value), key
    assert method.serves(tasks.get(recipe.task))
    Schedule(recipe.epochs, recipe.batch_size, recipe.lr, recipe.warmup, recipe.weight_decay)


def test_recipes_hold_the_published_numbers() -> None:
    agnews, imdb = recipes.load_recipe("adapler/agnews"), recipes.load_recipe("adapler/imdb")
    assert (agnews.options["gamma"], agnews.options["phi"], agnews.epochs, agnews.max_length) == (0.1, 0.1, 5, 128)
    assert (imdb.options["gamma"], imdb.options["phi"], imdb.batch_size, imdb.max_length) == (5e-3, 5e-4, 16, 512)
    assert imdb.lr == 2e-5 and imdb.options["length_lr"] == 3e-5
    yelp = recipes.load_recipe("tr_bert/yelp_full")
    assert (yelp.options["alpha"], yelp.options["alpha_both"]) == (2.0, 0.5)


def test_override_wins_over_the_recipe() -> None:
    recipe = recipes.load_recipe("adapler/agnews").override({"epochs": 2}, {"phi": "0.5"})
    assert (recipe.epochs, recipe.lr, recipe.options["phi"], recipe.options["gamma"]) == (2, 2e-5, "0.5", 0.1)
    pair = recipes.load_recipe("adapler/agnews").override({"method": "adapler+branchynet"}, {})
    assert pair.method == "adapler+branchynet"
    with pytest.raises(OfframpError, match="leave --method out"):
        recipes.load_recipe("adapler/agnews").override({"method": "full"}, {})


def test_override_drops_the_head_lr_for_a_pair() -> None:
    recipe = recipes.load_recipe("adapler/agnews")
    alone, pair = recipe.override({}, {}), recipe.override({"method": "adapler+branchynet"}, {})
    assert alone.options == {**pair.options, "head_lr": 3e-5} and "head_lr" not in pair.options
    given = recipe.override({"method": "adapler+branchynet"}, {"head_lr": "1e-4"})
    assert given.options["head_lr"] == "1e-4"


def test_tr_bert_recipes_have_one_learning_rate() -> None:
    for name in recipes.recipe_names():
        recipe = recipes.load_recipe(name)
        if recipe.method == "tr_bert":
            assert recipe.lr == recipe.options["head_lr"] == recipe.options["select_lr"], name


def test_load_recipe_refuses_unknown_names_with_the_known_ones() -> None:
    with pytest.raises(OfframpError, match=r"adapler/agnews.*adapler/sst2"):
        recipes.load_recipe("adapler/nothing")
    with pytest.raises(OfframpError, match=r"adapler/.*tr_bert/"):
        recipes.load_recipe("../secret")


def test_parse_recipe_refuses_unknown_entries() -> None:
    recipe = recipes.parse_recipe("epochs: 2\noptions: {phi: 0.1}\n", "adapler")
    assert recipe == Recipe("adapler", epochs=2, options={"phi": 0.1})
    with pytest.raises(OfframpError, match="speed"):
        recipes.parse_recipe("speed: 3\n", "adapler")


def test_train_command_takes_recipe_values_unless_options_are_given(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own recipe.yaml holds the recipe's values, except for options that were given."""
    train = factories.write_jsonl(tmp_path / "train.jsonl", factories.labelled_rows("classification", 24))
    words = ["train", "--recipe", "deebert/glue", "--model", base, "--train", train, "--out", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", ["offramp", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--epochs", "1", "--batch-size", "12", "--set", "pool=mean"])
    assert not stop.value.code
    used = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert used["method"] == "deebert" and used["max_length"] == 128
    assert used["options"] == {"pool": "mean", "exit0": False, "head_lr": 2e-5}
    assert (used["schedule"]["epochs"], used["schedule"]["batch_size"], used["schedule"]["lr"]) == (1, 12, 2e-5)
