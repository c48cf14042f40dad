"""Testing a trained network: with the mean of its weights, and with probabilities averaged over weight samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eigenoise.inference import metrics
from eigenoise.inference.batch_norm import settle_batch_norm
from eigenoise.inference.forward import evaluating
from eigenoise.studies.data import Images
from eigenoise.studies.data.transforms import CORRUPTIONS, Normalise, corrupt

CHUNK = 500  # images per forward pass
SETTLING_BATCHES = 8  # that batch norm's averages are recomputed with

OnPass = Callable[[], None]


class Trained(Protocol):
    """A network with its optimiser and its training images."""

    model: nn.Module
    optimizer: Any
    images: Images
    normalise: Normalise

    def batches(self, count: int) -> Iterator[Tensor]:
        """The first ``count`` batches of training images, normalised."""


@dataclass(frozen=True)
class EvaluationSets:
    """What a network is tested on.

    Attributes:
        test: images with labels.
        ood: images of other sets by name, to be told from the test images by their entropy.
        corrupted: corrupted images with labels by name.
        samples: weight samples of averaged predictions.
    """

    test: Images
    ood: Mapping[str, Tensor] = field(default_factory=dict)
    corrupted: Mapping[str, Images] = field(default_factory=dict)
    samples: int = 10


def evaluate(training: Trained, images: EvaluationSets, on_pass: OnPass = lambda: None) -> dict[str, dict[str, Any]]:
    """Scores the predictions of the mean and, for a noisy method, of averaged samples.

    Args:
        training: the trained network.
        images: what to test on.
        on_pass: called after each pass of all images through the network.

    Returns:
        For ``"mean"`` and ``"samples"`` the scores on test images, the AUROC of entropy for each other set, and the
        scores on corrupted images.
    """
    device = training.images.x.device
    corrupted_x = {name: part.x for name, part in images.corrupted.items()}
    sets = {name: x.to(device) for name, x in {"test": images.test.x, **corrupted_x, **images.ood}.items()}
    result = {}
    for way, probs in probabilities(training, sets, images.samples, on_pass).items():
        test_entropy = entropy(probs["test"])
        corrupted_scores = {name: scores(probs[name], part.y.cpu()) for name, part in images.corrupted.items()}
        for part in corrupted_scores.values():
            del part["reliability"]
        result[way] = {
            **scores(probs["test"], images.test.y.cpu()),
            "auroc": {name: metrics.auroc(test_entropy, entropy(probs[name])) for name in images.ood},
            "corrupted": corrupted_scores,
        }
    return result


def probabilities(
    training: Trained, sets: Mapping[str, Tensor], samples: int, on_pass: OnPass = lambda: None
) -> dict[str, dict[str, Tensor]]:
    """Class probabilities ``(N, c)`` of each set of images, under ``"mean"`` and, for a noisy method, ``"samples"``.

    Batch norm's averages are recomputed for the mean and for each sample, and restored at the end.

    Args:
        training: the trained network.
        sets: images ``(N, 3, 32, 32)`` uint8 by name.
        samples: number of weight samples.
        on_pass: called after each pass of all images through the network.
    """
    model, optimizer = training.model, training.optimizer
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    result: dict[str, dict[str, Tensor]] = {}
    try:
        result["mean"] = _one_pass(training, sets)
        on_pass()
        if optimizer.noisy:
            generator = torch.Generator(training.images.x.device).manual_seed(0)
            total: dict[str, Tensor] = {}
            for _ in range(samples):
                with torch.no_grad(), optimizer.sampled_params(generator):
                    for name, probs in _one_pass(training, sets).items():
                        total[name] = probs if name not in total else total[name] + probs
                on_pass()
            result["samples"] = {name: probs / samples for name, probs in total.items()}
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return result


def _one_pass(training: Trained, sets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    model, normalise = training.model, training.normalise
    settle_batch_norm(model, training.batches(SETTLING_BATCHES))
    with evaluating(model), torch.no_grad():
        return {
            name: torch.cat([model(normalise(part)).double().softmax(-1).cpu() for part in x.split(CHUNK)])
            for name, x in sets.items()
        }


def scores(probs: Tensor, y: Tensor) -> dict[str, Any]:
    """Accuracy, negative log-likelihood, Brier score, calibration error and reliability of ``probs (N, c)``."""
    bins = metrics.reliability(probs, y)
    return {
        "accuracy": float(metrics.accuracy(probs, y)),
        "nll": float(-probs.gather(-1, y.unsqueeze(-1)).clamp_min(1e-300).log().mean()),
        "brier": float(metrics.brier(probs, y)),
        "ece": float(bins.error),
        "reliability": bins.to_json(),
    }


def entropy(probs: Tensor) -> Tensor:
    """Entropy of class probabilities ``(N, c)`` in nats, ``(N,)``."""
    return torch.special.entr(probs).sum(-1)


def corrupted_images(test: Images, count: int) -> dict[str, Images]:
    """Returns the first ``count`` images in every corruption and severity, by a name such as ``"blur 3"``."""
    first = test.some(slice(count))
    return {
        f"{kind} {severity}": Images(
            corrupt(first.x, kind, severity, torch.Generator().manual_seed(severity)), first.y, first.classes
        )
        for kind, sizes in CORRUPTIONS.items()
        for severity in range(1, 1 + len(sizes))
        if count
    }
