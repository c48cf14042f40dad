"""``eigenoise data list | fetch | path``."""

from __future__ import annotations

from typing import Annotated

import typer

from eigenoise.cli.base import Quiet, app, console, reported, rich_table

data_app = typer.Typer(no_args_is_help=True, help="The data cache: list it, fetch sets, show its path.")
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list() -> None:
    """List the sets, their sizes, and whether they are in the cache.

    Example: eigenoise data list
    """
    from eigenoise.reporting.tables import Grid
    from eigenoise.studies.data import images
    from eigenoise.studies.data.files import cache_folder
    from eigenoise.studies.data.uci import SETS, presence

    rows = [[s.name, f"{s.rows:,}", str(s.inputs), str(s.splits), presence(s.name)] for s in SETS.values()]
    header = ["set", "rows", "inputs", "splits", "in the cache"]
    console().print(rich_table(Grid(f"UCI regression sets; cache {cache_folder()}", header, rows)))
    rows = [[name, "yes" if images.is_here(name) else "no"] for name in ("cifar10", *images.OTHERS)]
    console().print(rich_table(Grid("Small images", ["set", "in the cache"], rows)))


@data_app.command("fetch")
def data_fetch(
    sets: Annotated[list[str], typer.Argument(help="UCI sets, or cifar10.")],
    quiet: Quiet = False,
) -> None:
    """Download sets into the cache and check their hashes.

    Example: eigenoise data fetch yacht energy
    """
    from eigenoise.reporting.progress import watching
    from eigenoise.studies.data import images
    from eigenoise.studies.data.files import fetch_uci, uci_registry
    from eigenoise.studies.data.uci import info, year_splits

    with reported("data fetch", "what was fetched is kept"), watching(not quiet) as watch:
        for name in sets:
            if name == "cifar10":
                task = watch.task("cifar10: 170 MB, once")
                images.cifar10()
                task.end()
            elif name in images.OTHERS:
                images.other(name)  # says where to put it if it is not there
            elif info(name).folder:
                names = [file for file in uci_registry() if file.startswith(info(name).folder + "/")]
                task = watch.task(name, len(names))
                for done, file in enumerate(names, 1):
                    fetch_uci(file)
                    task.to(done)
                task.end()
            else:
                year_splits()  # says where to get it if it is not there


@data_app.command("path")
def data_path() -> None:
    """Show where the cache is.

    Example: eigenoise data path
    """
    from eigenoise.studies.data.files import cache_folder

    typer.echo(str(cache_folder()))
