"""Model selection on validation rows: prior, number of epochs, noise level and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eigenoise.distributions.mixtures import CategoricalMixture, GaussianMixture
from eigenoise.tabular.calibration import Calibration
from eigenoise.tabular.network import Candidate, Stack, TrainingConfig, marginal, merge_members
from eigenoise.tabular.progress import Progress
from eigenoise.tabular.rows import Rows, validation_splits

PRIOR_GRID = ((1.0, 0.1), (0.3, 0.3), (0.1, 1.0))  # λ and η, from strong to weak regularisation
NOISE_FACTORS = tuple(2 ** (i / 4) for i in range(-8, 9))  # on the standard deviation of the noise
MAX_VALIDATIONS = 40  # in a training run


def candidates(hidden: tuple[int, ...], kl_weight: float | None, prior_var: float | None) -> list[Candidate]:
    """Return the candidates, simplest first: a linear model, if neither λ nor η is given, then networks."""
    linear = [Candidate((), 1.0, 1.0)] if kl_weight is None and prior_var is None else []
    networks = [Candidate(hidden, float(kl_weight or a), float(prior_var or b)) for a, b in PRIOR_GRID]
    return [*linear, *dict.fromkeys(networks)]


@dataclass(frozen=True)
class Selection:
    """The outcome of a validation.

    Attributes:
        candidate: the hyperparameters.
        epochs: number of epochs.
        noise: factor on the standard deviation of the noise for each target ``(d,)``; unused for classes.
        calibration: calibration of intervals, given ``noise``; unused for classes.
        log_likelihood: mean over validation rows, NaN without validation.
        log_probs: log-likelihood of each validation row.
        weight: weights of these rows.
    """

    candidate: Candidate
    epochs: int
    noise: Tensor
    calibration: Calibration
    log_likelihood: float = float("nan")
    log_probs: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)
    weight: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)

    def significantly_better_than(self, other: Selection) -> bool:
        """Return whether the mean gain exceeds two standard errors of the paired difference; never with one row."""
        gain, weight = (self.log_probs - other.log_probs).flatten(), self.weight.flatten()
        total = weight.sum()
        mean = (weight * gain).sum() / total
        if len(gain) < 2 or not torch.isfinite(mean):
            return bool(mean == torch.inf)
        variance = (weight * (gain - mean).square()).sum() / (total - 1).clamp_min(1e-9)
        return bool(mean > 2 * (variance / total).sqrt())


def uncalibrated(targets: int) -> tuple[Tensor, Calibration]:
    """Return the noise factors and the calibration that leave predictions unchanged."""
    return torch.ones(targets, dtype=torch.float64), Calibration.identity(targets)


def select(
    config: TrainingConfig,
    rows: Rows,
    *,
    candidates: Sequence[Candidate],
    max_epochs: int,
    patience: int | None,
    fraction: float,
    splits: int,
    members: int,
    progress: Progress = lambda stage, done: None,
) -> Selection:
    """Train the candidates in turn on part of the rows, and move on while the next is significantly better.

    Args:
        config: settings of the training runs.
        rows: the standardised table; at least two rows.
        candidates: the hyperparameters, most preferred first.
        max_epochs: maximum number of epochs.
        patience: validations without improvement before a run stops; None for one validation, at the end of the run.
        fraction: the fraction of the rows to validate on.
        splits: number of training/validation splits, trained in parallel.
        members: size of the final ensemble. A single split is validated with an ensemble of this size, so that the
            selection suits it; several splits are validated with one network each.
        progress: called with the current candidate and the fraction of its run that is done.
    """
    train_index, held_out = validation_splits(rows, splits, fraction, torch.Generator().manual_seed(config.seed))
    train_index = train_index.expand(members if splits == 1 else splits, -1)
    interval = max_epochs if patience is None else max(1, max_epochs // MAX_VALIDATIONS)
    best: Selection | None = None
    for candidate in candidates:
        stack = Stack(config, rows, train_index, candidate)
        validations: list[Selection] = []
        for epoch in stack.epochs(max_epochs):
            progress(str(candidate), epoch / max_epochs)
            if epoch % interval and epoch < max_epochs:
                continue
            validations.append(_validate(stack, held_out, candidate, epoch))
            if patience is not None and epoch - smoothed_best(validations).epochs >= patience * interval:
                break
        selected = smoothed_best(validations)
        if best is None or selected.significantly_better_than(best):
            best = selected
        elif best.candidate.hidden:
            break  # weaker regularisation would hardly help a network; a linear model may still lose to a later one
    assert best is not None
    return best


def smoothed_best(validations: Sequence[Selection]) -> Selection:
    """Return the validation with the highest log-likelihood, averaged with its neighbours to reduce noise."""
    values = torch.tensor([validation.log_likelihood for validation in validations], dtype=torch.float64)
    values = values.nan_to_num(nan=-torch.inf)
    means = torch.stack([values[max(0, i - 1) : i + 2].mean() for i in range(len(values))])
    return validations[int(means.argmax())]


def _validate(stack: Stack, held_out: Tensor, candidate: Candidate, epoch: int) -> Selection:
    """Return the log-likelihood of validation rows ``(s, v)`` with the best noise factor for each target.

    The rows of a single split are predicted by the whole ensemble.
    """
    predictive = stack.predictive(held_out.expand(len(stack.index), -1))
    if len(held_out) == 1:
        predictive, held_out = merge_members(predictive), held_out[0]
    y, weight = stack.rows.y[held_out], stack.rows.weight[held_out]
    share = weight / weight.sum()
    if isinstance(predictive, CategoricalMixture):
        log_probs = predictive.log_prob(y)
        return Selection(candidate, epoch, *uncalibrated(1), float((log_probs * share).sum()), log_probs, weight)
    assert isinstance(predictive, GaussianMixture)
    total, factors, below = torch.zeros_like(weight), [], []
    for j in range(y.shape[-1]):  # targets are treated as independent
        mixture, target = marginal(predictive, j), y[..., j : j + 1]
        tried = {factor: mixture.with_noise_scaled(factor).log_prob(target) for factor in NOISE_FACTORS}
        means = {factor: float((log_prob * share).sum()) for factor, log_prob in tried.items()}
        factors.append(max(means, key=means.__getitem__))
        total = total + tried[factors[-1]]
        below.append(mixture.with_noise_scaled(factors[-1]).cdf(target))
    noise, score = torch.tensor(factors, dtype=torch.float64), float((total * share).sum())
    return Selection(candidate, epoch, noise, Calibration.fit(below, weight), score, total, weight)
