"""A self-contained HTML page of tables and figures: no network, light and dark."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from eigenoise.reporting.tables import Grid
from eigenoise.version import __version__


@dataclass(frozen=True)
class Figure:
    """A figure within the page; ``source`` is a data URL."""

    title: str
    source: str

    @classmethod
    def draw(cls, title: str, draw: Callable[[Any, Path], Sequence[Path]], content: Any) -> Figure:
        """Embeds the SVG file that ``draw`` writes for ``content`` and a path without suffix.

        Each figure is a separate image, so that identifiers inside do not clash.
        """
        with tempfile.TemporaryDirectory() as folder:
            paths = draw(content, Path(folder) / "figure")
            svg = next(path for path in paths if path.suffix == ".svg").read_bytes()
        return cls(title, f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}")


@dataclass(frozen=True)
class Section:
    """A part of the page: a title, tables, then figures."""

    title: str
    grids: Sequence[Grid]
    figures: Sequence[Figure] = ()


def render(name: str, sections: Sequence[Section]) -> str:
    """Returns the page of the results called ``name``; all text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("eigenoise.reporting"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(name=name, sections=sections, version=__version__)
