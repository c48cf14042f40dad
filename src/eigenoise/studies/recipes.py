"""Settings of both studies and the paper's numbers, from the JSON files in ``settings``."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any

from eigenoise import checks
from eigenoise.optim.methods import BAYESIAN, POINT

REFERENCE = "noisy-ekfac"  # the method that others are compared with
_NATURAL = {*POINT, *BAYESIAN} - {"bbb"}
_GROUPS = ("all", "natural", "sgd", *POINT, *BAYESIAN)

Layer = Mapping[str, Mapping[str, Any]]  # optimiser arguments by group of methods


@functools.cache
def load(name: str) -> dict[str, Any]:
    """Reads ``settings/<name>.json``."""
    file = resources.files("eigenoise.studies") / "settings" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def arguments(layers: list[Layer], method: str) -> dict[str, Any]:
    """Merges what ``layers`` say to all methods, to natural-gradient methods and to this one; later values win."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for group in layer:
            checks.choice("group of optimiser arguments", group, _GROUPS)
        merged |= layer.get("all", {})
        merged |= layer.get("natural", {}) if method in _NATURAL else {}
        merged |= layer.get(method, {})
    return merged


# Regression.


@dataclass(frozen=True)
class Recipe:
    """How one method trains and is tested on one UCI set; hidden units and batch size belong to the set.

    Attributes:
        epochs: passes over the training part; rates are multiplied by ``decay`` in the second half.
        decay: factor on the learning rate and on the rates of moving averages.
        test_samples: weight samples of the predictive distribution.
        noise: arguments of the Gaussian likelihood.
        optimizer: arguments of the optimiser.
        input_noise: whether a second output predicts the noise, instead of one precision for all inputs.
        noise_scale: factor on the predictive noise standard deviation, chosen on validation rows.
    """

    epochs: int
    decay: float
    test_samples: int
    noise: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    input_noise: bool = False
    noise_scale: float = 1.0

    def __post_init__(self) -> None:
        checks.integer("epochs", self.epochs)
        checks.integer("test_samples", self.test_samples)
        checks.number("decay", self.decay, open_low=True)
        checks.number("noise_scale", self.noise_scale, open_low=True)


def _preset(name: str) -> tuple[dict[str, Any], list[Layer]]:
    """Returns a preset merged with its base, and the layers of optimiser arguments of both."""
    presets = load("regression")["presets"]
    preset = presets[name]
    if "base" not in preset:
        return preset, [preset["optimizer"]]
    base = presets[preset["base"]]
    return {**base, **preset}, [base["optimizer"], preset["optimizer"]]


def _recipe(
    preset: str, set_name: str, method: str, choice: Mapping[str, Any], *extra: Layer, noise_scale: float = 1.0
) -> Recipe:
    """Merges a preset, what it says about the set, ``extra`` layers and ``choice``."""
    settings, layers = _preset(preset)
    per_set = settings.get("sets", {}).get(set_name, {})
    layers = [*layers, per_set.get("optimizer", {}), *extra]
    return Recipe(
        epochs=per_set.get("epochs", settings.get("epochs")),
        **load("regression")["common"],
        noise={key: tuple(value) if isinstance(value, list) else value for key, value in settings["noise"].items()},
        optimizer={**arguments(layers, method), **choice},
        noise_scale=noise_scale,
    )


def best_recipe(
    set_name: str,
    method: str,
    *,
    kl_weight: float,
    damping_form: str | None = None,
    lr: float | None = None,
    noise_scale: float = 1.0,
    as_paper: bool = False,
) -> Recipe:
    """Builds the preset ``best`` from what is chosen for a set and method.

    Args:
        set_name: name of a UCI set.
        method: one of ``BAYESIAN``.
        kl_weight: λ.
        damping_form: ``"exact"`` or ``"factored"``; None for a method without a structured Fisher.
        lr: learning rate; None for the set's.
        noise_scale: see ``Recipe``.
        as_paper: whether to start from the paper's settings, with cheaper samples and statistics and fewer epochs.
    """
    choice = {"kl_weight": kl_weight} if lr is None else {"kl_weight": kl_weight, "lr": lr}
    extra = [] if damping_form is None else [load("regression")["damping_forms"][damping_form]]
    preset = "as-paper" if as_paper else "best"
    return _recipe(preset, set_name, method, choice, *extra, noise_scale=noise_scale)


@dataclass(frozen=True)
class Preset:
    """Recipes for all sets and methods under one name.

    Attributes:
        name: name of the preset.
        canonical: whether it uses the canonical splits rather than random ones by seed.
    """

    name: str
    canonical: bool

    def recipe(self, set_name: str, method: str) -> Recipe:
        """Returns the recipe of a set and a method."""
        if self.name == "best":
            return best_recipe(set_name, method, **load("regression")["chosen"][set_name][method])
        return _recipe(self.name, set_name, method, {})


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {name: Preset(name, _preset(name)[0]["canonical"]) for name in ("best", "paper", "elbo")}
)
DEMO = Preset("demo", canonical=False)


# Classification.


@dataclass(frozen=True)
class Setting:
    """A column of the paper's Table 2."""

    augmented: bool
    batch_norm: bool

    @property
    def name(self) -> str:
        """``"plain"``, ``"D"`` (data augmentation), ``"B"`` (batch norm) or ``"D+B"``."""
        return "+".join(["D"] * self.augmented + ["B"] * self.batch_norm) or "plain"


SETTINGS = tuple(Setting(augmented, batch_norm) for batch_norm in (False, True) for augmented in (False, True))


def classification_recipe(method: str, setting: Setting, train_size: int | None = None) -> dict[str, Any]:
    """Returns the optimiser's arguments of a method in a setting.

    λ grows with the number of images, up to 1, so that λ/N, the scale of the covariance, stays as it was chosen.

    Args:
        method: name of a method.
        setting: a column of Table 2.
        train_size: number of training images; None for the number that settings were chosen with.
    """
    settings = load("classification")
    chosen = settings["chosen"][settings["chosen_for"].get(method, method)][setting.name]
    grown = chosen["kl_weight"] * (train_size or settings["tuned_on"]) / settings["tuned_on"]
    return {**chosen, "kl_weight": min(1.0, grown), **arguments([settings["optimizer"]], method)}
