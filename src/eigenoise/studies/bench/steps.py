"""One training step of SGD and of each of our methods, and the kinds of steps that their cycles are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

import eigenoise as en
from eigenoise.optim.methods import BAYESIAN
from eigenoise.optim.natural_gradient import NaturalGradient
from eigenoise.reporting.figures import LABELS
from eigenoise.studies.bench.cases import Case
from eigenoise.studies.data import Splits
from eigenoise.studies.recipes import PRESETS
from eigenoise.studies.regression.training import Training

CYCLE = 200  # steps between two bases
STATS_EVERY = 10
SPLITS = 10


class Stepper:
    """A training step, and how often each kind of step comes in a cycle.

    Args:
        step: makes one.
        optimizer: a natural-gradient one, whose counter of steps says what is due, or None if all steps are alike.
        models: trained at once; the cost counts for each.
        period: steps after which the costs of a method repeat that is not ours.
    """

    def __init__(
        self, step: Callable[[], Any], optimizer: NaturalGradient | None = None, models: int = 1, period: int = 1
    ):
        self.step, self.optimizer, self.models, self.period = step, optimizer, models, period

    def kinds(self) -> dict[str, tuple[int, float]]:
        """For each kind of step the first place in a cycle where it comes, and its share of all steps."""
        if self.optimizer is None:
            return {"plain": (0, 1.0)}
        opt = self.optimizer
        first: dict[str, int] = {}
        count: Counter[str] = Counter()
        turns = opt.decompositions.places
        cycle = max(opt.refresh_every, opt.reinit_every or 1, CYCLE)
        for step in range(cycle):
            due = [
                name
                for name, every in (("statistics", opt.stats_every), ("reset", opt.reinit_every))
                if every is not None and step % every == 0
            ]
            if step % opt.refresh_every in turns:
                due.append(f"basis {turns.index(step % opt.refresh_every) + 1}")
            kind = " and ".join(due) or "plain"
            first.setdefault(kind, step)
            count[kind] += 1
        return {kind: (first[kind], count[kind] / cycle) for kind in first}

    def seek(self, place: int) -> None:
        """Make the next step the one at ``place`` of a cycle, far from the start of training."""
        if self.optimizer is not None:
            self.optimizer.steps = 1000 * CYCLE + place


def sgd(case: Case) -> Stepper:
    """SGD with momentum."""
    model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        case.loss(model(case.x), case.y).backward()
        optimizer.step()

    return Stepper(step)


def _ours(method: Callable[..., Any], **options: Any) -> Callable[[Case], Stepper]:
    def make(case: Case) -> Stepper:
        likelihood = en.CategoricalLikelihood() if case.classification else en.GaussianLikelihood()
        model = case.make()
        natural = {} if method is en.BayesByBackprop else {"stats_every": STATS_EVERY, **case.options}
        optimizer = method(model, num_data=case.num_data, likelihood=likelihood, lr=1e-4, **natural, **options)

        def step() -> None:
            with optimizer.sampled_params():
                optimizer.zero_grad()
                likelihood.nll(model(case.x), case.y).backward()
            optimizer.step()

        return Stepper(step, optimizer if isinstance(optimizer, NaturalGradient) else None)

    return make


OURS: Mapping[str, Callable[[Case], Stepper]] = MappingProxyType(
    {
        "noisy EK-FAC": _ours(en.NoisyEKFAC, eig_every=CYCLE),
        "noisy EK-FAC, noise per example": _ours(en.NoisyEKFAC, eig_every=CYCLE, noise="per-example"),
        "noisy K-FAC": _ours(en.NoisyKFAC, inv_every=CYCLE),
        "noisy Adam": _ours(en.NoisyAdam),
        "BBB": _ours(en.BayesByBackprop),
        "EK-FAC": _ours(en.EKFAC, eig_every=CYCLE),
        "K-FAC": _ours(en.KFAC, inv_every=CYCLE),
    }
)


def _study(preset: str, method: str) -> Callable[[Case], Stepper]:
    def make(case: Case) -> Stepper:
        recipe = PRESETS[preset].recipe("boston", method)
        x, y = torch.randn(SPLITS, *case.x.shape), torch.randn(SPLITS, *case.y.shape)
        splits = Splits(x, y, x, y, torch.zeros(SPLITS, 1, 1), torch.ones(SPLITS, 1, 1))
        training = Training(recipe, method, splits, hidden=50, batch_size=len(case.x))
        optimizer = training.optimizer
        optimizer.param_groups[0]["num_data"] = case.num_data

        def step() -> None:
            optimizer.zero_grad()
            with optimizer.sampled_params():
                optimizer.likelihood.nll(training.model(x), y).backward()
            optimizer.step()

        return Stepper(step, optimizer if isinstance(optimizer, NaturalGradient) else None, models=SPLITS)

    return make


STUDY: Mapping[str, Callable[[Case], Stepper]] = MappingProxyType(
    {
        f"{LABELS[method]}, one of ten splits, preset {preset}": _study(preset, method)
        for preset in ("best", "paper")
        for method in reversed(tuple(BAYESIAN))
    }
)
_LARGE_LINEAR = {
    "noisy EK-FAC, one sample for the batch": _ours(en.NoisyEKFAC, eig_every=CYCLE, noise="shared"),
    "noisy EK-FAC, fixed input basis": _ours(en.NoisyEKFAC, eig_every=CYCLE, fixed_inputs=["0"]),
}
_GUARD = {"noisy EK-FAC, no guard": _ours(en.NoisyEKFAC, eig_every=CYCLE, guard=False)}
_CONVOLUTIONS = {"noisy EK-FAC, factored basis": _ours(en.NoisyEKFAC, eig_every=CYCLE, conv_basis="factored")}
MORE: Mapping[str, Mapping[str, Callable[[Case], Stepper]]] = MappingProxyType(  # for single cases, by their names
    {"a": {**_GUARD, **STUDY}, "b": {**_GUARD, **_LARGE_LINEAR}, "c": _CONVOLUTIONS, "c+bn": _CONVOLUTIONS}
)
