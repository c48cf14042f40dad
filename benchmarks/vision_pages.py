"""Draw the classification study's pictures and write its tables into the docs, from committed result files alone.

To be run when ``make classification`` has written new results:

    python benchmarks/vision_pages.py

A test compares the page with the files.
"""

from __future__ import annotations

from pathlib import Path

import tune_cifar10

from eigenoise import storage
from eigenoise.reporting.figures import LABELS
from eigenoise.reporting.tables import Grid, markdown
from eigenoise.studies.classification import report
from eigenoise.studies.recipes import SETTINGS

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"
SECTIONS = {
    "cifar10": "Four methods in four settings",
    "cifar10_long": "A longer run",
}


def budget(results: list[dict]) -> str:
    """What every run of a section had, in a sentence."""
    own = results[0]["settings"]
    width = f"{own['width']:g} of VGG16's width"
    return (
        f"{own['steps']:,} steps of {own['batch_size']} images ({results[0]['epochs']:.1f} epochs of "
        f"{own['train_size']:,} images), {width}, {own['samples']} weight samples in the test.\n"
    )


def tried() -> Grid:
    """All candidates with their log-likelihood and accuracy on held-out images, the chosen ones bold."""
    rows, bold = [], set()
    for method in tune_cifar10.METHODS:
        for setting in SETTINGS:
            best = tune_cifar10.chosen(method, setting)
            for options, likelihood, accuracy in tune_cifar10.scored(method, setting):
                if options == best:
                    bold.add((len(rows), 3))
                words = ", ".join(f"{name} {value}" for name, value in options.items())
                rows.append([LABELS[method], setting.name, words, f"{likelihood:.4f}", f"{accuracy:.1%}"])
    heading = ["method", "setting", "tried", "log-likelihood", "right"]
    title = (
        f"What was tried: {tune_cifar10.STEPS} steps on 5,000 images, a quarter of VGG16's width if no other is named, "
        "5,000 held-out images"
    )
    return Grid(title, heading, rows, frozenset(bold))


def page() -> str:
    """The tables of all sections, in Markdown."""
    parts = [
        "# Results of the classification study\n",
        "Written by `python benchmarks/vision_pages.py` from the files in `benchmarks/results`, which "
        "`make classification` and `python benchmarks/tune_cifar10.py` wrote; what they mean is in "
        "[the classification study](classification.md).\n",
    ]
    for folder, title in SECTIONS.items():
        results = report.collect(RESULTS / folder)
        if results:
            parts += [f"## {title}\n", budget(results), markdown(report.grids(results))]
    parts += ["## How λ, η and the step size were chosen\n", tried().markdown()]
    return "\n".join(parts)


def main() -> None:
    for folder in SECTIONS:
        results = report.collect(RESULTS / folder)
        if results:
            report.pictures(results, DOCS / "images", f"{folder}-")
    storage.write_text(DOCS / "classification_results.md", page())


if __name__ == "__main__":
    main()
