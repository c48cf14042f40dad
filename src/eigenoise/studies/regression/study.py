"""One run of the regression study: a UCI set, a method, a preset, all splits at once; resumable, its result as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eigenoise import checks, storage
from eigenoise.optim.methods import BAYESIAN
from eigenoise.studies import data, runs
from eigenoise.studies.checkpoints import Checkpoints, digest
from eigenoise.studies.data import uci
from eigenoise.studies.regression.presets import Preset, Recipe
from eigenoise.studies.regression.trial import Trial

FORMAT = 2
CHECKPOINT_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Run:
    """What to run.

    Attributes:
        set_name: a UCI set.
        method: one of ``BAYESIAN``.
        preset: the settings.
        splits: how many splits, from the first on; None for the paper's ten (five for Protein, one for Year).
        epochs: instead of the preset's.
        canonical: whether the canonical splits are used rather than random ones; None for the preset's kind.
        seed: of initial weights, noise and the order of the data.
    """

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
        if self.splits is not None:
            checks.integer("splits", self.splits)
        if self.epochs is not None:
            checks.integer("epochs", self.epochs)

    @property
    def uses_canonical(self) -> bool:
        """Whether the splits are the canonical ones."""
        return self.preset.canonical if self.canonical is None else self.canonical

    @property
    def variant(self) -> str:
        """The preset's name, with the kind of splits where it is not the preset's own."""
        if self.uses_canonical == self.preset.canonical:
            return self.preset.name
        return f"{self.preset.name}-{'canonical' if self.uses_canonical else 'random'}"

    @property
    def name(self) -> str:
        """Of the result's file."""
        return f"{self.set_name}-{self.method}-{self.variant}"

    def recipe(self) -> Recipe:
        """The preset's, with ``epochs`` if they were given."""
        recipe = self.preset.recipe(self.set_name, self.method)
        return recipe if self.epochs is None else dataclasses.replace(recipe, epochs=self.epochs)

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, as JSON knows it; a result with other settings is another run's."""
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
        """Canonical splits count from 0, random ones have seeds from 1."""
        about = uci.info(self.set_name)
        wanted = self.splits or min(10, about.splits)
        if self.set_name == "year" and wanted > 1:
            raise ValueError(f"Year has one official split, but {wanted} were asked for")
        if self.uses_canonical and wanted > about.splits:
            raise ValueError(f"{self.set_name} has {about.splits} canonical splits, but {wanted} were asked for")
        return range(wanted) if self.uses_canonical else range(1, wanted + 1)


def finished(run: Run, out: Path) -> dict[str, Any] | None:
    """The result of ``run`` if it is in ``out`` already.

    Raises:
        ValueError: if the file there cannot be read or is the result of other settings; it is left as it is.
    """
    return runs.finished(out / f"{run.name}.json", run.settings(), FORMAT)


def run_uci(
    run: Run,
    out: Path,
    folder: str | os.PathLike | None = None,
    on_epoch: Callable[[Trial], None] = lambda trial: None,
) -> dict[str, Any]:
    """Train, test, write the result; continue where an earlier call was stopped.

    Args:
        run: what to run.
        out: folder of results and checkpoints.
        folder: the data cache.
        on_epoch: called after each pass; ``trial.curve`` holds the ELBO per example after each of them.

    Raises:
        ValueError: for settings that cannot be, or files that are not this run's.
        DataFileError: if data is missing or damaged.
    """
    done = finished(run, out)
    if done is not None:
        if done["sample_of_the_set"] != (uci.presence(run.set_name, folder) == "a sample"):
            raise ValueError(
                f"{out / run.name}.json is of a sample of the set or of all of it, and now the other is here"
            )
        return done
    settings = run.settings()
    splits, is_sample = _load(run, folder)
    trial = Trial(
        run.recipe(),
        run.method,
        splits,
        hidden=settings["hidden"],
        batch_size=settings["batch_size"],
        seed=run.seed,
    )
    marks = json.dumps({**settings, "sample_of_the_set": is_sample})
    kept = Checkpoints(out / f".{run.name}.checkpoint", marks, seconds=CHECKPOINT_SECONDS)
    kept.resume(trial.load_state_dict)
    for _ in kept.kept(trial.passes(), trial.state_dict):
        on_epoch(trial)
    scores = trial.scores()
    for name in ("rmse", "ll", "elbo"):
        if not all(map(math.isfinite, scores[name])):
            raise checks.NotFiniteError(f"{name} is not finite for every split: {scores[name]}")
    result = {
        "format": FORMAT,
        "settings": settings,
        "sample_of_the_set": is_sample,
        **scores,
        "curve": trial.curve,
        "iterations": trial.optimizer.steps,
        "seconds": kept.spent,
        "digest": digest(trial.state_dict()),
        "environment": runs.environment(),
    }
    storage.write_json(out / f"{run.name}.json", result)
    kept.remove()
    return result


def _load(run: Run, folder: str | os.PathLike | None) -> tuple[data.Splits, bool]:
    if run.set_name == "year":
        return uci.year_splits(folder)
    table = study_table(run.set_name, folder)
    if run.uses_canonical:
        return uci.canonical_splits(table, run.split_numbers()), False
    return data.split(table, run.split_numbers()), False


def study_table(name: str, folder: str | os.PathLike | None = None) -> data.Table:
    """The table that the study uses: for Naval that of the paper's authors, who predict the last of 18 columns."""
    return uci.load_naval_turbine(folder) if name == "naval" else uci.load(name, folder)
