"""Training one network on images: batches, augmentation, a cosine learning rate; resumable bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from eigenoise import checks
from eigenoise.likelihoods import CategoricalLikelihood
from eigenoise.optim.methods import BAYESIAN, POINT
from eigenoise.optim.natural_gradient import NaturalGradient
from eigenoise.optim.spectra import spectra
from eigenoise.parallel.ranks import Ranks
from eigenoise.studies.classification.evaluation import EvaluationSets, evaluate
from eigenoise.studies.classification.point import PointSGD
from eigenoise.studies.data import Images
from eigenoise.studies.data.transforms import Normalise, augment

METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType({"sgd": PointSGD, **POINT, **BAYESIAN})


class Training:
    """A network, its optimiser and the stream of batches.

    Args:
        model: the network, on its device.
        images: training images, on the same device.
        method: one of ``METHODS``.
        options: arguments of the optimiser.
        total_steps: number of steps; the learning rate falls to zero over them as a half cosine.
        batch_size: images per step and process; what is left at the end of an epoch is used in the next.
        augmented: whether images are shifted and mirrored.
        tests: images that ``scores`` tests on.
        seed: seed of weight noise, order and augmentation.
        ranks: the processes that train together, each on its own part of the images, or None.

    Attributes:
        curve: after each step the loss of its batch and the accuracy on it.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        method: str,
        options: Mapping[str, Any],
        *,
        total_steps: int,
        batch_size: int,
        augmented: bool,
        tests: EvaluationSets | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
    ):
        self.total_steps = checks.integer("total_steps", total_steps)
        self.batch_size = checks.integer("batch_size", batch_size, low=2)
        self.tests, self.ranks, self.seed = tests, ranks, seed
        self.images_per_step = batch_size * (1 if ranks is None else ranks.size)
        if self.images_per_step > len(images):
            shared = "" if ranks is None else f" divided by that of processes, {ranks.size}"
            raise ValueError(
                f"batch_size: expected at most the number of images, {len(images)}{shared}, got {batch_size}"
            )
        self.model, self.images, self.augmented = model, images, bool(augmented)
        make = METHODS[checks.choice("method", method, METHODS)]
        device = images.x.device
        if method != "sgd":
            options = {**options, "generator": torch.Generator(device).manual_seed(seed)}
        self.network = model if ranks is None else DistributedDataParallel(model, process_group=ranks.group)
        self.optimizer = make(self.network, num_data=len(images), likelihood=CategoricalLikelihood(), **options)
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.normalise = Normalise.of(images.x)
        self.random = torch.Generator().manual_seed(seed)  # order and augmentation
        self.waiting = torch.empty(0, dtype=torch.long)  # rows of this epoch that are still to come
        self.curve: list[tuple[float, float]] = []

    @property
    def epochs(self) -> float:
        """Number of epochs so far."""
        return len(self.curve) * self.images_per_step / len(self.images)

    def steps(self) -> Iterator[int]:
        """Trains on from the current state and yields the number of steps so far after each."""
        group = self.optimizer.param_groups[0]
        while len(self.curve) < self.total_steps:
            group["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * len(self.curve) / self.total_steps))
            self.curve.append(self._step())
            yield len(self.curve)

    def batches(self, count: int) -> Iterator[Tensor]:
        """Yields the first ``count`` whole batches of images, or as many as there are, normalised, not augmented."""
        whole = min(count, len(self.images) // self.batch_size) * self.batch_size
        for part in self.images.x[:whole].split(self.batch_size):
            yield self.normalise(part)

    def scores(self, on_pass: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Tests on ``tests``; returns the scores, the spectra of layers with an eigenbasis, and the epochs."""
        if self.tests is None:
            raise ValueError("tests: expected images to test on, got None")
        return {
            "scores": evaluate(self, self.tests, on_pass),
            "spectra": spectra(self.optimizer) if isinstance(self.optimizer, NaturalGradient) else {},
            "epochs": self.epochs,
        }

    def _step(self) -> tuple[float, float]:
        rows = self._rows()
        x, y = self.images.x[rows], self.images.y[rows]
        x = self.normalise(augment(x, self._augmentation_generator()) if self.augmented else x)
        self.optimizer.zero_grad()
        loss, accuracy, blocks = 0.0, 0.0, self.optimizer.blocks_per_step
        for _ in range(blocks):
            with self.optimizer.sampled_params():
                f = self.network(x)
                nll = self.optimizer.likelihood.nll(f, y)
                nll.backward()
            loss += float(nll.detach()) / blocks
            accuracy += float((f.detach().argmax(-1) == y).float().mean()) / blocks
        if self.ranks is not None:
            both = torch.tensor([loss, accuracy], device=x.device)
            self.ranks.average_([both])
            loss, accuracy = both.tolist()
        if not math.isfinite(loss):
            raise checks.NotFiniteError(f"the loss is {loss} at step {len(self.curve)}: try a smaller lr")
        self.optimizer.step()
        return loss, accuracy

    def _rows(self) -> Tensor:
        """Draws this process's part of the next batch; each epoch visits all images in a new order."""
        if len(self.waiting) < self.images_per_step:
            order = torch.randperm(len(self.images), generator=self.random)
            self.waiting = torch.cat([self.waiting, order])
        rows, self.waiting = self.waiting[: self.images_per_step], self.waiting[self.images_per_step :]
        if self.ranks is not None:
            rows = rows.chunk(self.ranks.size)[self.ranks.rank]
        return rows.to(self.images.x.device)

    def _augmentation_generator(self) -> torch.Generator:
        """Returns the source of shifts and mirrors: that of the order, or one for each process."""
        if self.ranks is None:
            return self.random
        return torch.Generator().manual_seed(self.ranks.seed(self.seed, len(self.curve), "shifts"))

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a bit-exact resume needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.get_state(),
            "waiting": self.waiting.clone(),
            "curve": [list(point) for point in self.curve],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"])
        self.waiting = state["waiting"].clone()
        self.curve = [(loss, accuracy) for loss, accuracy in state["curve"]]
