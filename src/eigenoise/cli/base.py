"""What all commands share: the app itself, a terminal to print on, tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eigenoise.version import __version__

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from eigenoise.report import Grid

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
Folder = Annotated[Path | None, typer.Option(help="Folder for TensorBoard's curves and histograms.")]


def console(quiet: bool = False) -> Console:
    """A terminal as wide as it is, a file or pipe wide enough for every table."""
    from rich.console import Console

    found = Console(quiet=quiet)
    return found if found.is_terminal else Console(width=140, quiet=quiet)


def rich_table(grid: Grid) -> Table:
    """A grid for the terminal."""
    from rich.table import Table

    table = Table(title=grid.title)
    for j, heading in enumerate(grid.header):
        table.add_column(heading, justify="right" if j else "left")
    for i, row in enumerate(grid.rows):
        cells = [row[0], *(cell.replace(" (", "\n(") for cell in row[1:])]  # the paper's number below ours
        table.add_row(*(f"[bold]{cell}[/]" if (i, j) in grid.bold else cell for j, cell in enumerate(cells)))
    return table


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eigenoise {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and end.")
    ] = False,
) -> None:
    """Bayesian neural networks by noisy natural gradient."""
