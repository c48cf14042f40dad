"""One self-contained page from whatever results are in a folder: tables, pictures, no network, light and dark."""

from __future__ import annotations

import base64
import functools
import html
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eigenoise import storage
from eigenoise.reporting import figures
from eigenoise.reporting.tables import Grid
from eigenoise.studies.bench import show as bench_show
from eigenoise.studies.classification import report as vision_show
from eigenoise.studies.regression import report
from eigenoise.tabular.learning import Learned
from eigenoise.version import __version__

VARIANTS = tuple(f"{preset}{kind}" for preset in ("best", "paper", "elbo") for kind in ("", "-random"))
LAYERS = 12  # whose spectra are drawn

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --paper: #ffffff; --line: #d8d8dc; --soft: #f4f4f6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --paper: #17181b; --line: #3a3b40; --soft: #222327; }
  img { filter: invert(0.91) hue-rotate(180deg); } }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin-bottom: 0.3rem; }
nav a { margin-right: 1rem; } a { color: inherit; }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
thead th { background: var(--soft); }
img { display: block; max-width: 100%; height: auto; margin: 0.5rem 0; }
footer { margin-top: 3rem; font-size: 0.8rem; opacity: 0.7; }
"""

Draw = Callable[[Path], Sequence[Path]]


def build(folder: Path) -> str:
    """The page of all results in ``folder``.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if it holds no results.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    try:
        sections = [section for reader in (_regression, _classification, _tables, _speed) for section in reader(folder)]
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} holds a file that looks like results but is none: {error!r}") from error
    if not sections:
        raise ValueError(f"{folder} holds no results of eigenoise uci, cifar10, fit or bench")
    links = "".join(f'<a href="#s{i}">{html.escape(title)}</a>' for i, (title, _) in enumerate(sections))
    bodies = "".join(f'<h2 id="s{i}">{html.escape(title)}</h2>{body}' for i, (title, body) in enumerate(sections))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>eigenoise: {html.escape(folder.name)}</title><style>{STYLE}</style></head><body>"
        f"<h1>Results in {html.escape(folder.name)}</h1><nav>{links}</nav>{bodies}"
        f"<footer>eigenoise {__version__}; all pictures and tables are drawn from the files in the folder.</footer>"
        "</body></html>\n"
    )


def write(folder: Path, out: Path) -> None:
    """The page of ``folder`` as a file."""
    storage.write_text(out, build(folder))


Section = tuple[str, str]  # its title and its HTML


def _regression(folder: Path) -> Iterator[Section]:
    for variant in VARIANTS:
        results = report.collect(folder, variant)
        if not results:
            continue
        table = report.by_set(results)
        body = _grids(report.grids(results))
        body += _picture("Training", functools.partial(figures.training_curves, table))
        body += _picture("Calibration of intervals", functools.partial(figures.calibration, table))
        yield f"Regression, preset {variant}", body


def _classification(folder: Path) -> Iterator[Section]:
    results = vision_show.collect(folder)
    if not results:
        return
    vision_show.check_comparable(results, str(folder))
    body = _grids(vision_show.grids(results))
    body += _picture("Training", functools.partial(vision_show.curves, results))
    body += _picture("Reliability of probabilities", functools.partial(vision_show.reliability, results))
    known = [result for result in results if result.get("spectra")]
    if known:
        own = known[-1]
        name = f"{figures.LABELS[own['settings']['method']]}, {own['settings']['setting']}"
        body += _spectra(own["spectra"], name)
    yield "Classification of CIFAR-10", body


def _tables(folder: Path) -> Iterator[Section]:
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".model", ".safetensors") or not path.is_file():
            continue
        try:
            learned = Learned.load(path)
        except ValueError:
            continue  # a posterior of something else
        body = _grids([learned.grid()])
        details = learned.details
        if "points" in details:
            body += _picture(
                "Predicted against true, and where the variance comes from",
                functools.partial(figures.predicted, details["points"]),
            )
        if "reliability" in details:
            bins = {_literal(learned.schema.target): {learned.estimator.method: details["reliability"]}}
            body += _picture("Reliability of probabilities", functools.partial(figures.reliability, bins))
        if details.get("spectra"):
            body += _spectra(details["spectra"], path.name)
        yield f"{learned.schema.target} ({path.name})", body


def _speed(folder: Path) -> Iterator[Section]:
    path = folder / "bench.json"
    if path.is_file():
        yield "What a step costs", _grids(bench_show.grids(json.loads(path.read_text())))


def _literal(text: str) -> str:
    """For a picture's title, where dollars would begin mathematics."""
    return text.replace("$", r"\$")


def _spectra(layers: dict[str, Any], name: str) -> str:
    some = dict(list(layers.items())[:LAYERS])
    return _picture(f"Spectra of {name}: R against K-FAC's eigenvalues", functools.partial(figures.spectra, some))


def _grids(grids: Sequence[Grid]) -> str:
    return "".join(f"<h3>{html.escape(grid.title)}</h3>{_table(grid)}" for grid in grids)


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in grid.header)
    rows = []
    for i, row in enumerate(grid.rows):
        cells = [html.escape(cell) for cell in row]
        marked = [f"<b>{cell}</b>" if (i, j) in grid.bold else cell for j, cell in enumerate(cells)]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in marked) + "</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _picture(title: str, draw: Draw) -> str:
    """A picture within the page; each is an image of its own, so that names inside do not meet."""
    with tempfile.TemporaryDirectory() as scratch:
        paths = draw(Path(scratch) / "picture")
        content = next(path for path in paths if path.suffix == ".svg").read_bytes()
    code = base64.b64encode(content).decode()
    return f'<h3>{html.escape(title)}</h3><img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{code}">'
