"""The command line: ``eigenoise demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eigenoise.version import __version__

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from eigenoise.demo import Result

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo"),
    epochs: Annotated[int, typer.Option(min=2, help="Passes over the data.")] = 150,
    splits: Annotated[int, typer.Option(min=1, help="Random train/test splits, trained all at once.")] = 10,
) -> None:
    """Train BBB, noisy Adam, noisy K-FAC and noisy EK-FAC on the Boston housing table and compare them.

    Example: eigenoise demo --epochs 150 --out demo
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from eigenoise import data
    from eigenoise.demo import METHODS, Settings, draw, run

    console = Console()
    settings = Settings(epochs=epochs, splits=splits)
    try:
        out.mkdir(parents=True, exist_ok=True)
        table = data.boston()
    except (OSError, ImportError) as error:
        typer.echo(f"eigenoise demo: {error}", err=True)
        raise typer.Exit(2) from error
    console.print(
        f"Boston housing: {len(table.y)} rows, {table.x.shape[1]} inputs; {splits} random 90/10 splits at once, "
        f"{settings.hidden} hidden units, batch {settings.batch_size}, {epochs} epochs"
    )
    columns = (TextColumn("{task.description:14}"), BarColumn(), TextColumn("ELBO {task.fields[elbo]}"))
    results = []
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for method in METHODS:
            task = progress.add_task(method, total=epochs, elbo="")

            def advance(epoch: int, elbo: float, task: TaskID = task) -> None:
                progress.update(task, completed=epoch, elbo=f"{elbo:7.3f}")

            results.append(run(method, table, settings, advance))
    console.print(_table(results))
    for path in draw(results, out):
        console.print(f"picture: {path}")


def _table(results: list[Result]) -> Table:
    from rich.table import Table

    table = Table(title="Test parts, mean ± standard error over splits (price in 1000 $)")
    for heading in ("method", "RMSE", "log-lik.", "90 % cover", "ELBO", "s"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for result in results:
        table.add_row(
            result.method,
            _mean_and_error(result.rmse),
            _mean_and_error(result.log_likelihood),
            f"{result.coverage.mean():.0%}",
            f"{result.curve[-1][1]:.3f}",
            f"{result.seconds:.0f}",
        )
    return table


def _mean_and_error(values: Tensor) -> str:
    if len(values) < 2:
        return f"{values.mean():.3f}"
    return f"{values.mean():.3f} ± {values.std() / len(values) ** 0.5:.3f}"


if __name__ == "__main__":
    app()
