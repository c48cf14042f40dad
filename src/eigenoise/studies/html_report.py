"""The HTML page of whatever results are in a folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eigenoise import storage
from eigenoise.reporting import figures
from eigenoise.reporting.html_report import Figure, Section, render
from eigenoise.studies.bench import show as bench_report
from eigenoise.studies.classification import report as classification_report
from eigenoise.studies.recipes import PRESETS
from eigenoise.studies.regression import report as regression_report
from eigenoise.tabular.learning import Learned

MAX_SPECTRA = 12  # layers


def build(folder: Path) -> str:
    """Returns the page of all results in ``folder``.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if it holds no results.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    try:
        readers = (_regression, _classification, _tables, _bench)
        sections = [section for reader in readers for section in reader(folder)]
    except (KeyError, TypeError, IndexError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} holds a file that looks like a result but is not: {error!r}") from error
    if not sections:
        raise ValueError(f"{folder} holds no results of eigenoise uci, cifar10, fit or bench")
    return render(folder.name, sections)


def write(folder: Path, out: Path) -> None:
    """Writes the page of ``folder`` to the file ``out``."""
    storage.write_text(out, build(folder))


def _regression(folder: Path) -> Iterator[Section]:
    for preset, kind in itertools.product(PRESETS, ("", "-random")):
        results = regression_report.collect(folder, preset + kind)
        if results:
            table = regression_report.by_set(results)
            drawn = [
                Figure.draw("Training", figures.training_curves, table),
                Figure.draw("Calibration of intervals", figures.calibration, table),
            ]
            yield Section(f"Regression, preset {preset}{kind}", regression_report.grids(results), drawn)


def _classification(folder: Path) -> Iterator[Section]:
    results = classification_report.collect(folder)
    if not results:
        return
    classification_report.check_comparable(results, str(folder))
    drawn = [
        Figure.draw("Training", classification_report.curves, results),
        Figure.draw("Reliability of probabilities", classification_report.reliability, results),
    ]
    with_spectra = [result for result in results if result.get("spectra")]
    if with_spectra:
        settings = with_spectra[-1]["settings"]
        name = f"{figures.LABELS[settings['method']]}, {settings['setting']}"
        drawn.append(_spectra(with_spectra[-1]["spectra"], name))
    yield Section("Classification of CIFAR-10", classification_report.grids(results), drawn)


def _tables(folder: Path) -> Iterator[Section]:
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".model", ".safetensors") or not path.is_file():
            continue
        try:
            learned = Learned.load(path)
        except ValueError:
            continue  # a posterior of something else
        details, drawn = learned.details, []
        if "points" in details:
            title = "Predicted against true, and where the variance comes from"
            drawn.append(Figure.draw(title, figures.predicted, details["points"]))
        if "reliability" in details:
            target = learned.schema.target.replace("$", r"\$")  # dollars would begin mathematics in a figure's title
            bins = {target: {learned.estimator.method: details["reliability"]}}
            drawn.append(Figure.draw("Reliability of probabilities", figures.reliability, bins))
        if details.get("spectra"):
            drawn.append(_spectra(details["spectra"], path.name))
        yield Section(f"{learned.schema.target} ({path.name})", [learned.grid()], drawn)


def _bench(folder: Path) -> Iterator[Section]:
    path = folder / "bench.json"
    if path.is_file():
        yield Section("What a step costs", bench_report.grids(json.loads(path.read_text())))


def _spectra(layers: Mapping[str, Any], name: str) -> Figure:
    first = dict(itertools.islice(layers.items(), MAX_SPECTRA))
    return Figure.draw(f"Spectra of {name}: R against K-FAC's eigenvalues", figures.spectra, first)
