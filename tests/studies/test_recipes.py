"""Settings from JSON: every set and method has them, they are checked, and what is wrong is named."""

from __future__ import annotations

import itertools

import pytest

import eigenoise as en
from eigenoise.optim.methods import BAYESIAN
from eigenoise.studies import recipes
from eigenoise.studies.classification.training import METHODS
from eigenoise.studies.data import uci
from eigenoise.studies.recipes import DEMO, PRESETS, SETTINGS, Recipe, arguments, classification_recipe, load

ALL = [(preset, name, method) for preset in (*PRESETS.values(), DEMO) for name in uci.SETS for method in BAYESIAN]


@pytest.mark.parametrize(("preset", "name", "method"), ALL, ids=lambda value: getattr(value, "name", value))
def test_every_recipe_makes_an_optimiser(preset, name, method):
    recipe = preset.recipe(name, method)
    likelihood = en.GaussianLikelihood(stack=2, **recipe.noise)
    BAYESIAN[method](en.models.MLP(3, [4], 1, stack=2), num_data=9, likelihood=likelihood, **recipe.optimizer)


@pytest.mark.parametrize(
    ("method", "setting"), list(itertools.product(METHODS, SETTINGS)), ids=lambda v: getattr(v, "name", v)
)
def test_every_classification_recipe_makes_an_optimiser(method, setting):
    model, options = en.models.MLP(3, [4], 2), classification_recipe(method, setting)
    METHODS[method](model, num_data=9, likelihood=en.CategoricalLikelihood(), **options)


def test_settings_are_of_known_sets_and_methods():
    chosen = load("regression")["chosen"]
    assert set(chosen) == set(uci.SETS)
    assert all(set(row) == set(BAYESIAN) for row in chosen.values())
    for preset in load("regression")["presets"].values():
        assert set(preset.get("sets", uci.SETS)) == set(uci.SETS)
    classification = load("classification")
    assert set(classification["chosen"]) | set(classification["chosen_for"]) == set(METHODS)
    assert all(list(row) == [setting.name for setting in SETTINGS] for row in classification["chosen"].values())


def test_later_layers_win_and_unknown_groups_are_refused():
    layers = [{"all": {"lr": 1.0}, "natural": {"momentum": 0.9}}, {"bbb": {"lr": 2.0}, "noisy-adam": {"momentum": 0.5}}]
    assert arguments(layers, "bbb") == {"lr": 2.0}
    assert arguments(layers, "noisy-adam") == {"lr": 1.0, "momentum": 0.5}
    assert arguments(layers, "kfac") == {"lr": 1.0, "momentum": 0.9}
    with pytest.raises(ValueError, match=r"group of optimiser arguments must be one of .*'noisy-sgd'"):
        arguments([{"noisy-sgd": {}}], "bbb")


def test_recipes_that_cannot_be_are_refused():
    good = {"epochs": 1, "decay": 0.1, "test_samples": 1, "noise": {}, "optimizer": {}}
    for bad in ({"epochs": 0}, {"test_samples": 0}, {"decay": 0.0}, {"noise_scale": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Recipe(**{**good, **bad})


def test_settings_are_read_once():
    assert recipes.load("published") is recipes.load("published")
