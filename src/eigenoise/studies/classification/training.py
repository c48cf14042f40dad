"""One network learning from images: batches, augmentation, the falling step size; resumable bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from eigenoise import checks
from eigenoise.likelihoods import CategoricalLikelihood
from eigenoise.parallel.ranks import Ranks
from eigenoise.studies.classification.recipes import METHODS
from eigenoise.studies.data import Images
from eigenoise.studies.data.transforms import Normalise, augment


class Training:
    """A network, its optimiser and the stream of batches.

    Args:
        model: the network, on its device.
        images: to learn from, on the same device.
        method: one of ``METHODS``.
        options: of the optimiser.
        steps: in all; the step size falls to zero over them as a half cosine.
        batch_size: of every step and process; what is left over at the end of a pass comes in the next.
        augmented: whether images are shifted and mirrored.
        seed: of noise, order and augmentation.
        ranks: the processes that train together, each on its own part of the images, or None.

    Attributes:
        curve: after each step the loss of its batch and the part of it that was right.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        method: str,
        options: Mapping[str, Any],
        *,
        steps: int,
        batch_size: int,
        augmented: bool,
        seed: int = 0,
        ranks: Ranks | None = None,
    ):
        self.steps = checks.integer("steps", steps)
        self.batch_size = checks.integer("batch_size", batch_size, low=2)
        self.ranks, self.seed = ranks, seed
        self.in_all = batch_size * (1 if ranks is None else ranks.size)  # images of a step
        if self.in_all > len(images):
            shared = "" if ranks is None else f" divided by that of processes, {ranks.size}"
            raise ValueError(
                f"batch_size must be at most the number of images, {len(images)}{shared}, but {batch_size} came"
            )
        self.model, self.images, self.augmented = model, images, bool(augmented)
        make = METHODS[checks.choice("method", method, METHODS)]
        device = images.x.device
        more = {} if method == "sgd" else {"generator": torch.Generator(device).manual_seed(seed)}
        likelihood = CategoricalLikelihood()
        self.network = model if ranks is None else DistributedDataParallel(model, process_group=ranks.group)
        self.optimizer = make(self.network, num_data=len(images), likelihood=likelihood, **options, **more)
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.normalise = Normalise.of(images.x)
        self.random = torch.Generator().manual_seed(seed)  # order and augmentation
        self.waiting = torch.empty(0, dtype=torch.long)  # rows of this pass that are still to come
        self.curve: list[tuple[float, float]] = []

    @property
    def epochs(self) -> float:
        """Passes over the images so far."""
        return len(self.curve) * self.in_all / len(self.images)

    def run(self) -> Iterator[int]:
        """Train on from where it was left, yielding the number of steps so far after each."""
        group = self.optimizer.param_groups[0]
        while len(self.curve) < self.steps:
            group["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * len(self.curve) / self.steps))
            self.curve.append(self._step())
            yield len(self.curve)

    def batches(self, count: int) -> Iterator[Tensor]:
        """The first ``count`` whole batches of images, or as many as there are, normalised, not augmented."""
        whole = min(count, len(self.images) // self.batch_size) * self.batch_size
        for part in self.images.x[:whole].split(self.batch_size):
            yield self.normalise(part)

    def _step(self) -> tuple[float, float]:
        rows = self._rows()
        x, y = self.images.x[rows], self.images.y[rows]
        x = self.normalise(augment(x, self._chance()) if self.augmented else x)
        self.optimizer.zero_grad()
        loss, right = 0.0, 0.0
        for _ in range(self.optimizer.blocks_per_step):
            with self.optimizer.sampled_params():
                f = self.network(x)
                nll = self.optimizer.likelihood.nll(f, y)
                nll.backward()
            loss += float(nll.detach()) / self.optimizer.blocks_per_step
            right += float((f.detach().argmax(-1) == y).float().mean()) / self.optimizer.blocks_per_step
        if self.ranks is not None:
            both = torch.tensor([loss, right], device=x.device)
            self.ranks.average_([both])
            loss, right = both.tolist()
        if not math.isfinite(loss):
            raise checks.NotFiniteError(f"the loss is {loss} at step {len(self.curve)}: try a smaller lr")
        self.optimizer.step()
        return loss, right

    def _rows(self) -> Tensor:
        """This process's part of the next batch; each pass goes through all images in an order of its own."""
        if len(self.waiting) < self.in_all:
            order = torch.randperm(len(self.images), generator=self.random)
            self.waiting = torch.cat([self.waiting, order])
        rows, self.waiting = self.waiting[: self.in_all], self.waiting[self.in_all :]
        if self.ranks is not None:
            rows = rows.chunk(self.ranks.size)[self.ranks.rank]
        return rows.to(self.images.x.device)

    def _chance(self) -> torch.Generator:
        """What decides about shifts and mirrors: the same source as for the order, or each process's own."""
        if self.ranks is None:
            return self.random
        return torch.Generator().manual_seed(self.ranks.seed(self.seed, len(self.curve), "shifts"))

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.get_state(),
            "waiting": self.waiting.clone(),
            "curve": [list(point) for point in self.curve],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"])
        self.waiting = state["waiting"].clone()
        self.curve = [(loss, right) for loss, right in state["curve"]]
