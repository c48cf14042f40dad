"""``eigenoise report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eigenoise.cli.base import Quiet, app, check_out_file, console, reported, say


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder with results of uci, cifar10, fit or bench.")],
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("report.html"),
    quiet: Quiet = False,
) -> None:
    """Make one page to look at from all results in a folder, with every picture in it.

    Example: eigenoise report results --out report.html
    """
    from eigenoise.reporting.progress import watching
    from eigenoise.studies import html_report

    with reported("report"):
        check_out_file(out)
        with watching(not quiet) as watch:
            task = watch.task("drawing")
            html_report.write(folder, out)
            task.end()
    say(console(quiet), f"written: {out}")
