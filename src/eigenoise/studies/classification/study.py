"""One run of the classification study: CIFAR-10, a method and a setting."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from eigenoise import checks, models
from eigenoise.parallel.ranks import Ranks
from eigenoise.studies import runner
from eigenoise.studies.classification.evaluation import EvaluationSets, corrupted_images
from eigenoise.studies.classification.training import METHODS, Training
from eigenoise.studies.data import Images, images
from eigenoise.studies.recipes import Setting, classification_recipe

TRAIN_SIZE = 50_000
VALIDATION_SIZE = 5_000  # training images that validation tests on
OOD_SIZE = 2_000  # test images of each out-of-distribution set


@dataclasses.dataclass(frozen=True)
class Run(runner.Run):
    """What to run.

    Attributes:
        method: one of ``METHODS``.
        setting: with or without augmentation and batch norm.
        steps: number of optimiser steps.
        train_size: number of training images; which ones does not depend on the seed.
        batch_size: images per step and process.
        samples: weight samples of averaged predictions.
        seed: seed of initial weights, weight noise, order and augmentation.
        width: factor on the channels of VGG16; the paper's is one half.
        validate: whether to test on held-out training images instead of the test set.
        corrupted: number of test images to corrupt in 15 ways and test as well.
        options: optimiser arguments that replace the recipe's.
    """

    FORMAT = 1
    SAVE_STEPS = 100

    method: str
    setting: Setting
    steps: int
    train_size: int = TRAIN_SIZE
    batch_size: int = 128
    samples: int = 10
    seed: int = 0
    width: float = 0.5
    validate: bool = False
    corrupted: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.choice("method", self.method, METHODS)
        for name in ("steps", "train_size", "samples"):
            checks.integer(name, getattr(self, name))
        checks.integer("batch_size", self.batch_size, low=2)
        checks.integer("corrupted", self.corrupted, low=0)
        checks.number("width", self.width, open_low=True)
        available = TRAIN_SIZE - VALIDATION_SIZE * self.validate
        if self.train_size > available:
            raise ValueError(f"train_size: expected at most {available:,}, got {self.train_size:,}")
        if self.batch_size > self.train_size:
            raise ValueError(f"batch_size: expected at most train_size, {self.train_size}, got {self.batch_size}")

    @property
    def name(self) -> str:
        """Name of the result's file, without suffix."""
        return f"{self.method}-{self.setting.name}-{self.seed}"

    def settings(self) -> dict[str, Any]:
        """Returns everything that decides the result, as JSON values."""
        recipe = classification_recipe(self.method, self.setting, self.train_size)
        settings = {
            **dataclasses.asdict(self),
            "setting": self.setting.name,
            "options": {**recipe, **self.options},
        }
        return json.loads(json.dumps(settings))


def run_cifar10(
    run: Run,
    out: Path,
    folder: str | os.PathLike | None = None,
    *,
    device: str = "cpu",
    resume: bool = False,
    ranks: Ranks | None = None,
    on_step: Callable[[Training], None] = lambda training: None,
    on_pass: Callable[[], None] = lambda: None,
) -> dict[str, Any] | None:
    """Trains, tests and writes the result; with ``resume`` from where an earlier call was stopped.

    Args:
        run: what to run.
        out: folder of results and checkpoints.
        folder: the data cache.
        device: device to train on.
        resume: whether to resume from a checkpoint in ``out``.
        ranks: the processes that train together; ``out`` must be one folder for all, and rank 0 tests and writes.
        on_step: called after each step.
        on_pass: called during the test after each pass of all images through the network.

    Returns:
        The result, or None in a process other than rank 0.

    Raises:
        ValueError: for impossible settings, files that belong to another run, or a device that does not exist.
        DataFileError: if data is missing or damaged.
    """
    processes = 1 if ranks is None else ranks.size
    result = check(run, out, resume, processes)
    if result is not None:
        return result
    target = existing_device(device)
    train, test = load_images(run, folder)
    ood = {name: images.other(name, folder)[:OOD_SIZE] for name in images.OTHERS if images.is_here(name, folder)}
    torch.manual_seed(run.seed)
    training = Training(
        models.VGG16(width=run.width, batch_norm=run.setting.batch_norm).to(target),
        train.to(target),
        run.method,
        run.settings()["options"],
        total_steps=run.steps,
        batch_size=run.batch_size,
        augmented=run.setting.augmented,
        tests=EvaluationSets(test, ood, corrupted_images(test, run.corrupted), run.samples),
        seed=run.seed,
        ranks=ranks,
    )
    conditions = {"device": target.type, "processes": processes}
    return run.execute(
        training, out, conditions=conditions, ranks=ranks, on_step=lambda: on_step(training), on_pass=on_pass
    )


def check(run: Run, out: Path, resume: bool, processes: int = 1) -> dict[str, Any] | None:
    """Returns the result of ``run`` by so many processes if it is in ``out``, else None.

    Raises:
        ValueError: if there are files of another run, or a checkpoint and ``resume`` is False.
    """
    result, checkpoints = run.result(out), run.checkpoints(out)
    if result is not None and result.get("processes", 1) != processes:
        raise ValueError(
            f"{run.path(out)} is the result of {result.get('processes', 1)} processes, not {processes}; choose another "
            "folder or move it away"
        )
    if result is None and checkpoints.exist and not resume:
        raise ValueError(f"{checkpoints.path} is a stopped run: continue it with --resume, or delete it to restart")
    return result


def load_images(run: Run, folder: str | os.PathLike | None = None) -> tuple[Images, Images]:
    """Returns the training images and the test images of ``run``; warns about classes without a training image.

    Training images are the first in a fixed random order; validation tests on the last of it.
    """
    train, test = images.cifar10(folder)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    if run.validate:
        test = train.some(order[-VALIDATION_SIZE:])
    part = train.some(order[: run.train_size])
    missing = sorted(set(range(part.classes)) - set(part.y.tolist()))
    if missing:
        names = ", ".join(images.CIFAR10_CLASSES[label] for label in missing)
        warnings.warn(f"no training image shows {names}: use a larger train_size", stacklevel=2)
    return part, test


def existing_device(name: str) -> torch.device:
    """Returns the device called ``name``.

    Raises:
        ValueError: if it does not exist, naming those that do.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:
        available = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: expected one of {', '.join(available)}, got {name!r} ({reason})") from error
    return device
