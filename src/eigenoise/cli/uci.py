"""``eigenoise uci``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eigenoise.cli.base import app, console, rich_table

if TYPE_CHECKING:
    from rich.progress import TaskID


@app.command()
def uci(
    sets: Annotated[list[str] | None, typer.Argument(help="UCI sets; all that are at hand if none is named.")] = None,
    method: Annotated[str, typer.Option(help="One or more, with commas.")] = "noisy-ekfac,noisy-kfac,noisy-adam,bbb",
    preset: Annotated[str, typer.Option(help="Settings: best, paper or elbo.")] = "best",
    splits: Annotated[int | None, typer.Option(min=1, help="How many splits; the paper's number by default.")] = None,
    canonical: Annotated[
        bool | None,
        typer.Option(
            "--canonical/--random", help="The published splits, or random ones by seed; by default the preset's."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the preset's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results; a stopped run continues there.")] = Path("results"),
    folder: Annotated[Path | None, typer.Option("--data", help="The data cache.")] = None,
) -> None:
    """Regression on UCI sets, beside the paper's Table 1: tables here and in Markdown, results as JSON, pictures.

    Example: eigenoise uci yacht boston --method noisy-ekfac,bbb --epochs 100 --out results
    """
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from eigenoise import atomic, checks, report
    from eigenoise.data import uci as uci_data
    from eigenoise.experiments import Run, finished, run_uci
    from eigenoise.presets import METHODS, PRESETS

    terminal = console()
    torch.set_num_threads(1)  # matrices this small only wait for a second thread
    results: list[dict] = []
    failed = 0
    try:
        settings = PRESETS[checks.choice("--preset", preset, PRESETS)]
        methods = [checks.choice("--method", word.strip(), METHODS) for word in method.split(",")]
        names = sets or [name for name in uci_data.SETS if uci_data.presence(name, folder) != "no"]
        runs = [Run(name, m, settings, splits, epochs, canonical) for name in names for m in methods]
        for run in runs:  # whatever is wrong with the settings or old results of any is said before the first begins
            run.settings()
            finished(run, out)
        atomic.folder(out)
        columns = (TextColumn("{task.description:24}"), BarColumn(), TextColumn("ELBO {task.fields[elbo]}"))
        with Progress(*columns, TimeRemainingColumn(), console=terminal) as progress:
            for run in runs:
                task = progress.add_task(run.name, total=None, elbo="")

                def advance(epoch: int, total: int, elbo: float, task: TaskID = task) -> None:
                    progress.update(task, completed=epoch, total=total, elbo=f"{elbo:7.3f}")

                try:
                    results.append(run_uci(run, out, folder, advance))
                except checks.NotFiniteError as error:  # the others may yet succeed
                    typer.echo(f"eigenoise uci: {run.name} diverged: {error}", err=True)
                    failed += 1
                progress.remove_task(task)
        if results:
            for grid in report.grids(results):
                terminal.print(rich_table(grid))
            for path in report.write(out, runs[0].variant):
                terminal.print(f"written: {path}")
    except (OSError, ValueError, ImportError) as error:
        typer.echo(f"eigenoise uci: {error}", err=True)
        for result in results:
            typer.echo(f"done before: {result['settings']['set']}, {result['settings']['method']}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo("eigenoise uci: stopped; the same command continues from the last checkpoint", err=True)
        raise typer.Exit(130) from None
    if failed:
        raise typer.Exit(1)
