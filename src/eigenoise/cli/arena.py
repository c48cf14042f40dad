"""``eigenoise arena``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eigenoise.cli.base import Quiet, app, console, reported, rich_table, say


@app.command()
def arena(
    tasks: Annotated[list[str] | None, typer.Argument(help="Names of tasks; by default all.")] = None,
    method: Annotated[str, typer.Option(help="Methods, with commas between; by default all that are installed.")] = "",
    budget: Annotated[str, typer.Option(help="Multiples of each task's short time, with commas between.")] = "1,3,10",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for arena.json, tables and a picture.")] = Path("arena"),
    show: Annotated[bool, typer.Option("--show", help="Show the results so far, run nothing.")] = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods by how well they predict after equal CPU time: ours at their defaults, others tuned.

    Results are kept after each run; the same command goes on where it was stopped.

    Example: eigenoise arena fashion power --method noisy-ekfac,adamw --budget 1,3
    """
    import functools
    import warnings

    import torch

    from eigenoise import checks, storage
    from eigenoise.reporting.progress import watching
    from eigenoise.reporting.tables import markdown
    from eigenoise.studies.arena import run
    from eigenoise.studies.arena import show as showing
    from eigenoise.studies.arena.learners import METHODS
    from eigenoise.studies.arena.tasks import TASKS, named

    terminal = console(quiet)
    torch.set_num_threads(1)  # times are of one core
    with reported("arena", "runs that are done are kept"):
        names = [checks.choice("task", name, TASKS) for name in tasks or TASKS]
        methods = [checks.choice("method", name.strip(), METHODS) for name in method.split(",") if name.strip()]
        methods = methods or run.installed()
        try:
            budgets = [checks.integer("budget", int(text)) for text in budget.split(",")]
        except ValueError:
            raise ValueError(f"--budget: expected whole numbers with commas between, got {budget!r}") from None
        storage.folder(out)
        results = run.Results(out / "arena.json")
        load = functools.lru_cache(maxsize=2)(lambda task, seed: named(task).load(seed))
        todo = [] if show else list(run.wanted(names, methods, budgets, seeds))
        with watching(not quiet) as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # short runs are often no better than a guess
            task = watch.task("arena", len(todo) or None)
            for number, one in enumerate(todo, 1):
                if not results.has(one):
                    results.execute(one, load)
                task.to(number, results.key(one))
            task.end()
        tables = showing.grids(results.content)
        for grid in tables:
            terminal.print(rich_table(grid))
        storage.write_text(out / "arena.md", markdown(tables))
        for path in (out / "arena.md", *showing.draw(results.content, out)):
            say(terminal, f"written: {path}")
