"""A fitted estimator as a file of numbers and JSON, and back: nothing in it can run."""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Any

import numpy as np
import torch

from eigenoise import checks
from eigenoise.inference.posterior import Posterior
from eigenoise.tabular.calibration import GRID, Calibration
from eigenoise.tabular.classifier import BayesianMLPClassifier
from eigenoise.tabular.network import Candidate, Choice, Plan
from eigenoise.tabular.regressor import BayesianMLPRegressor
from eigenoise.tabular.rows import Scale

FORMAT = 2
CLASSES = {each.__name__: each for each in (BayesianMLPRegressor, BayesianMLPClassifier)}

Estimator = BayesianMLPRegressor | BayesianMLPClassifier


def save(estimator: Estimator, path: str | os.PathLike, notes: Any = None) -> None:
    """Write one safetensors file; it appears only when it is complete.

    Args:
        estimator: fitted.
        path: of the file.
        notes: anything else that JSON knows, to be kept with it.
    """
    arguments = {name: _plain(value) for name, value in estimator.get_params().items()}
    if not isinstance(arguments["random_state"], (int, type(None))):
        arguments["random_state"] = None  # a generator that lived in the past
    arguments["hidden_layer_sizes"] = list(estimator.check_arguments())
    names = getattr(estimator, "feature_names_in_", None)
    choice = estimator.choice_
    own: dict[str, Any] = {
        "format": FORMAT,
        "kind": type(estimator).__name__,
        "arguments": arguments,
        "plan": dataclasses.asdict(estimator.plan_),
        "x_scale": _scale_to_json(estimator.x_scale_),
        "choice": {
            "candidate": dataclasses.asdict(choice.candidate),
            "epochs": choice.epochs,
            "noise": choice.noise.tolist(),
            "levels": choice.calibration.levels.tolist(),
        },
        "spectra": estimator.spectra_,
        "columns": None if names is None else [str(name) for name in names],
        "held_out": None if np.isnan(choice.log_likelihood) else choice.log_likelihood,
    }
    if isinstance(estimator, BayesianMLPRegressor):
        own |= {"y_scale": _scale_to_json(estimator.y_scale_), "one_target": estimator.one_target_}
    else:
        own["classes"] = [_plain(label) for label in estimator.classes_]
        if not all(isinstance(label, (str, int, float)) for label in own["classes"]):
            raise TypeError(f"classes must be texts or numbers to be kept in a file, but {own['classes'][0]!r} is one")
    q = estimator.posterior_
    Posterior(q.entries, q.rest, q.likelihood, {"estimator": own, "notes": notes}).save(path)


def load(path: str | os.PathLike) -> tuple[Estimator, Any]:
    """The estimator in a file, and the notes that were kept with it.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged or holds something else.
    """
    posterior = Posterior.load(path)
    try:
        own = posterior.notes["estimator"]
        if own["format"] != FORMAT:
            raise ValueError(f"its format is {own['format']!r}, this version reads {FORMAT}")
        estimator = CLASSES[checks.choice("kind", own["kind"], CLASSES)](**own["arguments"])
        plan = Plan(**own["plan"])
        x_scale = _scale_from_json(own["x_scale"])
        noise = torch.tensor(own["choice"]["noise"], dtype=torch.float64)
        held_out = float("nan") if own["held_out"] is None else own["held_out"]
        candidate = own["choice"]["candidate"]
        candidate = Candidate(**{**candidate, "hidden": tuple(candidate["hidden"])})
        levels = torch.tensor(own["choice"]["levels"], dtype=torch.float64)
        checks.shape("levels", levels, (len(noise), GRID + 1))
        choice = Choice(candidate, own["choice"]["epochs"], noise, Calibration(levels), held_out)
        if posterior.likelihood is None or posterior.likelihood.stack is None:
            raise ValueError("it says nothing of its outputs")
        inputs, members = len(x_scale.mean), posterior.likelihood.stack
        estimator.check_arguments()
        _check_sizes([inputs, *candidate.hidden, plan.outputs], members, posterior)
        model = plan.model(inputs, candidate.hidden, members)
        posterior.load_into(model)
        estimator.take_over(plan, x_scale, choice, model, posterior, members)
        estimator.n_features_in_, estimator.spectra_ = inputs, own["spectra"]
        if own["columns"] is not None:
            estimator.feature_names_in_ = np.array(own["columns"], dtype=object)
        if isinstance(estimator, BayesianMLPRegressor):
            estimator.y_scale_, estimator.one_target_ = _scale_from_json(own["y_scale"]), bool(own["one_target"])
            estimator.noise_scale_ = noise.numpy()
        else:
            estimator.classes_ = np.array(own["classes"])
            if len(estimator.classes_) != plan.outputs:
                raise ValueError(f"{len(estimator.classes_)} classes for {plan.outputs} outputs")
        return estimator, posterior.notes["notes"]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a model that this version can read: {error}") from error


def _plain(value: Any) -> Any:
    """A number of numpy's as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _scale_to_json(scale: Scale) -> dict[str, list[float]]:
    return {"mean": scale.mean.tolist(), "std": scale.std.tolist()}


def _scale_from_json(content: dict[str, list[float]]) -> Scale:
    mean, std = (torch.tensor(content[name], dtype=torch.float64) for name in ("mean", "std"))
    checks.shape("std", std, tuple(mean.shape))
    if not (checks.all_finite([mean, std]) and bool((std > 0).all())):
        raise ValueError("a standard deviation that is not above zero")
    return Scale(mean, std)


def _check_sizes(sizes: list[int], members: int, posterior: Posterior) -> None:
    """Before memory is taken for networks: they must be those whose weights are in the file."""
    wanted = [(members, p, n) for n, p in itertools.pairwise(sizes)]
    found = [entry.params[0][1] for entry in posterior.entries.values()]
    if wanted != found:
        raise ValueError(f"networks with weights {wanted}, but weights {found}")
