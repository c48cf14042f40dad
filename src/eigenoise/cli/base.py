"""What all commands share: the app, a terminal to print on, tables, progress of training, errors."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eigenoise.version import __version__

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from eigenoise.reporting.progress import Task
    from eigenoise.reporting.tables import Grid
    from eigenoise.reporting.tensorboard import Board
    from eigenoise.studies.regression.training import Training

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
TensorBoard = Annotated[Path | None, typer.Option(help="Folder for TensorBoard's curves and histograms.")]
DataCache = Annotated[Path | None, typer.Option("--data", help="The data cache.")]


def console(quiet: bool = False) -> Console:
    """Returns a console with the terminal's width, or wide enough for every table in a file or pipe."""
    from rich.console import Console

    terminal = Console(quiet=quiet)
    return terminal if terminal.is_terminal else Console(width=140, quiet=quiet)


def say(terminal: Console, text: str) -> None:
    """Prints a line without markup, as paths may have brackets in them, and without control characters from files."""
    terminal.print(printable(text), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def reported(command: str, hint: str = "") -> Iterator[None]:
    """Turns errors within the block into a message on stderr and an exit code: diverged 1, bad input 2, stopped 130."""
    from eigenoise import checks

    try:
        yield
    except checks.NotFiniteError as error:
        typer.echo(printable(f"eigenoise {command}: diverged: {error}"), err=True)
        raise typer.Exit(1) from error
    except typer.Exit:
        raise
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        typer.echo(printable(f"eigenoise {command}: {error}"), err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo(f"eigenoise {command}: stopped{hint and '; ' + hint}", err=True)
        raise typer.Exit(130) from None


def printable(text: str) -> str:
    """Escapes characters by which text from a file could command the terminal; line ends and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def rich_table(grid: Grid) -> Table:
    """Formats a grid for the terminal."""
    from rich.table import Table

    table = Table(title=printable(grid.title))
    for j, heading in enumerate(grid.header):
        table.add_column(printable(heading), justify="right" if j else "left")
    for i, row in enumerate(grid.rows):
        cells = [
            printable(cell) for cell in (row[0], *(cell.replace(" (", "\n(") for cell in row[1:]))
        ]  # paper's below ours
        table.add_row(*(f"[bold]{cell}[/]" if (i, j) in grid.bold else cell for j, cell in enumerate(cells)))
    return table


def check_out_file(out: Path, *inputs: Path) -> None:
    """Raises before any work is done if ``out`` cannot be written or is one of the files that are read."""
    from eigenoise import storage

    storage.folder(out.parent)
    if out.is_dir():
        raise ValueError(f"--out: expected a file, got the folder {out}")
    for path in inputs:
        if out.exists() and path.exists() and out.samefile(path):
            raise ValueError(f"--out: expected another file than {path}, which would be lost")


def board_for(folder: Path | None, name: str) -> AbstractContextManager[Board | None]:
    """Opens the TensorBoard folder of a run, or nothing without ``folder``."""
    if folder is None:
        return nullcontext()
    from eigenoise.reporting.tensorboard import Board

    return Board(folder / name)


def show_epoch(task: Task, board: Board | None = None) -> Callable[[Training], None]:
    """Returns a callback that shows each epoch of a regression as progress of ``task`` and on ``board``."""

    def show(training: Training) -> None:
        epoch, epochs, elbo = len(training.curve), training.recipe.epochs, training.curve[-1]
        task.to(epoch, f"ELBO {elbo:.3f}")
        if board is not None:
            board.scalars(epoch, elbo=elbo)
            if epoch % max(1, epochs // 10) == 0:
                board.histograms(epoch, training.optimizer)

    return show


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eigenoise {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Bayesian neural networks by noisy natural gradient."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C, so that there is a message
