"""``eigenoise demo``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eigenoise.cli.base import Quiet, app, console, reported, say

if TYPE_CHECKING:
    from rich.table import Table

    from eigenoise.reporting.progress import Task
    from eigenoise.studies.demo import Result


def _seen(task: Task, epoch: int, elbo: float) -> None:
    """Show how far a method is."""
    task.to(epoch, f"ELBO {elbo:.3f}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo"),
    epochs: Annotated[int, typer.Option(min=2, help="Passes over the data.")] = 150,
    splits: Annotated[int, typer.Option(min=1, help="Random train/test splits, trained all at once.")] = 10,
    quiet: Quiet = False,
) -> None:
    """Train BBB, noisy Adam, noisy K-FAC and noisy EK-FAC on the Boston housing table and compare them.

    Example: eigenoise demo --epochs 150 --out demo
    """
    import torch

    from eigenoise import storage
    from eigenoise.optim.methods import BAYESIAN
    from eigenoise.reporting.figures import LABELS
    from eigenoise.reporting.progress import watching
    from eigenoise.studies import data
    from eigenoise.studies.demo import Settings, draw, run

    terminal = console(quiet)
    torch.set_num_threads(1)  # matrices this small only wait for a second thread
    settings = Settings(epochs=epochs, splits=splits)
    with reported("demo"):
        storage.folder(out)
        table = data.boston()
        say(
            terminal,
            f"Boston housing: {len(table.y)} rows, {table.x.shape[1]} inputs; {splits} random 90/10 splits at once, "
            f"{settings.hidden} hidden units, batch {settings.batch_size}, {epochs} epochs",
        )
        results = []
        with watching(not quiet) as watch:
            for method in BAYESIAN:
                task = watch.task(LABELS[method], epochs)
                results.append(run(method, table, settings, partial(_seen, task)))
                task.end()
        terminal.print(_table(results))
        for path in draw(results, out):
            say(terminal, f"picture: {path}")


def _table(results: list[Result]) -> Table:
    from rich.table import Table

    from eigenoise.reporting.figures import LABELS
    from eigenoise.reporting.tables import mean_and_error

    table = Table(title="Test parts, mean ± standard error over splits (price in 1000 $)")
    for heading in ("method", "RMSE", "log-lik.", "90 % cover", "ELBO", "s"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for result in results:
        table.add_row(
            LABELS[result.method],
            mean_and_error(result.rmse.tolist()),
            mean_and_error(result.log_likelihood.tolist()),
            f"{result.coverage.mean():.0%}",
            f"{result.curve[-1][1]:.3f}",
            f"{result.seconds:.0f}",
        )
    return table
