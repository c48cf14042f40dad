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
    """A set's name, marked if only a sample of it was used."""
    return name + (" (sample)" if any(run["sample_of_the_set"] for run in runs.values()) else "")


def training_curves(table: Results, stem: Path) -> list[Path]:
    """Training ELBO per example over epochs, a panel for each set (Figure 3)."""
    figure, panels = _panels(len(table), width=3.2, height=2.6)
    for panel, (name, runs) in zip(panels, table.items(), strict=True):
        for method, run in runs.items():
            panel.plot(
                range(1, len(run["curve"]) + 1), run["curve"], color=COLORS[method], label=LABELS[method], lw=1.2
            )
        last = [run["curve"][-1] for run in runs.values()]
        top = max(max(run["curve"]) for run in runs.values())
        panel.set(title=label(name, runs), xscale="log", ylim=(min(last) - 1.5, top + 0.15))
    _label(figure, panels, "epoch", "training ELBO per example")
    return _save(figure, stem)


def calibration(table: Results, stem: Path) -> list[Path]:
    """How many test targets fall into the central interval of each probability, a panel for each set."""
    figure, panels = _panels(len(table), width=2.6, height=2.6)
    for panel, (name, runs) in zip(panels, table.items(), strict=True):
        panel.plot([0, 1], [0, 1], color="#cccccc", lw=0.8)
        for method, run in runs.items():
            levels = sorted(float(level) for level in run["coverage"])
            observed = [float(np.mean(run["coverage"][str(level)])) for level in levels]
            panel.plot(levels, observed, color=COLORS[method], label=LABELS[method], lw=1.2)
        panel.set(title=label(name, runs), xlim=(0, 1), ylim=(0, 1), aspect="equal")
    _label(figure, panels, "probability of the interval", "test targets in it")
    return _save(figure, stem)


def covariance_cartoon(planes: Sequence[Mapping[str, Any]], stem: Path) -> list[Path]:
    """Two-standard-deviation ellipses of FFG, MVG and EMVG beside the full Gaussian, in planes of weights (Figure 1).

    Args:
        planes: each with the names of its two ``weights`` and a ``covariance``, 2×2, for each posterior.
        stem: path without suffix.
    """
    colors = {
        "full": "#444444",
        "FFG": COLORS["noisy-adam"],
        "MVG": COLORS["noisy-kfac"],
        "EMVG": COLORS["noisy-ekfac"],
    }
    figure, panels = _panels(len(planes), width=3.2, height=3.2)
    angle = np.linspace(0, 2 * math.pi, 200)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    for panel, plane in zip(panels, planes, strict=True):
        for name, covariance in plane["covariance"].items():
            values, vectors = np.linalg.eigh(np.asarray(covariance))
            x, y = 2 * vectors @ (np.sqrt(values)[:, None] * circle)
            style = {"color": colors[name], "label": name}
            if name == "full":
                panel.fill(x, y, alpha=0.18, lw=0, **style)
            else:
                panel.plot(x, y, lw=1.6, **style)
        panel.set(xlabel=plane["weights"][0], ylabel=plane["weights"][1])
    _label(figure, panels)
    return _save(figure, stem)


def scaling(layer: Mapping[str, Any], stem: Path) -> list[Path]:
    """The spectrum in the Kronecker basis: K-FAC's outer product against EK-FAC's second moments (Figure 2).

    Args:
        layer: ``kfac`` and ``ekfac``, both p×n, and the layer's ``name``.
        stem: path without suffix.
    """
    from matplotlib.colors import LogNorm

    kfac, ekfac = (np.asarray(layer[key])[::-1, ::-1] for key in ("kfac", "ekfac"))
    p, n = kfac.shape
    floor = float(np.quantile(np.concatenate([kfac.ravel(), ekfac.ravel()]), 0.05))
    floor = max(floor, 1e-12)
    norm = LogNorm(floor, max(kfac.max(), ekfac.max()))
    figure, panels = _panels(2, width=3.6, height=3.6)
    titles = (f"K-FAC: {p + n} numbers", f"EK-FAC: {p * n} numbers")
    for panel, matrix, title in zip(panels, (kfac, ekfac), titles, strict=True):
        image = panel.imshow(np.maximum(matrix, floor), norm=norm, aspect="auto", cmap="magma")
        panel.set(title=title, xlabel="input direction")
    panels[0].set_ylabel("output direction")
    figure.colorbar(image, ax=panels, label="second moment of the gradient", shrink=0.85)
    return _save(figure, stem)


def bars(groups: Mapping[str, Mapping[str, float]], stem: Path) -> list[Path]:
    """Horizontal bars of costs, a panel for each group; 1 is marked."""
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
    return _save(figure, stem)


def power_laws(panels_of: Mapping[str, tuple[Sequence[int], Mapping[str, Sequence[float]]]], stem: Path) -> list[Path]:
    """Milliseconds over sizes on logarithmic axes, a panel for each title, a line for each kind of cost."""
    figure, panels = _panels(len(panels_of), width=3.4, height=2.8)
    for panel, (title, (sizes, kinds)) in zip(panels, panels_of.items(), strict=True):
        for (kind, costs), color in zip(kinds.items(), COLORS.values(), strict=False):
            panel.plot(sizes, np.maximum(costs, 1e-3), "o-", ms=3, lw=1.2, color=color, label=kind)
        panel.set(xscale="log", yscale="log")
        panel.set_title(title, fontsize=8)
    _label(figure, panels, "size", "milliseconds")
    return _save(figure, stem)


def losses(panels_of: Mapping[str, Mapping[str, Sequence[float]]], smooth: int, stem: Path) -> list[Path]:
    """Training losses over steps, each point the mean of ``smooth``, a panel for each title, a line for each method."""
    figure, panels = _panels(len(panels_of), width=3.4, height=2.8)
    for panel, (title, methods) in zip(panels, panels_of.items(), strict=True):
        for method, loss in methods.items():
            count = max(1, len(loss) // smooth)
            means = [float(np.mean(part)) for part in np.array_split(np.asarray(loss), count)]
            panel.plot(
                [(i + 0.5) * len(loss) / count for i in range(count)],
                means,
                color=COLORS[method],
                label=LABELS[method],
                lw=1.2,
            )
        panel.set(title=title)
    _label(figure, panels, "step", "training loss")
    return _save(figure, stem)


def reliability(panels_of: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], stem: Path) -> list[Path]:
    """How often predictions of each confidence are right, a panel for each title, a line for each method."""
    figure, panels = _panels(len(panels_of), width=3.0, height=3.0)
    for panel, (title, methods) in zip(panels, panels_of.items(), strict=True):
        panel.plot([0, 1], [0, 1], color="#cccccc", lw=0.8)
        for method, bins in methods.items():
            held = [i for i, weight in enumerate(bins["weight"]) if weight > 0.002]
            points = [[bins[key][i] for i in held] for key in ("confidence", "accuracy")]
            panel.plot(*points, "o-", ms=2.5, lw=1.2, color=COLORS[method], label=LABELS[method])
        panel.set(title=title, xlim=(0, 1), ylim=(0, 1), aspect="equal")
    _label(figure, panels, "probability of the predicted class", "how often it is right")
    return _save(figure, stem)


def predicted(points: Mapping[str, Sequence[float]], stem: Path) -> list[Path]:
    """Predicted against true targets with intervals; and the parts of the predictive standard deviation.

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
    _label(figure, panels)
    return _save(figure, stem)


def spectra(layers: Mapping[str, Mapping[str, Sequence[float]]], stem: Path) -> list[Path]:
    """The sorted spectrum of R beside K-FAC's products, a panel for each layer."""
    figure, panels = _panels(len(layers), width=2.6, height=2.3)
    for panel, (name, layer) in zip(panels, layers.items(), strict=True):
        for key, color, text in (
            ("kfac", COLORS["noisy-kfac"], "K-FAC: Λ_S⊗Λ_A"),
            ("R", COLORS["noisy-ekfac"], "EK-FAC: R"),
        ):
            values = np.maximum(np.asarray(layer[key]), 1e-16)
            panel.plot(np.linspace(0, 1, len(values)), values, color=color, lw=1.2, label=text)
        panel.set(title=name, yscale="log")
    _label(figure, panels, "share of directions, flattest first", "second moment of the gradient")
    return _save(figure, stem)


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


def _label(figure: Any, panels: Sequence[Any], x: str = "", y: str = "") -> None:
    """Names of the axes, one legend for all panels, and room for both."""
    figure.supxlabel(x, fontsize=9)
    figure.supylabel(y, fontsize=9)
    known: dict[str, Any] = {}
    for panel in panels:
        known |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    columns = max(1, min(len(known), int(figure.get_figwidth() / 1.4)))
    figure.legend(known.values(), known.keys(), frameon=False, ncols=columns, loc="upper center", fontsize=9)
    rows = -(-len(known) // columns)
    figure.tight_layout(rect=(0, 0, 1, 1 - (0.15 + 0.2 * rows) / figure.get_figheight()))


def _save(figure: Any, stem: Path) -> list[Path]:
    from matplotlib import pyplot

    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path in paths:
        # Without a date and with fixed names inside, the same results give the same file.
        with pyplot.rc_context({"svg.hashsalt": stem.name}):
            kind = path.suffix[1:]
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            storage.write(path, functools.partial(figure.savefig, dpi=150, format=kind, metadata=metadata))
    pyplot.close(figure)
    return paths
