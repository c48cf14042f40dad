"""Progress of a fit: a bar or lines for each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eigenoise.reporting.progress import Task, watching

Progress = Callable[[str, float], None]  # the current stage, and the fraction of it that is done


@contextmanager
def show_progress(verbose: bool) -> Iterator[Progress]:
    """Within the block, show the progress of one stage after the other if ``verbose``."""
    with watching(verbose) as watch:
        stages: dict[str, Task] = {}

        def end() -> None:
            if stages:
                list(stages.values())[-1].end()

        def report(stage: str, done: float) -> None:
            if stage not in stages:
                end()
                stages[stage] = watch.task(stage, 1.0)
            stages[stage].to(done)

        yield report
        end()
