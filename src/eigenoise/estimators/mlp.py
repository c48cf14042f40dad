"""Bayesian networks for tables, as scikit-learn estimators."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from eigenoise import checks
from eigenoise.estimators.network import (
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
from eigenoise.estimators.progress import shown
from eigenoise.estimators.rows import Rows, Scale
from eigenoise.monte_carlo import predict
from eigenoise.natural import NaturalGradient
from eigenoise.posterior import Posterior
from eigenoise.predictive import CategoricalMixture, GaussianMixture, Predictive
from eigenoise.presets import METHODS
from eigenoise.spectra import spectra

FEW = 2_000  # rows up to which held-out parts cover the whole table


class _BayesianMLP(BaseEstimator):
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
        checks.choice("method", self.method, METHODS)
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
        with shown(self.verbose) as progress:
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


class BayesianMLPRegressor(RegressorMixin, _BayesianMLP):
    """Regression by a Bayesian network: a mean, and how far off it may be.

    Inputs and targets are standardised inside. Rows are held out to choose λ and η, when to stop, a factor on the
    noise, and how wide intervals must be; then networks are trained on all rows. Where a network does not make held-out
    rows clearly more likely than a linear model does, the linear one is used, unless λ or η is given.

    Args:
        hidden_layer_sizes: units of the hidden layers.
        activation: ``"relu"``, ``"tanh"``, ``"logistic"``, ``"silu"`` or ``"gelu"``.
        method: ``"noisy-ekfac"``, ``"noisy-kfac"``, ``"noisy-adam"`` or ``"bbb"``.
        kl_weight: λ, the weight of the KL term: 1 is Bayes, less is a colder posterior.
        prior_var: η, variance of the prior. By default a linear model comes first, then networks with λ and η of 1 and
            0.1, 0.3 and 0.3, 0.1 and 1: the next is taken if it makes held-out rows more likely by more than two
            standard errors. If one of them is given, only the other is chosen, and there is no linear model.
        lr: step size.
        batch_size: rows of a step; by default a thirtieth of them, from 10 to 100.
        max_epochs: passes over the rows at most; by default about 6,000 steps, from 20 to 200 passes.
        early_stopping: whether held-out rows decide how many passes there are.
        validation_fraction: of the rows that is held out. In tables of up to 2,000 rows each row is held out once.
        patience: a training ends when held-out rows did not gain in so many looks, of about 40.
        members: networks of an ensemble, trained at once, which costs little more than one; each has a posterior of its
            own.
        samples: weight samples of a prediction, all members together.
        warm_start: let ``fit`` go on from the weights, and with the choices, of the fit before.
        random_state: seed of divisions, initial weights, order and noise.
        verbose: whether to show progress.

    Attributes:
        posterior_: the ``Posterior`` of all members.
        model_: their networks, as one stack.
        hidden_layer_sizes_: as used; empty for a linear model.
        kl_weight_: λ as used.
        prior_var_: η as used.
        n_iter_: passes over all rows.
        validation_log_likelihood_: of a held-out row in standardised units, NaN without held-out rows.
        noise_scale_: factor on the noise's standard deviation for each target.
        spectra_: of each layer's Fisher, see ``eigenoise.spectra``; only by EK-FAC.
        one_target_: whether ``y`` had no axis for targets.

    Sample weights count observations: a row of weight two is two equal rows.
    """

    _classes = False
    y_scale_: Scale

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianMLPRegressor:
        """Fit to inputs ``X (N, n)`` and targets ``y (N,)`` or ``(N, d)``."""
        self.check_arguments()
        new = not self._goes_on()
        X, y = validate_data(self, X, y, reset=new, multi_output=True, y_numeric=True, dtype=np.float64)
        if not new and (1 if y.ndim == 1 else y.shape[1]) != len(self.y_scale_.mean):
            raise ValueError("y must have as many targets as in the fit before, as warm_start goes on from it")
        rows = Rows.of(X, y.reshape(len(y), -1).astype(np.float64), _weights(sample_weight, X))
        scale = Scale.of(rows.y, rows.weight) if new else self.y_scale_
        self._fit(dataclasses.replace(rows, y=scale.standardise(rows.y)), rows.y.shape[-1])
        self.y_scale_, self.noise_scale_, self.one_target_ = scale, self.choice_.noise.numpy(), y.ndim == 1
        return self

    def predictive(self, X: Any) -> GaussianMixture:
        """The whole predictive distribution of targets ``(N, d)`` in their own units."""
        found = self._predictive(X)
        assert isinstance(found, GaussianMixture)
        loc, scale = (part.flatten(0, 1) for part in (found.loc, found.scale))  # samples of members are samples
        return GaussianMixture(self.y_scale_.restore(loc), scale * self.choice_.noise * self.y_scale_.std)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Means ``(N,)`` or ``(N, d)``; with ``return_std`` standard deviations too, of noise and weights together."""
        found = self.predictive(X)
        return (self._out(found.mean), self._out(found.stddev)) if return_std else self._out(found.mean)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of central intervals that hold a target with probability ``coverage``.

        They are as wide as held-out rows asked for, which may differ a little from what ``predictive`` says.
        """
        checks.number("coverage", coverage, open_low=True)
        if coverage >= 1:
            raise ValueError(f"coverage must be below 1, but {coverage!r} came")
        found = self.predictive(X)
        low, high = (self._quantile(found, (1 + sign * coverage) / 2) for sign in (-1, 1))
        return self._out(low), self._out(high)

    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles ``(N, q)``, or ``(N, d, q)`` for several targets, calibrated as intervals are."""
        for q in quantiles:
            checks.number("quantiles", q, open_low=True)
            if q >= 1:
                raise ValueError(f"quantiles must be below 1, but {q!r} came")
        found = self.predictive(X)
        return np.stack([self._out(self._quantile(found, q)) for q in quantiles], -1)

    def _quantile(self, found: GaussianMixture, q: float) -> Tensor:
        """``(N, d)``, calibrated for each target."""
        each = []
        for j in range(found.loc.shape[-1]):
            own = GaussianMixture(found.loc[..., j : j + 1], found.scale[..., j : j + 1])
            each.append(own.quantile(self.choice_.calibration.quantile(q, j)))
        return torch.cat(each, -1)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Targets drawn from the predictive distribution: ``(N, n_samples)``, or ``(N, d, n_samples)``."""
        checks.integer("n_samples", n_samples)
        drawn = self.predictive(X).sample((n_samples,), _generator(random_state))
        return np.moveaxis(np.stack([self._out(part) for part in drawn]), 0, -1)

    def log_likelihood(self, X: Any, y: Any) -> float:
        """Mean log density of targets, in their own units; several targets of a row are added up."""
        found = self.predictive(X)
        target = torch.tensor(np.asarray(y, np.float64))
        target = target.unsqueeze(-1) if self.one_target_ and target.ndim == 1 else target
        return float(found.log_prob(checks.shape("y", target, tuple(found.mean.shape))).mean())

    def _out(self, values: Tensor) -> np.ndarray:
        return (values.squeeze(-1) if self.one_target_ else values).numpy()


class BayesianMLPClassifier(ClassifierMixin, _BayesianMLP):
    """Classification by a Bayesian network: probabilities that were averaged over what the weights may be.

    Arguments and attributes as for ``BayesianMLPRegressor``, without the noise's; ``classes_`` holds the labels.
    """

    _classes = True
    classes_: np.ndarray

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianMLPClassifier:
        """Fit to inputs ``X (N, n)`` and labels ``y (N,)``."""
        self.check_arguments()
        X, y = validate_data(self, X, y, reset=not self._goes_on(), dtype=np.float64)
        check_classification_targets(y)
        weight = _weights(sample_weight, X)
        kept = slice(None) if weight is None else weight > 0
        classes, index = np.unique(y, return_inverse=True)
        if len(np.unique(y[kept])) < 2:
            raise ValueError(f"y must hold at least two classes, but there is one class only: {y[kept][0]!r}")
        if self._goes_on() and list(classes) != list(self.classes_):
            raise ValueError("y must hold the classes of the fit before, as warm_start goes on from it")
        self._fit(Rows.of(X, index.astype(np.int64), weight), len(classes))
        self.classes_ = classes
        return self

    def predictive(self, X: Any) -> CategoricalMixture:
        """The whole predictive distribution over places in ``classes_``."""
        found = self._predictive(X)
        assert isinstance(found, CategoricalMixture)
        return CategoricalMixture(found.logits.flatten(0, 1))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities ``(N, c)`` in the order of ``classes_``."""
        probs = self.predictive(X).probs
        return (probs / probs.sum(-1, keepdim=True)).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each row."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(-1)]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Labels drawn from the predictive distribution: ``(N, n_samples)``."""
        checks.integer("n_samples", n_samples)
        drawn = self.predictive(X).sample((n_samples,), _generator(random_state))
        return self.classes_[drawn.numpy().T]

    def log_likelihood(self, X: Any, y: Any) -> float:
        """Mean log probability of labels; −∞ if one of them is unknown."""
        probs, y = self.predict_proba(X), np.asarray(y)
        if y.shape != (len(probs),):
            raise ValueError(f"y must have the shape ({len(probs)},), a label for each row, but {y.shape} came")
        known = (y[:, None] == self.classes_).astype(np.float64)
        with np.errstate(divide="ignore"):
            return float(np.log((probs * known).sum(-1)).mean())


def _weights(sample_weight: Any, X: np.ndarray) -> np.ndarray | None:
    if sample_weight is None:
        return None
    return _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)


def _generator(random_state: Any) -> torch.Generator:
    return torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
