"""The prior N(0, η·I) of each layer: its variance η as a number, from the layer's inputs, or by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eigenoise import checks
from eigenoise.layers.assignment import is_below
from eigenoise.layers.matrix_layer import BareParameter, MatrixLayer

PriorVar = float | str | Mapping[str, float]

FAN_IN = "fan-in"
GAIN = 2.0
WITHOUT_INPUTS = 0.01  # η of parameters that multiply no inputs
MIN_PRIOR_VAR = 1e-20  # below, variances vanish in float32


def check_prior_var(value: Any) -> None:
    """Require a positive number, ``"fan-in"``, or positive numbers by name.

    Raises:
        TypeError, ValueError: if it is something else.
    """
    if isinstance(value, str):
        if value != FAN_IN:
            raise ValueError(f"prior_var must be a number, {FAN_IN!r} or numbers by name, got {value!r}")
    elif isinstance(value, Mapping):
        for name, variance in value.items():
            checks.number(f"prior_var[{name!r}]", variance, low=MIN_PRIOR_VAR)
    else:
        checks.number("prior_var", value, low=MIN_PRIOR_VAR)


def check_prior_names(value: PriorVar, layers: Iterable[MatrixLayer | BareParameter]) -> None:
    """Require that every name of a mapping is a layer of the model or has one below it.

    Raises:
        ValueError: if one is not.
    """
    if isinstance(value, Mapping):
        names = [layer.name for layer in layers]
        for name in value:
            if not any(is_below(layer, name) for layer in names):
                raise ValueError(
                    f"prior_var names {name!r}, but the model has no trainable layer there; it has "
                    f"{', '.join(map(repr, names))}"
                )


def prior_variance(value: PriorVar, layer: MatrixLayer | BareParameter) -> float:
    """η of one layer.

    Args:
        value: a number is the variance of every layer. ``"fan-in"`` is 2/n for a matrix with n inputs, so that signals
            keep their scale through layers with ReLU (He et al. 2015), and 0.01 for what has none: embeddings, the
            scales and shifts of norms, recurrent layers. A mapping gives a module's or parameter's name, and everything
            below it, a variance of its own; the longest name counts, and layers without one have ``"fan-in"``.
        layer: the layer.
    """
    if isinstance(value, Mapping):
        names = [name for name in value if is_below(layer.name, name)]
        if names:
            return float(value[max(names, key=len)])
        value = FAN_IN
    if isinstance(value, str):
        return WITHOUT_INPUTS if layer.fan_in is None else GAIN / layer.fan_in
    return float(value)
