"""``eigenoise demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eigenoise.cli.base import Quiet, app, console, reported, rich_table, say, show_epoch


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo"),
    epochs: Annotated[int, typer.Option(min=2, help="Number of epochs.")] = 150,
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
    from eigenoise.studies.demo import draw, grid, run

    terminal = console(quiet)
    torch.set_num_threads(1)  # matrices this small only wait for a second thread
    with reported("demo"):
        storage.folder(out)
        table, about = data.boston(), data.uci.info("boston")
        say(
            terminal,
            f"Boston housing: {len(table.y)} rows, {table.x.shape[1]} inputs; {splits} random 90/10 splits at once, "
            f"{about.hidden} hidden units, batch {about.batch_size}, {epochs} epochs",
        )
        results = []
        with watching(not quiet) as watch:
            for method in BAYESIAN:
                task = watch.task(LABELS[method], epochs)
                results.append(run(method, table, epochs=epochs, splits=splits, on_epoch=show_epoch(task)))
                task.end()
        terminal.print(rich_table(grid(results)))
        for path in draw(results, out):
            say(terminal, f"picture: {path}")
