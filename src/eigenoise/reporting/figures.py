"""Figures, drawn from result files alone and written as PNG and as SVG; names and colours of methods."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eigenoise import storage

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]  # set, method: one run's result
LABELS = {
    "bbb": "BBB",
    "noisy-adam": "noisy Adam",
    "noisy-kfac": "noisy K-FAC",
    "noisy-ekfac": "noisy EK-FAC",
    "sgd": "SGD",
    "kfac": "K-FAC",
    "ekfac": "EK-FAC",
}
COLORS = {
    "bbb": "#9a9a9a",
    "noisy-adam": "#e0a030",
    "noisy-kfac": "#3b82c4",
    "noisy-ekfac": "#c0392b",
    "sgd": "#444444",
    "kfac": "#9cc3e6",
    "ekfac": "#e8a69c",
}


def label(name: str, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a set's name, marked if only a sample of it was used."""
    return name + (" (sample)" if any(run["sample_of_the_set"] for run in runs.values()) else "")


def training_curves(table: Results, stem: Path) -> list[Path]:
    """Draws training ELBO per example over epochs, a panel for each set (Figure 3)."""
    figure, panels = _panels(len(table), width=3.2, height=2.6)
    for panel, (name, runs) in zip(panels, table.items(), strict=True):
        for method, run in runs.items():
            _plot(panel, method, range(1, len(run["curve"]) + 1), run["curve"])
        lowest_end = min(run["curve"][-1] for run in runs.values())
        top = max(max(run["curve"]) for run in runs.values())
        panel.set(title=label(name, runs), xscale="log", ylim=(lowest_end - 1.5, top + 0.15))
    return _save(figure, panels, stem, "epoch", "training ELBO per example")


def calibration(table: Results, stem: Path) -> list[Path]:
    """Draws the share of test targets in the central interval of each probability, a panel for each set."""
    figure, panels = _panels(len(table), width=2.6, height=2.6)
    for panel, (name, runs) in zip(panels, table.items(), strict=True):
        _unit_square(panel, label(name, runs))
        for method, run in runs.items():
            levels = sorted(float(level) for level in run["coverage"])
            _plot(panel, method, levels, [float(np.mean(run["coverage"][str(level)])) for level in levels])
    return _save(figure, panels, stem, "probability of the interval", "test targets in it")


def covariance_cartoon(planes: Sequence[Mapping[str, Any]], stem: Path) -> list[Path]:
    """Draws two-standard-deviation ellipses of each posterior in planes of weights (Figure 1).

    Args:
        planes: the names of two ``weights`` and a ``covariance``, 2×2, for FFG, MVG, EMVG and the full Gaussian.
        stem: path without suffix.
    """
    methods = {"FFG": "noisy-adam", "MVG": "noisy-kfac", "EMVG": "noisy-ekfac"}
    figure, panels = _panels(len(planes), width=3.2, height=3.2)
    angle = np.linspace(0, 2 * math.pi, 200)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    for panel, plane in zip(panels, planes, strict=True):
        for name, covariance in plane["covariance"].items():
            values, vectors = np.linalg.eigh(np.asarray(covariance))
            x, y = 2 * vectors @ (np.sqrt(values)[:, None] * circle)
            if name == "full":
                panel.fill(x, y, alpha=0.18, lw=0, color="#444444", label=name)
            else:
                panel.plot(x, y, lw=1.6, color=COLORS[methods[name]], label=name)
        panel.set(xlabel=plane["weights"][0], ylabel=plane["weights"][1])
    return _save(figure, panels, stem)


def scaling(layer: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draws the spectrum in the Kronecker basis: K-FAC's outer product against EK-FAC's second moments (Figure 2).

    Args:
        layer: ``kfac`` and ``ekfac``, both p×n, and the layer's ``name``.
        stem: path without suffix.
    """
    from matplotlib.colors import LogNorm

    kfac, ekfac = (np.asarray(layer[key])[::-1, ::-1] for key in ("kfac", "ekfac"))
    p, n = kfac.shape
    floor = max(float(np.quantile(np.concatenate([kfac.ravel(), ekfac.ravel()]), 0.05)), 1e-12)
    norm = LogNorm(floor, max(kfac.max(), ekfac.max()))
    figure, panels = _panels(2, width=3.6, height=3.6)
    titles = (f"K-FAC: {p + n} numbers", f"EK-FAC: {p * n} numbers")
    for panel, matrix, title in zip(panels, (kfac, ekfac), titles, strict=True):
        image = panel.imshow(np.maximum(matrix, floor), norm=norm, aspect="auto", cmap="magma")
        panel.set(title=title, xlabel="input direction")
    panels[0].set_ylabel("output direction")
    figure.colorbar(image, ax=panels, label="second moment of the gradient", shrink=0.85)
    return _write(figure, stem)


def bars(groups: Mapping[str, Mapping[str, float]], stem: Path) -> list[Path]:
    """Draws horizontal bars of costs, a panel for each group; 1 is marked."""
    figure, panels = _panels(len(groups), width=4.6, height=3.2)
    for panel, (title, costs) in zip(panels, groups.items(), strict=True):
        names = list(costs)[::-1]
        drawn = panel.barh(names, [costs[name] for name in names], color=COLORS["noisy-kfac"], height=0.7)
        panel.bar_label(drawn, fmt="%.2f", fontsize=7, padding=2)
        panel.axvline(1.0, color="#444444", lw=0.8)
        panel.set_title(title, fontsize=8)
        panel.tick_params(axis="y", labelsize=7)
    figure.supxlabel("cost of a step, SGD with momentum = 1", fontsize=9)
    figure.tight_layout()
    return _write(figure, stem)


def power_laws(panels_of: Mapping[str, tuple[Sequence[int], Mapping[str, Sequence[float]]]], stem: Path) -> list[Path]:
    """Draws milliseconds over sizes on logarithmic axes, a panel for each title, a line for each kind of cost."""
    figure, panels = _panels(len(panels_of), width=3.4, height=2.8)
    for panel, (title, (sizes, kinds)) in zip(panels, panels_of.items(), strict=True):
        for (kind, costs), color in zip(kinds.items(), COLORS.values(), strict=False):
            panel.plot(sizes, np.maximum(costs, 1e-3), "o-", ms=3, lw=1.2, color=color, label=kind)
        panel.set(xscale="log", yscale="log")
        panel.set_title(title, fontsize=8)
    return _save(figure, panels, stem, "size", "milliseconds")


def losses(panels_of: Mapping[str, Mapping[str, Sequence[float]]], smooth: int, stem: Path) -> list[Path]:
    """Draws training losses over steps, each point the mean of ``smooth``, a panel for each title."""
    figure, panels = _panels(len(panels_of), width=3.4, height=2.8)
    for panel, (title, methods) in zip(panels, panels_of.items(), strict=True):
        for method, loss in methods.items():
            count = max(1, len(loss) // smooth)
            means = [float(np.mean(part)) for part in np.array_split(np.asarray(loss), count)]
            _plot(panel, method, [(i + 0.5) * len(loss) / count for i in range(count)], means)
        panel.set(title=title)
    return _save(figure, panels, stem, "step", "training loss")


def reliability(panels_of: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], stem: Path) -> list[Path]:
    """Draws how often predictions of each confidence are right, a panel for each title."""
    figure, panels = _panels(len(panels_of), width=3.0, height=3.0)
    for panel, (title, methods) in zip(panels, panels_of.items(), strict=True):
        _unit_square(panel, title)
        for method, bins in methods.items():
            held = [i for i, weight in enumerate(bins["weight"]) if weight > 0.002]
            confidence, accuracy = ([bins[key][i] for i in held] for key in ("confidence", "accuracy"))
            _plot(panel, method, confidence, accuracy, "o-")
    return _save(figure, panels, stem, "probability of the predicted class", "how often it is right")


def predicted(points: Mapping[str, Sequence[float]], stem: Path) -> list[Path]:
    """Draws predicted against true targets with intervals; and the parts of the predictive standard deviation.

    Args:
        points: ``true``, ``mean``, ``lower``, ``upper``, ``noise`` and ``weights``, a number for each row.
        stem: path without suffix.
    """
    true, mean, lower, upper, noise, weights = (
        np.asarray(points[key]) for key in ("true", "mean", "lower", "upper", "noise", "weights")
    )
    figure, panels = _panels(2, width=3.8, height=3.4)
    ends = [min(true.min(), mean.min()), max(true.max(), mean.max())]
    panels[0].plot(ends, ends, color="#cccccc", lw=0.8)
    panels[0].errorbar(
        true, mean, np.maximum(0.0, [mean - lower, upper - mean]), fmt="o", ms=2.5, lw=0.5, color=COLORS["noisy-kfac"]
    )
    panels[0].set(xlabel="true", ylabel="predicted, with its interval")
    order = np.argsort(noise**2 + weights**2)
    place = np.arange(1, len(order) + 1)
    total = np.sqrt(noise**2 + weights**2)[order]
    share = (weights**2 / np.maximum(1e-300, noise**2 + weights**2))[order]
    panels[1].fill_between(place, total * share, color=COLORS["noisy-ekfac"], lw=0, label="weights")
    panels[1].fill_between(place, total * share, total, color="#e8c9c4", lw=0, label="noise")
    panels[1].set(xlabel="rows, surest first", ylabel="standard deviation, by share of variance")
    return _save(figure, panels, stem)


def spectra(layers: Mapping[str, Mapping[str, Sequence[float]]], stem: Path) -> list[Path]:
    """Draws the sorted spectrum of R beside K-FAC's products, a panel for each layer."""
    figure, panels = _panels(len(layers), width=2.6, height=2.3)
    for panel, (name, layer) in zip(panels, layers.items(), strict=True):
        for key, method, text in (("kfac", "noisy-kfac", "K-FAC: Λ_S⊗Λ_A"), ("R", "noisy-ekfac", "EK-FAC: R")):
            values = np.maximum(np.asarray(layer[key]), 1e-16)
            panel.plot(np.linspace(0, 1, len(values)), values, color=COLORS[method], lw=1.2, label=text)
        panel.set(title=name, yscale="log")
    return _save(figure, panels, stem, "share of directions, flattest first", "second moment of the gradient")


def _plot(panel: Any, method: str, x: Sequence[float], y: Sequence[float], style: str = "-") -> None:
    """Draws the line of a method."""
    panel.plot(x, y, style, ms=2.5, lw=1.2, color=COLORS[method], label=LABELS[method])


def _unit_square(panel: Any, title: str) -> None:
    """Draws the diagonal of a square of probabilities."""
    panel.plot([0, 1], [0, 1], color="#cccccc", lw=0.8)
    panel.set(title=title, xlim=(0, 1), ylim=(0, 1), aspect="equal")


def _panels(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(count, 3 if count <= 9 else 4)
    rows = -(-count // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows + 0.4), squeeze=False)
    panels = list(axes.flat)
    for panel in panels[count:]:
        panel.set_visible(False)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
        panel.title.set_fontsize(10)
    return figure, panels[:count]


def _save(figure: Any, panels: Sequence[Any], stem: Path, x: str = "", y: str = "") -> list[Path]:
    """Adds names of the axes and one legend for all panels, and writes the figure."""
    figure.supxlabel(x, fontsize=9)
    figure.supylabel(y, fontsize=9)
    known: dict[str, Any] = {}
    for panel in panels:
        known |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    columns = max(1, min(len(known), int(figure.get_figwidth() / 1.4)))
    figure.legend(known.values(), known.keys(), frameon=False, ncols=columns, loc="upper center", fontsize=9)
    rows = -(-len(known) // columns)
    figure.tight_layout(rect=(0, 0, 1, 1 - (0.15 + 0.2 * rows) / figure.get_figheight()))
    return _write(figure, stem)


def _write(figure: Any, stem: Path) -> list[Path]:
    """Writes PNG and SVG; without a date and with fixed names inside, the same results give the same files."""
    from matplotlib import pyplot

    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path, metadata in zip(paths, ({"Software": None}, {"Date": None}), strict=True):
        with pyplot.rc_context({"svg.hashsalt": stem.name}):
            kind = path.suffix[1:]
            storage.write(path, functools.partial(figure.savefig, dpi=150, format=kind, metadata=metadata))
    pyplot.close(figure)
    return paths
