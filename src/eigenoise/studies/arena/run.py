"""Runs of the arena: one method on one task for so many CPU seconds, tuned on validation rows if it may be."""

from __future__ import annotations

import importlib.util
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eigenoise import storage
from eigenoise.distributions.mixtures import CategoricalMixture
from eigenoise.inference import metrics
from eigenoise.studies.arena.learners import METHODS, Learner, Method, Mixture
from eigenoise.studies.arena.tasks import Parts, Task, named
from eigenoise.studies.runner import environment

BUDGETS = (1, 3, 10)
CURVE = (0.1, 0.3)  # parts of the time after which the test's log-likelihood is taken
CURVE_ROWS = 500
FORMAT = 1


def train(
    method: Method, setting: dict[str, Any], task: Task, parts: Parts, seconds: float, seed: int, curve: bool = True
) -> tuple[Learner, dict[str, Any]]:
    """Trains for ``seconds`` of CPU time, in which neither data nor tests count.

    Returns:
        The learner, and its steps, seconds and curve of (seconds, log-likelihood).
    """
    torch.manual_seed(seed)
    learner = method.make(task, parts, dict(setting))
    order = torch.Generator().manual_seed(seed)
    spent, steps, waiting = 0.0, 0, torch.empty(0, dtype=torch.long)
    points: list[list[float]] = []
    size = min(task.batch_size, len(parts.x))
    while spent < seconds:
        if len(waiting) < size:
            waiting = torch.randperm(len(parts.x), generator=order)
        rows, waiting = waiting[:size], waiting[size:]
        x, y = parts.x[rows], parts.y[rows]
        start = time.process_time()
        learner.step(x, y, spent / seconds)
        spent, steps = spent + time.process_time() - start, steps + 1
        if curve and len(points) < len(CURVE) and spent >= CURVE[len(points)] * seconds:
            log_prob = learner.predict(parts.x_test[:CURVE_ROWS]).log_prob(parts.y_test[:CURVE_ROWS])
            points.append([round(spent, 2), round(float(log_prob.mean()), 4)])
    return learner, {"steps": steps, "seconds": round(spent, 2), "curve": points}


def scores(predicted: Mixture, y: Tensor, other: Mixture | None) -> dict[str, float]:
    """Returns log-likelihood, error and calibration of predictions, and how well other inputs are told from these."""
    found = {"ll": float(predicted.log_prob(y).mean())}
    if isinstance(predicted, CategoricalMixture):
        found["accuracy"] = float(metrics.accuracy(predicted.probs, y))
        found["calibration"] = float(metrics.reliability(predicted.probs, y).error)
        found["brier"] = float(metrics.brier(predicted.probs, y))
        if other is not None:
            found["auroc"] = float(metrics.auroc(predicted.entropy(), other.entropy()))
    else:
        found["rmse"] = float(metrics.rmse(predicted.mean, y))
        levels = [level / 10 for level in range(1, 10)]
        covered = [float(metrics.coverage(predicted, y, level)) for level in levels]
        found["calibration"] = sum(abs(c - level) for c, level in zip(covered, levels, strict=True)) / len(levels)
    return found


def tuned(method: Method, task: Task, parts: Parts, seconds: float) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns the setting under which validation rows are most likely, and the log-likelihood of each."""
    likely = {}
    for setting in method.settings:
        learner, _ = train(method, setting, task, parts, seconds, seed=0, curve=False)
        ll = float(learner.predict(parts.x_validation).log_prob(parts.y_validation).mean())
        likely[json.dumps(setting)] = ll if ll == ll else float("-inf")
    return json.loads(max(likely, key=lambda key: likely[key])), likely


def wanted(
    tasks: Sequence[str], methods: Sequence[str], budgets: Sequence[int], seeds: int
) -> Iterator[dict[str, Any]]:
    """Yields the settings of all runs; those that others take settings over from come first."""
    order = sorted(methods, key=lambda name: METHODS[name].settings_of is not None)
    for seed in range(seeds):
        for budget in budgets:
            for task in tasks:
                for method in order:
                    yield {"task": task, "method": method, "budget": budget, "seed": seed}


class Results:
    """All results in one JSON file; the settings that were chosen serve all seeds.

    Args:
        path: the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.content: dict[str, Any] = {"format": FORMAT, "chosen": {}, "runs": {}}
        if path.exists():
            try:
                content = json.loads(path.read_text())
                if content["format"] != FORMAT or not isinstance(content["runs"], dict):
                    raise ValueError(f"expected format {FORMAT}")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} cannot be read by this version ({error}); move it away") from error
            self.content = content

    @staticmethod
    def key(run: dict[str, Any]) -> str:
        """Returns a run's name in the file."""
        return "{task} {method} x{budget} seed {seed}".format(**run)

    def has(self, run: dict[str, Any]) -> bool:
        """Tells whether a run is done."""
        return self.key(run) in self.content["runs"]

    def chosen(self, run: dict[str, Any], parts: Parts) -> dict[str, Any]:
        """Returns the setting of a run's method, tuned if that was not done for this task and budget."""
        method = METHODS[run["method"]]
        if method.settings_of is not None:
            return self.chosen({**run, "method": method.settings_of}, parts)
        if len(method.settings) == 1:
            return method.settings[0]
        key = "{task} {method} x{budget}".format(**run)
        if key not in self.content["chosen"]:
            task = named(run["task"])
            setting, likely = tuned(method, task, parts, task.seconds * run["budget"])
            self.content["chosen"][key] = {"setting": setting, "validation": likely}
            self.save()
        return self.content["chosen"][key]["setting"]

    def execute(self, run: dict[str, Any], load: Callable[[str, int], Parts]) -> None:
        """Makes a run and writes its result."""
        task, method = named(run["task"]), METHODS[run["method"]]
        parts = load(run["task"], run["seed"])
        setting = self.chosen(run, load(run["task"], 0))
        seed = run["seed"] + zlib.crc32(run["task"].encode()) % 1000
        learner, how = train(method, setting, task, parts, task.seconds * run["budget"], seed)
        start = time.process_time()
        learner = learner if method.finish is None else method.finish(learner, task, parts)
        how["finishing"] = round(time.process_time() - start, 2)
        other = None if parts.x_other is None else learner.predict(parts.x_other)
        found = scores(learner.predict(parts.x_test), parts.y_test, other)
        self.content["runs"][self.key(run)] = {
            **run,
            **how,
            "setting": setting,
            "scores": {name: round(value, 5) for name, value in found.items()},
        }
        self.save()

    def save(self) -> None:
        """Writes the file."""
        self.content["environment"] = environment()
        storage.write_json(self.path, self.content)


def installed() -> list[str]:
    """Returns the names of methods whose library is here."""
    needs = {"ivon": "ivon", "laplace": "laplace", "laplace-all": "laplace"}
    return [name for name in METHODS if name not in needs or importlib.util.find_spec(needs[name]) is not None]
