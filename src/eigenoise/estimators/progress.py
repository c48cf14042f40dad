"""A bar with the time left, while a table is learned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from eigenoise.estimators.network import Progress


@contextmanager
def shown(wanted: bool) -> Iterator[Progress]:
    """Within the block, what is told is shown as a bar for each stage, if ``wanted``."""
    if not wanted:
        yield lambda what, part: None
        return
    from rich import progress

    columns = (progress.TextColumn("{task.description:12}"), progress.BarColumn(), progress.TimeRemainingColumn())
    with progress.Progress(*columns) as bar:
        tasks: dict[str, progress.TaskID] = {}

        def tell(what: str, part: float) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=1.0)
            bar.update(tasks[what], completed=part)

        yield tell
