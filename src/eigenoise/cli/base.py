"""What all commands share: the app itself, a terminal to print on, tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eigenoise.version import __version__

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from eigenoise.reporting.tables import Grid

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
Folder = Annotated[Path | None, typer.Option(help="Folder for TensorBoard's curves and histograms.")]


def console(quiet: bool = False) -> Console:
    """A terminal as wide as it is, a file or pipe wide enough for every table."""
    from rich.console import Console

    found = Console(quiet=quiet)
    return found if found.is_terminal else Console(width=140, quiet=quiet)


def say(terminal: Console, text: str) -> None:
    """Print a line as it is: paths may have brackets in them."""
    terminal.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def reported(command: str, hint: str = "") -> Iterator[None]:
    """Within the block errors become a message on stderr and an exit code: diverged 1, bad input 2, stopped 130."""
    from eigenoise import checks

    try:
        yield
    except checks.NotFiniteError as error:
        typer.echo(f"eigenoise {command}: diverged: {error}", err=True)
        raise typer.Exit(1) from error
    except typer.Exit:
        raise
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        typer.echo(f"eigenoise {command}: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo(f"eigenoise {command}: stopped{hint and '; ' + hint}", err=True)
        raise typer.Exit(130) from None


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
