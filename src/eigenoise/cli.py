"""The command line: ``eigenoise demo | uci | bench | data``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eigenoise.version import __version__

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

    from eigenoise.demo import Result
    from eigenoise.report import Grid

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _console() -> Console:
    """A terminal as wide as it is, a file or pipe wide enough for every table."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)


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
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from eigenoise import atomic, data
    from eigenoise.demo import Settings, draw, run
    from eigenoise.figures import LABELS
    from eigenoise.presets import METHODS

    console = _console()
    torch.set_num_threads(1)  # matrices this small only wait for a second thread
    settings = Settings(epochs=epochs, splits=splits)
    try:
        atomic.folder(out)
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
            task = progress.add_task(LABELS[method], total=epochs, elbo="")

            def advance(epoch: int, elbo: float, task: TaskID = task) -> None:
                progress.update(task, completed=epoch, elbo=f"{elbo:7.3f}")

            results.append(run(method, table, settings, advance))
    console.print(_table(results))
    for path in draw(results, out):
        console.print(f"picture: {path}")


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

    console = _console()
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
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
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
                console.print(_rich(grid))
            for path in report.write(out, runs[0].variant):
                console.print(f"written: {path}")
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


@app.command()
def bench(
    cases: Annotated[list[str] | None, typer.Argument(help="Of a, b, c, c+bn and d; all if none is named.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every method is timed.")] = 5,
    peers: Annotated[bool, typer.Option(help="Other libraries too, as far as they are installed.")] = True,
    memory: Annotated[bool, typer.Option(help="Peak memory too, each method in a process of its own.")] = True,
    growth: Annotated[bool, typer.Option(help="How the cost grows with width, batch, depth, splits, samples.")] = False,
    against: Annotated[Path | None, typer.Option(help="An older result: say what grew.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench.json, tables and pictures.")] = Path("bench"),
) -> None:
    """Time a training step of every method as a ratio to SGD with momentum on the same model in the same run.

    Cases that were timed before and are in the folder stay there.

    Example: eigenoise bench a b --rounds 9 --out bench
    """
    import json

    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from eigenoise import atomic, checks
    from eigenoise.bench import run, show
    from eigenoise.bench.cases import CASES

    console = _console()
    torch.set_num_threads(1)  # ratios are of CPU time on one core
    try:
        names = [checks.choice("case", name, CASES) for name in cases or CASES]
        before = None if against is None else json.loads(against.read_text())
        atomic.folder(out)
        columns = (TextColumn("{task.description:60}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            results = run.begun(out / "bench.json")
            for part in run.parts(names, rounds=rounds, peers=peers, memory=memory, growth=growth):
                task = progress.add_task(part.title, total=part.steps)
                part.run(results, lambda name, task=task: progress.advance(task))  # type: ignore[misc]
                progress.remove_task(task)
                atomic.write_json(out / "bench.json", results)
        for grid in show.grids(results):
            console.print(_rich(grid))
        atomic.write_text(out / "bench.md", show.markdown(results))
        for path in (out / "bench.json", out / "bench.md", *show.pictures(results, out)):
            console.print(f"written: {path}")
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        typer.echo(f"eigenoise bench: {error}", err=True)
        raise typer.Exit(2) from error
    if before is not None:
        lines = show.grown(results, before)
        for line in lines:
            typer.echo(line, err=True)
        console.print(f"{len(lines)} grew since {against}" if lines else f"nothing grew since {against}")
        if lines:
            raise typer.Exit(1)


def _rich(grid: Grid) -> Table:
    from rich.table import Table

    table = Table(title=grid.title)
    for j, heading in enumerate(grid.header):
        table.add_column(heading, justify="right" if j else "left")
    for i, row in enumerate(grid.rows):
        cells = [row[0], *(cell.replace(" (", "\n(") for cell in row[1:])]  # the paper's number below ours
        table.add_row(*(f"[bold]{cell}[/]" if (i, j) in grid.bold else cell for j, cell in enumerate(cells)))
    return table


data_app = typer.Typer(no_args_is_help=True, help="The data cache: what is there, fetch more, where it is.")
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list() -> None:
    """List the sets, their sizes, and whether they are in the cache."""
    from rich.table import Table

    from eigenoise.data.files import cache_folder
    from eigenoise.data.uci import SETS, presence

    table = Table(title=f"UCI regression sets; cache {cache_folder()}")
    for heading in ("set", "rows", "inputs", "splits", "in the cache"):
        table.add_column(heading, justify="left" if heading == "set" else "right")
    for info in SETS.values():
        table.add_row(info.name, f"{info.rows:,}", str(info.inputs), str(info.splits), presence(info.name))
    _console().print(table)


@data_app.command("fetch")
def data_fetch(
    sets: Annotated[list[str], typer.Argument(help="UCI sets.")],
) -> None:
    """Download sets into the cache and check their hashes.

    Example: eigenoise data fetch yacht energy
    """
    from rich.progress import track

    from eigenoise.data.files import fetch_uci, uci_registry
    from eigenoise.data.uci import info, year_splits

    try:
        for name in sets:
            if info(name).folder:
                names = [file for file in uci_registry() if file.startswith(info(name).folder + "/")]
                for file in track(names, name):
                    fetch_uci(file)
            else:
                year_splits()  # says where to get it if it is not there
    except ValueError as error:
        typer.echo(f"eigenoise data fetch: {error}", err=True)
        raise typer.Exit(2) from error


@data_app.command("path")
def data_path() -> None:
    """Show where the cache is."""
    from eigenoise.data.files import cache_folder

    typer.echo(str(cache_folder()))


def _table(results: list[Result]) -> Table:
    from rich.table import Table

    from eigenoise.figures import LABELS
    from eigenoise.report import mean_and_error

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


if __name__ == "__main__":
    app()
