"""The demo: four Bayesian methods on the Boston housing table, ten random splits trained at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eigenoise import models
from eigenoise.distributions.mixtures import GaussianMixture
from eigenoise.inference import metrics
from eigenoise.inference.predict import predict
from eigenoise.likelihoods import GaussianLikelihood
from eigenoise.optim import training
from eigenoise.optim.methods import BAYESIAN
from eigenoise.reporting.figures import COLORS, LABELS
from eigenoise.studies import data


@dataclass(frozen=True)
class Settings:
    """What the demo trains: the paper's network and batch size, at a length that a person waits for."""

    splits: int = 10
    hidden: int = 50
    epochs: int = 150
    batch_size: int = 10
    test_samples: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """One method's run. Per-split tensors are ``(s,)``; predictions of all splits' test rows are in dollars."""

    method: str
    rmse: Tensor
    log_likelihood: Tensor
    coverage: Tensor
    curve: list[tuple[int, float]]  # (epoch, training ELBO per example, mean over splits)
    y: Tensor
    mean: Tensor
    noise_stddev: Tensor
    stddev: Tensor
    seconds: float


def run(
    method: str, table: data.Table, settings: Settings, on_epoch: Callable[[int, float], None] = lambda e, v: None
) -> Result:
    """Train one method on all splits at once and measure it on the test parts, in the table's units."""
    torch.manual_seed(settings.seed)
    began = time.perf_counter()
    splits = data.split(table, range(1, settings.splits + 1))
    likelihood = GaussianLikelihood(stack=settings.splits)
    model = models.MLP(splits.x_train.shape[-1], [settings.hidden], 1, stack=settings.splits)
    optimizer = BAYESIAN[method](model, num_data=splits.x_train.shape[1], likelihood=likelihood)
    curve = []
    for epoch in training.epochs(
        optimizer, splits.x_train, splits.y_train, count=settings.epochs, batch_size=settings.batch_size
    ):
        value = float(optimizer.elbo_terms().per_example.mean())
        curve.append((epoch, value))
        on_epoch(epoch, value)
    scale = splits.y_std.flatten()
    predicted = predict(model, optimizer, splits.x_test, samples=settings.test_samples)
    assert isinstance(predicted, GaussianMixture)
    return Result(
        method=method,
        rmse=metrics.rmse(predicted.mean, splits.y_test) * scale,
        log_likelihood=metrics.log_likelihood(predicted, splits.y_test) - scale.log(),
        coverage=metrics.coverage(predicted, splits.y_test),
        curve=curve,
        y=splits.y_test * splits.y_std + splits.y_mean,
        mean=predicted.mean * splits.y_std + splits.y_mean,
        noise_stddev=predicted.noise_stddev * splits.y_std,
        stddev=predicted.stddev * splits.y_std,
        seconds=time.perf_counter() - began,
    )


def draw(results: list[Result], folder: Path) -> list[Path]:
    """Training curves of all methods, and predictions with error bars of the last one, as PNG files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    for result in results:
        axes.plot(*zip(*result.curve, strict=True), color=COLORS[result.method], label=LABELS[result.method])
    axes.set(xlabel="epoch", ylabel="training ELBO per example", title="Boston housing, mean over random splits")
    last = [result.curve[-1][1] for result in results]
    axes.set_ylim(min(last) - 1.5, max(last) + 0.3)
    axes.legend(frameon=False)
    curves = _save(figure, folder / "elbo.png")

    result = results[-1]
    figure, axes = pyplot.subplots(figsize=(6.4, 4.8))
    y, mean, std = (part[0].flatten() for part in (result.y, result.mean, result.stddev))
    noise = result.noise_stddev[0].flatten()
    axes.errorbar(y, mean, 1.645 * std, fmt="none", ecolor="#e8b4ae", elinewidth=3, label="90 %: noise and weights")
    axes.errorbar(y, mean, 1.645 * noise, fmt="none", ecolor="#c0392b", elinewidth=1.2, label="90 %: noise alone")
    axes.plot(y, mean, "o", color="#5b1a13", markersize=3.5)
    ends = [float(y.min()) - 2, float(y.max()) + 2]
    axes.plot(ends, ends, color="#9a9a9a", linewidth=0.8)
    title = f"{LABELS[result.method]}: test rows of the first split"
    axes.set(xlabel="true price, 1000 $", ylabel="predicted", title=title)
    axes.legend(frameon=False, loc="upper left")
    return [curves, _save(figure, folder / "predictions.png")]


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    for side in ("top", "right"):
        figure.axes[0].spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
