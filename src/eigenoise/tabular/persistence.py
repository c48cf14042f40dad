"""Save and load fitted estimators as one safetensors file, which holds no code."""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Any

import numpy as np
import torch

from eigenoise import checks
from eigenoise.inference.posterior import Posterior
from eigenoise.tabular.calibration import NUM_STEPS, Calibration
from eigenoise.tabular.classifier import BayesianMLPClassifier
from eigenoise.tabular.model_selection import Selection
from eigenoise.tabular.network import Candidate, TrainingConfig
from eigenoise.tabular.regressor import BayesianMLPRegressor
from eigenoise.tabular.rows import Scale

FORMAT_VERSION = 2
ESTIMATORS = {kind.__name__: kind for kind in (BayesianMLPRegressor, BayesianMLPClassifier)}

Estimator = BayesianMLPRegressor | BayesianMLPClassifier


def save(estimator: Estimator, path: str | os.PathLike, notes: Any = None) -> None:
    """Write one safetensors file, atomically.

    Args:
        estimator: the fitted estimator.
        path: the file to write.
        notes: any JSON value to save with it.
    """
    arguments = {name: _plain(value) for name, value in estimator.get_params().items()}
    if not isinstance(arguments["random_state"], (int, type(None))):
        arguments["random_state"] = None  # a generator cannot be saved
    arguments["hidden_layer_sizes"] = list(estimator.check_arguments())
    names = getattr(estimator, "feature_names_in_", None)
    selection = estimator.selection_
    content: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "kind": type(estimator).__name__,
        "arguments": arguments,
        "plan": dataclasses.asdict(estimator.config_),
        "x_scale": _scale_to_json(estimator.x_scale_),
        "choice": {
            "candidate": dataclasses.asdict(selection.candidate),
            "epochs": selection.epochs,
            "noise": selection.noise.tolist(),
            "levels": selection.calibration.levels.tolist(),
        },
        "spectra": estimator.spectra_,
        "columns": None if names is None else [str(name) for name in names],
        "held_out": None if np.isnan(selection.log_likelihood) else selection.log_likelihood,
    }
    if isinstance(estimator, BayesianMLPRegressor):
        content |= {"y_scale": _scale_to_json(estimator.y_scale_), "one_target": estimator.one_target_}
    else:
        content["classes"] = [_plain(label) for label in estimator.classes_]
        if not all(isinstance(label, (str, int, float)) for label in content["classes"]):
            raise TypeError(f"classes must be strings or numbers to be saved, got {content['classes'][0]!r}")
    q = estimator.posterior_
    Posterior(q.entries, q.rest, q.likelihood, {"estimator": content, "notes": notes}).save(path)


def load(path: str | os.PathLike) -> tuple[Estimator, Any]:
    """Return the estimator in a file and the notes saved with it.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged or not a saved estimator.
    """
    posterior = Posterior.load(path)
    try:
        content = posterior.notes["estimator"]
        if content["format"] != FORMAT_VERSION:
            raise ValueError(f"its format is {content['format']!r}, this version reads {FORMAT_VERSION}")
        estimator = ESTIMATORS[checks.choice("kind", content["kind"], ESTIMATORS)](**content["arguments"])
        estimator.check_arguments()
        config, x_scale = TrainingConfig(**content["plan"]), _scale_from_json(content["x_scale"])
        selection = _selection_from_json(content["choice"], content["held_out"])
        if posterior.likelihood is None or posterior.likelihood.stack is None:
            raise ValueError("it has no likelihood of an ensemble")
        inputs, members, hidden = len(x_scale.mean), posterior.likelihood.stack, selection.candidate.hidden
        _check_sizes([inputs, *hidden, config.outputs], members, posterior)
        model = config.model(inputs, hidden, members)
        posterior.load_into(model)
        estimator.set_fitted(config, x_scale, selection, model, posterior)
        estimator.n_features_in_, estimator.spectra_ = inputs, content["spectra"]
        if content["columns"] is not None:
            estimator.feature_names_in_ = np.array(content["columns"], dtype=object)
        if isinstance(estimator, BayesianMLPRegressor):
            estimator.y_scale_, estimator.one_target_ = (
                _scale_from_json(content["y_scale"]),
                bool(content["one_target"]),
            )
            estimator.noise_scale_ = selection.noise.numpy()
        else:
            estimator.classes_ = np.array(content["classes"])
            if len(estimator.classes_) != config.outputs:
                raise ValueError(f"{len(estimator.classes_)} classes for {config.outputs} outputs")
        return estimator, posterior.notes["notes"]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a model that this version can read: {error}") from error


def _plain(value: Any) -> Any:
    """Return a numpy scalar as a Python one."""
    return value.item() if isinstance(value, np.generic) else value


def _selection_from_json(content: dict[str, Any], log_likelihood: float | None) -> Selection:
    candidate = Candidate(**{**content["candidate"], "hidden": tuple(content["candidate"]["hidden"])})
    noise, levels = (torch.tensor(content[name], dtype=torch.float64) for name in ("noise", "levels"))
    checks.shape("levels", levels, (len(noise), NUM_STEPS + 1))
    held_out = float("nan") if log_likelihood is None else log_likelihood
    return Selection(candidate, content["epochs"], noise, Calibration(levels), held_out)


def _scale_to_json(scale: Scale) -> dict[str, list[float]]:
    return {"mean": scale.mean.tolist(), "std": scale.std.tolist()}


def _scale_from_json(content: dict[str, list[float]]) -> Scale:
    mean, std = (torch.tensor(content[name], dtype=torch.float64) for name in ("mean", "std"))
    checks.shape("std", std, tuple(mean.shape))
    if not (checks.all_finite([mean, std]) and bool((std > 0).all())):
        raise ValueError("standard deviations must be finite and positive")
    return Scale(mean, std)


def _check_sizes(sizes: list[int], members: int, posterior: Posterior) -> None:
    """Raise ValueError if the networks do not match the weights in the file, before their memory is allocated."""
    expected = [(members, p, n) for n, p in itertools.pairwise(sizes)]
    actual = [entry.params[0][1] for entry in posterior.entries.values()]
    if expected != actual:
        raise ValueError(f"expected weights of the shapes {expected}, got {actual}")
