"""Training steps of SGD and of our methods, and the kinds of steps in their cycles."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import eigenoise as en
from eigenoise.optim.methods import BAYESIAN
from eigenoise.optim.natural_gradient import NaturalGradient
from eigenoise.reporting.figures import LABELS
from eigenoise.studies.bench.cases import Case
from eigenoise.studies.classification.training import METHODS
from eigenoise.studies.data import Splits
from eigenoise.studies.recipes import PRESETS, arguments, load
from eigenoise.studies.regression.training import Training

CYCLE = 100  # steps between two bases
SPLITS = 10  # trained at once in the studies' steps


class Stepper:
    """A training step, and how often each kind of step comes in a cycle.

    Args:
        step: makes one step.
        optimizer: a natural-gradient optimiser, whose step counter decides what is due; None if all steps are alike.
        models: number of models trained at once; the cost is that of each.
        period: steps after which the costs of another library's method repeat.
    """

    def __init__(
        self, step: Callable[[], Any], optimizer: NaturalGradient | None = None, models: int = 1, period: int = 1
    ):
        self.step, self.optimizer, self.models, self.period = step, optimizer, models, period

    def kinds(self) -> dict[str, tuple[int, float]]:
        """Returns for each kind of step its first place in a cycle and its share of all steps."""
        if self.optimizer is None:
            return {"plain": (0, 1.0)}
        opt = self.optimizer
        first: dict[str, int] = {}
        count: Counter[str] = Counter()
        turns = opt.decompositions.places
        schedule = opt.schedule
        cycle = max(schedule.refresh_every, schedule.reinit_every or 1, CYCLE)
        for step in range(cycle):
            due = [
                name
                for name, every in (("statistics", schedule.stats_every), ("reset", schedule.reinit_every))
                if every is not None and step % every == 0
            ]
            if step % schedule.refresh_every in turns:
                due.append(f"basis {turns.index(step % schedule.refresh_every) + 1}")
            kind = " and ".join(due) or "plain"
            first.setdefault(kind, step)
            count[kind] += 1
        return {kind: (first[kind], count[kind] / cycle) for kind in first}

    def seek(self, place: int) -> None:
        """Makes the next step the one at ``place`` of a cycle, far from the start of training."""
        if self.optimizer is not None:
            self.optimizer.steps = 1000 * CYCLE + place


MakeStepper = Callable[[Case], Stepper]


def sgd(case: Case) -> Stepper:
    """Returns the step of SGD with momentum."""
    model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        case.loss(model(case.x), case.y).backward()
        optimizer.step()

    return Stepper(step)


def training_stepper(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor, models: int = 1) -> Stepper:
    """Returns the step of one of our optimisers on a batch; for ``models`` see ``Stepper``."""

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(optimizer.blocks_per_step):
            with optimizer.sampled_params():
                optimizer.likelihood.nll(model(x), y).backward()
        optimizer.step()

    return Stepper(step, optimizer if isinstance(optimizer, NaturalGradient) else None, models=models)


def default_arguments(method: str) -> dict[str, Any]:
    """Returns the optimiser arguments that a method is timed with."""
    return arguments([load("bench")["optimizer"]], method)


def _ours(method: str, options: Mapping[str, Any], case: Case) -> Stepper:
    likelihood = en.CategoricalLikelihood() if case.classification else en.GaussianLikelihood()
    model = case.make()
    settings = {**default_arguments(method), **options}
    optimizer = METHODS[method](model, num_data=case.num_data, likelihood=likelihood, **settings)
    return training_stepper(optimizer, model, case.x, case.y)


def _study(preset: str, method: str, case: Case) -> Stepper:
    x, y = torch.randn(SPLITS, *case.x.shape), torch.randn(SPLITS, *case.y.shape)
    splits = Splits(x, y, x, y, torch.zeros(SPLITS, 1, 1), torch.ones(SPLITS, 1, 1))
    recipe = PRESETS[preset].recipe("boston", method)
    training = Training(recipe, method, splits, hidden=50, batch_size=len(case.x))
    training.optimizer.param_groups[0]["num_data"] = case.num_data
    return training_stepper(training.optimizer, training.model, x, y, models=SPLITS)


def _variants(case: str) -> dict[str, MakeStepper]:
    return {
        ", ".join([LABELS[variant["method"]], *([variant["name"]] if "name" in variant else [])]): functools.partial(
            _ours, variant["method"], variant.get("options", {})
        )
        for variant in load("bench")["variants"][case]
    }


OURS: Mapping[str, MakeStepper] = MappingProxyType(_variants("all"))
STUDY: Mapping[str, MakeStepper] = MappingProxyType(
    {
        f"{LABELS[method]}, one of ten splits, preset {preset}": functools.partial(_study, preset, method)
        for preset in ("best", "paper")
        for method in reversed(tuple(BAYESIAN))
    }
)
MORE: Mapping[str, Mapping[str, MakeStepper]] = MappingProxyType(  # for single cases, by their names
    {"a": {**_variants("a"), **STUDY}, **{case: _variants(case) for case in ("b", "c")}}
)
