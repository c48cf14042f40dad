"""``eigenoise bench``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eigenoise.cli.base import Quiet, app, console, reported, rich_table, say

if TYPE_CHECKING:
    from eigenoise.reporting.progress import Task


def _seen(task: Task, count: Iterator[int], name: str) -> None:
    """Shows that one more is done."""
    task.to(next(count), name)


@app.command()
def bench(
    cases: Annotated[
        list[str] | None, typer.Argument(help="Cases among a, b, c, c+bn, c+bf16 and d; by default all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of timings of each method.")] = 5,
    peers: Annotated[bool, typer.Option(help="Time other installed libraries as well.")] = True,
    memory: Annotated[bool, typer.Option(help="Measure peak memory as well, each method in a new process.")] = True,
    growth: Annotated[
        bool, typer.Option(help="Measure how the cost grows with width, batch, depth, splits, samples.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="An older result to compare with; exit code 1 if a cost grew.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench.json, tables and pictures.")] = Path("bench"),
    quiet: Quiet = False,
) -> None:
    """Time a training step of every method as a ratio to SGD with momentum on the same model in the same run.

    Cases that were timed before and are in the folder stay there.

    Example: eigenoise bench a b --rounds 9 --out bench
    """
    import json

    import torch

    from eigenoise import checks, storage
    from eigenoise.reporting.progress import watching
    from eigenoise.reporting.tables import markdown
    from eigenoise.studies.bench import run, show
    from eigenoise.studies.bench.cases import CASES

    terminal = console(quiet)
    torch.set_num_threads(1)  # ratios are of CPU time on one core
    with reported("bench", "cases that were timed are kept"):
        names = [checks.choice("case", name, CASES) for name in cases or CASES]
        before = None if against is None else json.loads(against.read_text())
        if before is not None and not (isinstance(before, dict) and "cases" in before):
            raise ValueError(f"--against: expected a result of this command, got {against}")
        storage.folder(out)
        with watching(not quiet) as watch:
            results = run.begun(out / "bench.json")
            for part in run.parts(names, rounds=rounds, peers=peers, memory=memory, growth=growth):
                task = watch.task(part.title, part.steps)
                part.run(results, partial(_seen, task, itertools.count(1)))
                task.end()
                storage.write_json(out / "bench.json", results)
        for grid in show.grids(results):
            terminal.print(rich_table(grid))
        storage.write_text(out / "bench.md", markdown(show.grids(results)))
        for path in (out / "bench.json", out / "bench.md", *show.pictures(results, out)):
            say(terminal, f"written: {path}")
    if before is not None:
        lines = show.grown(results, before)
        for line in lines:
            typer.echo(line, err=True)
        say(terminal, f"{len(lines)} grew since {against}" if lines else f"nothing grew since {against}")
        if lines:
            raise typer.Exit(1)
