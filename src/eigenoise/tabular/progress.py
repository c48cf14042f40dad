"""What is seen while a table is learned: a bar or lines for each stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from eigenoise.reporting.progress import Task, watching
from eigenoise.tabular.network import Progress


@contextmanager
def shown(wanted: bool) -> Iterator[Progress]:
    """Within the block, what is told is shown, one stage after the other, if ``wanted``."""
    with watching(wanted) as watch:
        stages: dict[str, Task] = {}

        def end() -> None:
            if stages:
                list(stages.values())[-1].end()

        def tell(what: str, part: float) -> None:
            if what not in stages:
                end()
                stages[what] = watch.task(what, 1.0)
            stages[what].to(part)

        yield tell
        end()
