"""One run of the regression study: a UCI set, a method and a preset, all splits at once."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eigenoise import checks
from eigenoise.optim.methods import BAYESIAN
from eigenoise.studies import data, runner
from eigenoise.studies.data import uci
from eigenoise.studies.recipes import Preset, Recipe
from eigenoise.studies.regression.training import Training


@dataclasses.dataclass(frozen=True)
class Run(runner.Run):
    """What to run.

    Attributes:
        set_name: name of a UCI set.
        method: one of ``BAYESIAN``.
        preset: the settings.
        splits: number of splits, from the first on; None for the paper's ten (five for Protein, one for Year).
        epochs: number of epochs; None for the preset's.
        canonical: whether to use the canonical splits rather than random ones; None for the preset's kind.
        seed: seed of initial weights, weight noise and the order of the data.
    """

    FORMAT = 2
    SAVE_SECONDS = 20.0

    set_name: str
    method: str
    preset: Preset
    splits: int | None = None
    epochs: int | None = None
    canonical: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        uci.info(self.set_name)
        checks.choice("method", self.method, BAYESIAN)
        for name in ("splits", "epochs"):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name))

    @property
    def uses_canonical(self) -> bool:
        """Whether the splits are the canonical ones."""
        return self.preset.canonical if self.canonical is None else self.canonical

    @property
    def variant(self) -> str:
        """The preset's name, with the kind of splits where that is not the preset's."""
        if self.uses_canonical == self.preset.canonical:
            return self.preset.name
        return f"{self.preset.name}-{'canonical' if self.uses_canonical else 'random'}"

    @property
    def name(self) -> str:
        """Name of the result's file, without suffix."""
        return f"{self.set_name}-{self.method}-{self.variant}"

    def recipe(self) -> Recipe:
        """Returns the preset's recipe, with ``epochs`` if given."""
        recipe = self.preset.recipe(self.set_name, self.method)
        return recipe if self.epochs is None else dataclasses.replace(recipe, epochs=self.epochs)

    def settings(self) -> dict[str, Any]:
        """Returns everything that decides the result, as JSON values."""
        about = uci.info(self.set_name)
        settings = {
            "set": self.set_name,
            "method": self.method,
            "preset": self.preset.name,
            "splits": len(self.split_numbers()),
            "canonical": self.uses_canonical,
            "seed": self.seed,
            "hidden": about.hidden,
            "batch_size": about.batch_size,
            **dataclasses.asdict(self.recipe()),
        }
        return json.loads(json.dumps(settings))

    def split_numbers(self) -> Sequence[int]:
        """Returns the splits: canonical ones count from 0, random ones have seeds from 1."""
        about = uci.info(self.set_name)
        count = self.splits or min(10, about.splits)
        if self.set_name == "year" and count > 1:
            raise ValueError(f"splits: expected 1 for year, which has one official split, got {count}")
        if self.uses_canonical and count > about.splits:
            raise ValueError(
                f"splits: expected at most {about.splits}, the canonical ones of {self.set_name}, got {count}; "
                "use fewer, or random splits"
            )
        return range(count) if self.uses_canonical else range(1, count + 1)


def run_uci(
    run: Run,
    out: Path,
    folder: str | os.PathLike | None = None,
    on_epoch: Callable[[Training], None] = lambda training: None,
) -> dict[str, Any]:
    """Trains, tests and writes the result; resumes a stopped run, and returns the result of a finished one.

    Args:
        run: what to run.
        out: folder of results and checkpoints.
        folder: the data cache.
        on_epoch: called after each epoch; ``training.curve`` has one entry for each of them.

    Raises:
        ValueError: for impossible settings, or files that belong to another run.
        DataFileError: if data is missing or damaged.
    """
    result = run.result(out)
    if result is not None:
        if result["sample_of_the_set"] != (uci.presence(run.set_name, folder) == "a sample"):
            raise ValueError(
                f"{run.path(out)} is the result of a sample of the set or of all of it, and the data cache now "
                "holds the other; choose another folder"
            )
        return result
    splits, is_sample = _load_splits(run, folder)
    about = uci.info(run.set_name)
    training = Training(
        run.recipe(), run.method, splits, hidden=about.hidden, batch_size=about.batch_size, seed=run.seed
    )
    conditions = {"sample_of_the_set": is_sample}
    result = run.execute(training, out, conditions=conditions, on_step=lambda: on_epoch(training))
    assert result is not None  # one process
    return result


def _load_splits(run: Run, folder: str | os.PathLike | None) -> tuple[data.Splits, bool]:
    if run.set_name == "year":
        return uci.year_splits(folder)
    table = study_table(run.set_name, folder)
    make = uci.canonical_splits if run.uses_canonical else data.split
    return make(table, run.split_numbers()), False


def study_table(name: str, folder: str | os.PathLike | None = None) -> data.Table:
    """Loads the table of a set; for Naval that of the paper's authors, who predict the last of 18 columns."""
    return uci.load_naval_turbine(folder) if name == "naval" else uci.load(name, folder)
