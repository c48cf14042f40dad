"""The common base of the scikit-learn estimators."""

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
from eigenoise.tabular.model_selection import Selection, candidates, select, uncalibrated
from eigenoise.tabular.network import (
    ACTIVATIONS,
    WARM_START_ERROR,
    Stack,
    TrainingConfig,
    default_batch_size,
    default_epochs,
    merge_members,
)
from eigenoise.tabular.progress import Progress, show_progress
from eigenoise.tabular.rows import Rows, Scale

MIN_ROWS_FOR_VALIDATION = 5
MAX_ROWS_FOR_CROSS_VALIDATION = 2_000
MAX_SINGLE_THREAD_WIDTH = 256  # of a layer: below, a second thread costs more time than it saves


class BayesianMLP(BaseEstimator):
    """The arguments, the fit and the predictive distribution that regressor and classifier share."""

    _classes: ClassVar[bool]
    selection_: Selection
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
        self.hidden_layer_sizes, self.activation, self.method = hidden_layer_sizes, activation, method
        self.kl_weight, self.prior_var, self.lr = kl_weight, prior_var, lr
        self.batch_size, self.max_epochs, self.early_stopping = batch_size, max_epochs, early_stopping
        self.validation_fraction, self.patience = validation_fraction, patience
        self.members, self.samples, self.warm_start = members, samples, warm_start
        self.random_state, self.verbose = random_state, verbose

    def check_arguments(self) -> tuple[int, ...]:
        """Check all arguments and return the sizes of the hidden layers.

        Raises:
            ValueError, TypeError: if an argument is invalid, naming it.
        """
        sizes = self.hidden_layer_sizes
        if isinstance(sizes, Iterator):
            raise TypeError("hidden_layer_sizes must be an int or a sequence of ints, got an iterator")
        listed = sizes if isinstance(sizes, Iterable) else (sizes,)
        hidden = tuple(checks.integer("hidden_layer_sizes", size) for size in listed)
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
        """Select on validation rows what is not given, then train ``members`` networks on all rows."""
        hidden = self.check_arguments()
        config = TrainingConfig(
            self.activation,
            self.method,
            outputs,
            self._classes,
            lr=float(self.lr),
            batch_size=int(self.batch_size or default_batch_size(rows)),
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
        )
        warm = self._is_warm()
        if warm and self.hidden_layer_sizes_ not in ((), hidden):
            raise ValueError(WARM_START_ERROR)
        scale = self.x_scale_ if warm else Scale.fit(rows.x, rows.weight)
        rows = dataclasses.replace(rows, x=scale.standardise(rows.x))
        with show_progress(self.verbose) as progress, limit_threads(max(rows.x.shape[1], *hidden, outputs)):
            selection = self.selection_ if warm else self._select(config, hidden, rows, progress)
            stack = Stack(config, rows, torch.arange(len(rows)).expand(int(self.members), -1), selection.candidate)
            if warm:
                stack.load_means(self.posterior_.mean)
            for epoch in stack.epochs(selection.epochs):
                progress("all rows", epoch / selection.epochs)
        self.set_fitted(config, scale, selection, stack.model, stack.optimizer.posterior)
        self.spectra_ = spectra(stack.optimizer) if isinstance(stack.optimizer, NaturalGradient) else {}
        stack.optimizer.close()

    def set_fitted(
        self, config: TrainingConfig, scale: Scale, selection: Selection, model: nn.Module, posterior: Posterior
    ) -> None:
        """Set the attributes of a fitted estimator that do not depend on the targets, after ``fit`` or from a file."""
        self.config_, self.x_scale_, self.selection_ = config, scale, selection
        self.model_, self.posterior_, self.members_ = model, posterior, len(next(iter(posterior.mean.values())))
        self.hidden_layer_sizes_ = selection.candidate.hidden
        self.kl_weight_, self.prior_var_ = selection.candidate.kl_weight, selection.candidate.prior_var
        self.n_iter_, self.validation_log_likelihood_ = selection.epochs, selection.log_likelihood

    def _is_warm(self) -> bool:
        """Return whether ``fit`` continues an earlier fit."""
        return bool(self.warm_start and hasattr(self, "posterior_"))

    def _select(self, config: TrainingConfig, hidden: tuple[int, ...], rows: Rows, progress: Progress) -> Selection:
        """Select hyperparameters, number of epochs, noise factors and calibration, by validation if any is open."""
        max_epochs = int(self.max_epochs or default_epochs(rows, config.batch_size))
        options = candidates(hidden, self.kl_weight, self.prior_var)
        if len(rows) < MIN_ROWS_FOR_VALIDATION or not (len(options) > 1 or self.early_stopping):
            return Selection(options[0], max_epochs, *uncalibrated(config.outputs))
        fraction = float(self.validation_fraction)
        splits = math.floor(1 / fraction + 1e-9) if len(rows) <= MAX_ROWS_FOR_CROSS_VALIDATION else 1
        return select(
            config,
            rows,
            candidates=options,
            max_epochs=max_epochs,
            patience=int(self.patience) if self.early_stopping else None,
            fraction=fraction,
            splits=max(1, splits),
            members=int(self.members),
            progress=progress,
        )

    def _predictive(self, X: Any) -> Predictive:
        """Return the mixture over members and weight samples, in standardised units."""
        check_is_fitted(self)
        x = self.x_scale_.standardise(torch.tensor(validate_data(self, X, reset=False, dtype=np.float64, order="C")))
        x = x.expand(self.members_, -1, -1)
        # Samples are written into the model: a copy lets several threads predict at once.
        model, samples_per_member = copy.deepcopy(self.model_), -(-self.samples // self.members_)
        return merge_members(predict(model, self.posterior_, x, samples=samples_per_member))


@contextmanager
def limit_threads(max_width: int) -> Iterator[None]:
    """Within the block, torch uses one thread if no layer is wider than ``MAX_SINGLE_THREAD_WIDTH``."""
    before = torch.get_num_threads()
    if max_width <= MAX_SINGLE_THREAD_WIDTH:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_weights(sample_weight: Any, X: np.ndarray) -> np.ndarray | None:
    """Return the checked sample weights ``(N,)``, or None."""
    if sample_weight is None:
        return None
    return _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)


def as_generator(random_state: Any) -> torch.Generator:
    """Return a torch generator seeded by scikit-learn's ``random_state``."""
    return torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
