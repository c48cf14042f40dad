"""What the estimators for tables share: their arguments, and how networks are fitted and asked."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import nn

from eigenoise import checks
from eigenoise.distributions.mixtures import Predictive
from eigenoise.inference.posterior import Posterior
from eigenoise.inference.predict import predict
from eigenoise.optim.methods import BAYESIAN
from eigenoise.optim.natural_gradient import NaturalGradient
from eigenoise.optim.spectra import spectra
from eigenoise.tabular.network import (
    ACTIVATIONS,
    AS_THEY_ARE,
    Choice,
    Plan,
    Stack,
    candidates,
    choose,
    default_batch,
    default_epochs,
    untouched,
)
from eigenoise.tabular.progress import shown
from eigenoise.tabular.rows import Rows, Scale

FEW = 2_000  # rows up to which held-out parts cover the whole table
SMALL = 256  # units of a layer up to which a second thread costs more time than it saves


class BayesianMLP(BaseEstimator):
    """What regressor and classifier share: their arguments, and how networks are fitted and asked."""

    _classes: ClassVar[bool]
    choice_: Choice
    x_scale_: Scale
    posterior_: Posterior

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (50,),
        *,
        activation: str = "relu",
        method: str = "noisy-ekfac",
        kl_weight: float | None = None,
        prior_var: float | None = None,
        lr: float = 0.01,
        batch_size: int | None = None,
        max_epochs: int | None = None,
        early_stopping: bool = True,
        validation_fraction: float = 0.2,
        patience: int = 6,
        members: int = 5,
        samples: int = 100,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: bool = False,
    ):
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.method = method
        self.kl_weight = kl_weight
        self.prior_var = prior_var
        self.lr = lr
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.members = members
        self.samples = samples
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    def check_arguments(self) -> tuple[int, ...]:
        """The sizes of the hidden layers.

        Raises:
            ValueError, TypeError: unless every argument is what it must be.
        """
        sizes = self.hidden_layer_sizes
        if isinstance(sizes, Iterator):
            raise TypeError("hidden_layer_sizes must be an int or a sequence of them, but an iterator came")
        hidden = tuple(
            checks.integer("hidden_layer_sizes", size) for size in (sizes if isinstance(sizes, Iterable) else (sizes,))
        )
        checks.choice("activation", self.activation, ACTIVATIONS)
        checks.choice("method", self.method, BAYESIAN)
        checks.number("lr", self.lr, open_low=True)
        for name in ("kl_weight", "prior_var"):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), open_low=True)
        for name in ("batch_size", "max_epochs"):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name))
        for name in ("patience", "members", "samples"):
            checks.integer(name, getattr(self, name))
        checks.number("validation_fraction", self.validation_fraction, open_low=True, high=0.9)
        return hidden

    def _fit(self, rows: Rows, outputs: int) -> None:
        """Choose on held-out rows what is to be chosen, then train ``members`` networks on all rows."""
        hidden = self.check_arguments()
        plan = Plan(
            self.activation,
            self.method,
            outputs,
            self._classes,
            lr=float(self.lr),
            batch_size=int(self.batch_size or default_batch(rows)),
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
        )
        goes_on = self._goes_on()
        if goes_on and self.hidden_layer_sizes_ not in ((), hidden):
            raise ValueError(AS_THEY_ARE)
        scale = self.x_scale_ if goes_on else Scale.of(rows.x, rows.weight)
        rows = dataclasses.replace(rows, x=scale.standardise(rows.x))
        with shown(self.verbose) as progress, threads_for(max(rows.x.shape[1], *hidden, outputs)):
            choice = self.choice_ if goes_on else self._choose(plan, hidden, rows, progress)
            index = torch.arange(len(rows)).expand(int(self.members), -1)
            stack = Stack(plan, rows, index, choice.candidate)
            if goes_on:
                stack.start_from(self.posterior_.mean)
            for epoch in stack.passes(choice.epochs):
                progress("all rows", epoch / choice.epochs)
        self.take_over(plan, scale, choice, stack.model, stack.optimizer.posterior, int(self.members))
        self.spectra_ = spectra(stack.optimizer) if isinstance(stack.optimizer, NaturalGradient) else {}
        stack.optimizer.close()

    def take_over(
        self, plan: Plan, scale: Scale, choice: Choice, model: nn.Module, posterior: Posterior, members: int
    ) -> None:
        """Be fitted with these: what ``fit`` and a file have in common."""
        self.plan_, self.x_scale_, self.choice_, self.model_, self.posterior_ = plan, scale, choice, model, posterior
        self.hidden_layer_sizes_ = choice.candidate.hidden
        self.kl_weight_, self.prior_var_ = choice.candidate.kl_weight, choice.candidate.prior_var
        self.n_iter_, self.members_ = choice.epochs, members
        self.validation_log_likelihood_ = choice.log_likelihood

    def _goes_on(self) -> bool:
        """Whether there is an earlier fit to go on from."""
        return bool(self.warm_start and hasattr(self, "posterior_"))

    def _choose(self, plan: Plan, hidden: tuple[int, ...], rows: Rows, progress: Any) -> Choice:
        """λ, η, the number of passes and the noise's factor, from held-out rows where any of them is open."""
        most = self.max_epochs or default_epochs(rows, plan.batch_size)
        tried = candidates(hidden, self.kl_weight, self.prior_var)
        if len(rows) < 5 or not (len(tried) > 1 or self.early_stopping):
            return Choice(tried[0], int(most), *untouched(plan.outputs))
        fraction = float(self.validation_fraction)
        return choose(
            plan,
            rows,
            tried=tried,
            max_epochs=int(most),
            patience=int(self.patience) if self.early_stopping else None,
            fraction=fraction,
            divisions=max(1, math.floor(1 / fraction + 1e-9)) if len(rows) <= FEW else 1,
            members=int(self.members),
            progress=progress,
        )

    def _predictive(self, X: Any) -> Predictive:
        """The mixture over members and weight samples, in the units that networks see."""
        check_is_fitted(self)
        x = self.x_scale_.standardise(torch.tensor(validate_data(self, X, reset=False, dtype=np.float64, order="C")))
        each = -(-self.samples // self.members_)
        table = x.expand(self.members_, -1, -1)
        # A copy, as samples are written into it: several threads may ask at once.
        return predict(copy.deepcopy(self.model_), self.posterior_, table, samples=each)


@contextmanager
def threads_for(widest: int) -> Iterator[None]:
    """Within the block torch works with one thread if no layer is wider than ``SMALL``, else with as many as before."""
    before = torch.get_num_threads()
    if widest <= SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def weights(sample_weight: Any, X: np.ndarray) -> np.ndarray | None:
    """Sample weights, checked; None if there are none."""
    if sample_weight is None:
        return None
    return _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)


def generator(random_state: Any) -> torch.Generator:
    """Torch's generator for what scikit-learn takes as a seed."""
    return torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
