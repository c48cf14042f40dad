"""``eigenoise uci``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eigenoise.cli.base import (
    DataCache,
    Quiet,
    TensorBoard,
    app,
    board_for,
    console,
    reported,
    rich_table,
    say,
    show_epoch,
)


@app.command()
def uci(
    sets: Annotated[list[str] | None, typer.Argument(help="UCI sets; by default all that are available.")] = None,
    method: Annotated[
        str, typer.Option(help="One or more methods, separated by commas.")
    ] = "noisy-ekfac,noisy-kfac,noisy-adam,bbb",
    preset: Annotated[str, typer.Option(help="Settings: best, paper or elbo.")] = "best",
    splits: Annotated[int | None, typer.Option(min=1, help="Number of splits; by default the paper's.")] = None,
    canonical: Annotated[
        bool | None,
        typer.Option(
            "--canonical/--random", help="The published splits, or random ones by seed; by default the preset's."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs; by default the preset's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results; a stopped run continues there.")] = Path("results"),
    folder: DataCache = None,
    tensorboard: TensorBoard = None,
    quiet: Quiet = False,
) -> None:
    """Regression on UCI sets, beside the paper's Table 1: tables here and in Markdown, results as JSON, pictures.

    Example: eigenoise uci yacht boston --method noisy-ekfac,bbb --epochs 100 --out results
    """
    import torch

    from eigenoise import checks, storage
    from eigenoise.optim.methods import BAYESIAN
    from eigenoise.reporting.progress import watching
    from eigenoise.studies.data import uci as uci_data
    from eigenoise.studies.recipes import PRESETS
    from eigenoise.studies.regression import report
    from eigenoise.studies.regression.study import Run, run_uci

    terminal = console(quiet)
    torch.set_num_threads(1)  # matrices this small only wait for a second thread
    results: list[dict] = []
    diverged = 0
    with reported("uci", "the same command continues from the last checkpoint"):
        settings = PRESETS[checks.choice("--preset", preset, PRESETS)]
        methods = [checks.choice("--method", word.strip(), BAYESIAN) for word in method.split(",")]
        names = sets or [name for name in uci_data.SETS if uci_data.presence(name, folder) != "no"]
        runs = [Run(name, m, settings, splits, epochs, canonical) for name in names for m in methods]
        for run in runs:  # report bad settings and old results of any run before the first begins
            run.result(out)
        storage.folder(out)
        with watching(not quiet) as watch:
            for run in runs:
                task = watch.task(run.name, run.recipe().epochs)
                with board_for(tensorboard, run.name) as board:
                    try:
                        results.append(run_uci(run, out, folder, show_epoch(task, board)))
                        task.end()
                    except checks.NotFiniteError as error:  # the others may yet succeed
                        task.end("diverged")
                        typer.echo(f"eigenoise uci: {run.name} diverged: {error}", err=True)
                        diverged += 1
        if results:
            for grid in report.grids(results):
                terminal.print(rich_table(grid))
            for path in report.write(out, runs[0].variant):
                say(terminal, f"written: {path}")
    if diverged:
        raise typer.Exit(1)
