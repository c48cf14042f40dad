"""A fitted estimator as a file of numbers and JSON, and back: nothing in it can run."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import torch

from eigenoise import checks
from eigenoise.estimators.mlp import BayesianMLPClassifier, BayesianMLPRegressor
from eigenoise.estimators.network import Choice, Plan
from eigenoise.estimators.rows import Scale
from eigenoise.posterior import Posterior

FORMAT = 1
CLASSES = {each.__name__: each for each in (BayesianMLPRegressor, BayesianMLPClassifier)}

Estimator = BayesianMLPRegressor | BayesianMLPClassifier


def save(estimator: Estimator, path: str | os.PathLike, notes: Any = None) -> None:
    """Write one safetensors file; it appears only when it is complete.

    Args:
        estimator: fitted.
        path: of the file.
        notes: anything else that JSON knows, to be kept with it.
    """
    arguments = estimator.get_params()
    if not isinstance(arguments["random_state"], (int, type(None))):
        arguments["random_state"] = None  # a generator that lived in the past
    sizes = arguments["hidden_layer_sizes"]
    arguments["hidden_layer_sizes"] = sizes if isinstance(sizes, int) else list(map(int, sizes))
    choice = estimator.choice_
    own: dict[str, Any] = {
        "format": FORMAT,
        "kind": type(estimator).__name__,
        "arguments": arguments,
        "plan": dataclasses.asdict(estimator.plan_),
        "x_scale": _scale_to_json(estimator.x_scale_),
        "choice": {"kl_weight": choice.kl_weight, "epochs": choice.epochs, "noise": choice.noise.tolist()},
        "held_out": None if np.isnan(choice.log_likelihood) else choice.log_likelihood,
    }
    if isinstance(estimator, BayesianMLPRegressor):
        own |= {"y_scale": _scale_to_json(estimator.y_scale_), "one_target": estimator.one_target_}
    else:
        own["classes"] = [label.item() if isinstance(label, np.generic) else label for label in estimator.classes_]
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
        plan = Plan(**{**own["plan"], "hidden": tuple(own["plan"]["hidden"])})
        x_scale = _scale_from_json(own["x_scale"])
        noise = torch.tensor(own["choice"]["noise"], dtype=torch.float64)
        held_out = float("nan") if own["held_out"] is None else own["held_out"]
        choice = Choice(own["choice"]["kl_weight"], own["choice"]["epochs"], noise, held_out)
        if posterior.likelihood is None or posterior.likelihood.stack is None:
            raise ValueError("it says nothing of its outputs")
        inputs, members = len(x_scale.mean), posterior.likelihood.stack
        model = plan.model(inputs, members)
        posterior.load_into(model)
        estimator.take_over(plan, x_scale, choice, model, posterior, members)
        estimator.n_features_in_ = inputs
        if isinstance(estimator, BayesianMLPRegressor):
            estimator.y_scale_, estimator.one_target_ = _scale_from_json(own["y_scale"]), bool(own["one_target"])
            estimator.noise_scale_ = noise.numpy()
        else:
            estimator.classes_ = np.array(own["classes"])
        return estimator, posterior.notes["notes"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a model that this version can read: {error}") from error


def _scale_to_json(scale: Scale) -> dict[str, list[float]]:
    return {"mean": scale.mean.tolist(), "std": scale.std.tolist()}


def _scale_from_json(content: dict[str, list[float]]) -> Scale:
    mean, std = (torch.tensor(content[name], dtype=torch.float64) for name in ("mean", "std"))
    checks.shape("std", std, tuple(mean.shape))
    return Scale(mean, std)
