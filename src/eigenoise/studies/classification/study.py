"""One run of the classification study: CIFAR-10, a method, a setting; resumable, its result as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from eigenoise import checks, models, storage
from eigenoise.optim.natural_gradient import CONV_BASES, NaturalGradient
from eigenoise.optim.spectra import spectra
from eigenoise.parallel.ranks import Ranks
from eigenoise.studies import runs
from eigenoise.studies.checkpoints import Checkpoints, digest
from eigenoise.studies.classification.recipes import METHODS, Setting, recipe
from eigenoise.studies.classification.scores import corrupted, evaluate
from eigenoise.studies.classification.training import Training
from eigenoise.studies.data import Images, images

FORMAT = 1
CHECKPOINT_STEPS = 100
TRAIN_SIZE = 50_000
HELD_OUT = 5_000  # training images that validation tests on
STRANGE = 2_000  # images of each other set, to be told from CIFAR-10's

OnStep = Callable[[Training], None]


@dataclasses.dataclass(frozen=True)
class Run:
    """What to run.

    Attributes:
        method: one of ``METHODS``.
        setting: with or without augmentation and batch norm.
        steps: of the optimiser.
        train_size: how many training images; which ones does not depend on the seed.
        batch_size: of a step.
        samples: of weights, for the averaged predictions.
        seed: of initial weights, noise, order and augmentation.
        width: of the VGG16; the paper's is one half.
        validate: test on held-out training images instead of the test set.
        corrupted: test images that are corrupted in 15 ways and tested too.
        options: instead of the recipe's.
    """

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
        if "conv_basis" in self.options and not self.method.endswith("kfac"):
            raise ValueError(f"conv_basis is for K-FAC and EK-FAC, not for {self.method}")
        checks.choice("conv_basis", self.options.get("conv_basis", "full"), CONV_BASES)
        most = TRAIN_SIZE - HELD_OUT * self.validate
        if self.train_size > most:
            raise ValueError(f"train_size must be at most {most:,}, but {self.train_size:,} came")
        if self.batch_size > self.train_size:
            raise ValueError(f"batch_size must be at most train_size, {self.train_size}, but {self.batch_size} came")

    @property
    def name(self) -> str:
        """Of the result's file."""
        return f"{self.method}-{self.setting.name}-{self.seed}"

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, as JSON knows it."""
        found = dataclasses.asdict(self)
        del found["setting"]
        own = recipe(self.method, self.setting, self.train_size)
        found |= {"setting": self.setting.name, "options": {**own, **self.options}}
        return json.loads(json.dumps(found))


def run_cifar10(
    run: Run,
    out: Path,
    folder: str | os.PathLike | None = None,
    *,
    device: str = "cpu",
    resume: bool = False,
    ranks: Ranks | None = None,
    on_step: OnStep = lambda training: None,
    on_pass: Callable[[], None] = lambda: None,
) -> dict[str, Any] | None:
    """Train, test, write the result; with ``resume`` from where an earlier call was stopped.

    Args:
        run: what to run.
        out: folder of results and checkpoints.
        folder: the data cache.
        device: to train on.
        resume: whether to go on with a checkpoint that is in ``out``.
        ranks: the processes that train together; ``out`` must be one folder for all, and the first tests and writes.
        on_step: called after each step.
        on_pass: called during the test whenever all images went through the network once.

    Returns:
        The result, or None in a process that is not the first.

    Raises:
        ValueError: for settings that cannot be, files that are not this run's, or a device that is not there.
        DataFileError: if data is missing or damaged.
    """
    processes = 1 if ranks is None else ranks.size
    done = check(run, out, resume, processes)
    if done is not None:
        return done
    target = existing_device(device)
    train, test = parts(run, folder)
    strange = {name: images.other(name, folder)[:STRANGE] for name in images.OTHERS if images.is_here(name, folder)}
    torch.manual_seed(run.seed)
    model = models.VGG16(width=run.width, batch_norm=run.setting.batch_norm).to(target)
    training = Training(
        model,
        train.to(target),
        run.method,
        run.settings()["options"],
        steps=run.steps,
        batch_size=run.batch_size,
        augmented=run.setting.augmented,
        seed=run.seed,
        ranks=ranks,
    )
    marks = json.dumps({**run.settings(), "device": target.type, "processes": processes})
    kept = checkpoints(run, out, marks, ranks)
    kept.resume(training.load_state_dict)
    if ranks is not None:
        begun = torch.tensor([float(len(training.curve))], device=ranks.device)
        ranks.refuse_different([begun], f"{out} holds other files for some processes: it must be one folder for all")
    for _ in kept.kept(training.run(), training.state_dict):
        on_step(training)
    if ranks is not None and ranks.rank:
        while ranks.any(False):  # the first one is testing, and says so after every pass: nobody waits too long
            pass
        return None

    def passed() -> None:
        on_pass()
        if ranks is not None:
            ranks.any(True)

    damaged = corrupted(test, run.corrupted) if run.corrupted else {}
    content = {
        "format": FORMAT,
        "settings": run.settings(),
        "scores": evaluate(training, test, strange, run.samples, damaged=damaged, on_pass=passed),
        "curve": training.curve,
        "spectra": spectra(training.optimizer) if isinstance(training.optimizer, NaturalGradient) else {},
        "epochs": training.epochs,
        "seconds": kept.spent,
        "digest": digest(training.state_dict()),
        "device": target.type,
        "processes": processes,
        "environment": runs.environment(),
    }
    storage.write_json(out / f"{run.name}.json", content)
    kept.remove()
    if ranks is not None:
        ranks.any(False)
    return json.loads(json.dumps(content))


def check(run: Run, out: Path, resume: bool, processes: int = 1) -> dict[str, Any] | None:
    """The result of ``run`` by so many processes if it is in ``out`` already, else None.

    Raises:
        ValueError: if there are files of another run, or a checkpoint that is not to be gone on with.
    """
    done = runs.finished(out / f"{run.name}.json", run.settings(), FORMAT)
    if done is not None and done.get("processes", 1) != processes:
        raise ValueError(
            f"{out / run.name}.json is the result of {done.get('processes', 1)} processes, not {processes}; choose "
            "another folder or move it away"
        )
    kept = checkpoints(run, out)
    if done is None and kept.exist and not resume:
        raise ValueError(f"{kept.path} is a stopped run: go on with --resume, or delete it to start anew")
    return done


def checkpoints(run: Run, out: Path, marks: str = "", ranks: Ranks | None = None) -> Checkpoints:
    """Of ``run`` in the folder ``out``."""
    return Checkpoints(out / f".{run.name}.checkpoint", marks, steps=CHECKPOINT_STEPS, ranks=ranks)


def parts(run: Run, folder: str | os.PathLike | None = None) -> tuple[Images, Images]:
    """The images that ``run`` learns from and those it is tested on.

    Training images are taken in one fixed random order; the last of it are those that validation tests on. A class
    that no training image is of is warned about.
    """
    train, test = images.cifar10(folder)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    if run.validate:
        test = train.some(order[-HELD_OUT:])
    part = train.some(order[: run.train_size])
    missing = sorted(set(range(part.classes)) - set(part.y.tolist()))
    if missing:
        names = ", ".join(images.CIFAR10_CLASSES[label] for label in missing)
        warnings.warn(f"no training image shows {names}: use a larger train_size", stacklevel=2)
    return part, test


def existing_device(name: str) -> torch.device:
    """The device called ``name``.

    Raises:
        ValueError: if there is none, saying which there are.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:
        there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} is not there ({reason}); there is {', '.join(there)}") from error
    return device
