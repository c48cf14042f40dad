"""Draw the regression study's pictures and write its tables into the docs, from committed result files alone.

To be run when ``eigenoise uci`` has written new results:

    python benchmarks/study_pages.py

A test compares the page with the files.
"""

from __future__ import annotations

import json
from pathlib import Path

from eigenoise import storage
from eigenoise.reporting import figures
from eigenoise.reporting.tables import markdown
from eigenoise.studies.regression import report

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"
SECTIONS = {
    "best": "Preset `best`: settings chosen on training parts, canonical splits",
    "best-random": "Preset `best` on random splits, as the paper has them",
    "paper": "Preset `paper`: the paper's settings, ten random splits, 1000 epochs",
    "elbo": "Preset `elbo`: λ = 1 and exact damping for all, canonical splits",
}


def page() -> str:
    """The tables of all presets, in Markdown."""
    parts = [
        "# Results of the regression study\n",
        "Written by `python benchmarks/study_pages.py` from the files in `benchmarks/results/uci`, which "
        "`eigenoise uci --preset PRESET --out benchmarks/results/uci` wrote; what they mean is in "
        "[the regression study](regression.md).\n",
    ]
    for variant, title in SECTIONS.items():
        parts += [f"## {title}\n", markdown(report.grids(report.collect(RESULTS / "uci", variant)))]
    return "\n".join(parts)


def main() -> None:
    images = DOCS / "images"
    for preset in ("best", "paper", "elbo"):
        table = report.by_set(report.collect(RESULTS / "uci", preset))
        figures.training_curves(table, images / f"curves-{preset}")
        if preset == "best":
            figures.calibration(table, images / f"calibration-{preset}")
    covariances = json.loads((RESULTS / "covariances.json").read_text())
    figures.covariance_cartoon(covariances["planes"], images / "posteriors")
    figures.scaling(covariances["layer"], images / "scaling")
    storage.write_text(DOCS / "results.md", page())


if __name__ == "__main__":
    main()
