"""How good a trained network is: with the mean of its weights, and with probabilities averaged over samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from eigenoise.inference import metrics
from eigenoise.inference.batch_norm import settle_batch_norm
from eigenoise.inference.forward import evaluating
from eigenoise.studies.classification.training import Training
from eigenoise.studies.data import Images
from eigenoise.studies.data.transforms import CORRUPTIONS, corrupt

CHUNK = 500
SETTLING = 8  # batches that batch norm is settled with

OnPass = Callable[[], None]


def probabilities(
    training: Training, sets: Mapping[str, Tensor], samples: int, on_pass: OnPass = lambda: None
) -> dict[str, dict[str, Tensor]]:
    """Class probabilities ``(N, c)`` for each set of images, under ``"mean"`` and, for a noisy method, ``"samples"``.

    Batch norm is settled anew for the mean and for each sample, and is as it was in the end.

    Args:
        training: what was trained.
        sets: images ``(N, 3, 32, 32)`` uint8 by name.
        samples: of weights.
        on_pass: called after all images went through the network once.
    """
    model, optimizer = training.model, training.optimizer
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    device = training.images.x.device
    found: dict[str, dict[str, Tensor]] = {}
    try:
        found["mean"] = _one_pass(training, sets)
        on_pass()
        if optimizer.noisy:
            generator = torch.Generator(device).manual_seed(0)
            total: dict[str, Tensor] = {}
            for _ in range(samples):
                with torch.no_grad(), optimizer.sampled_params(generator):
                    for name, probs in _one_pass(training, sets).items():
                        total[name] = probs if name not in total else total[name] + probs
                on_pass()
            found["samples"] = {name: probs / samples for name, probs in total.items()}
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return found


def _one_pass(training: Training, sets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    settle_batch_norm(training.model, training.batches(SETTLING))
    with evaluating(training.model), torch.no_grad():
        return {
            name: torch.cat(
                [training.model(training.normalise(part)).double().softmax(-1).cpu() for part in x.split(CHUNK)]
            )
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
    """Of class probabilities ``(N, c)``, in nats: how unsure the network is."""
    return torch.special.entr(probs).sum(-1)


def corrupted(test: Images, count: int) -> dict[str, Images]:
    """The first ``count`` images in every corruption and severity, by a name such as ``"blur 3"``."""
    some = test.some(slice(count))
    found = {}
    for kind, sizes in CORRUPTIONS.items():
        for severity in range(1, 1 + len(sizes)):
            x = corrupt(some.x, kind, severity, torch.Generator().manual_seed(severity))
            found[f"{kind} {severity}"] = Images(x, some.y, some.classes)
    return found


def evaluate(
    training: Training,
    test: Images,
    strange: Mapping[str, Tensor],
    samples: int,
    *,
    damaged: Mapping[str, Images] = MappingProxyType({}),
    on_pass: OnPass = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Scores on test images, and how well the entropy tells images of other sets from them, for each way to predict.

    Args:
        training: what was trained.
        test: images with labels.
        strange: images of other sets by name.
        samples: of weights.
        damaged: more images with labels, by name, whose scores are wanted too.
        on_pass: as for ``probabilities``.
    """
    device = training.images.x.device
    sets = {"test": test.x, **{name: part.x for name, part in damaged.items()}, **strange}
    result = {}
    for way, probs in probabilities(training, {n: x.to(device) for n, x in sets.items()}, samples, on_pass).items():
        known = entropy(probs["test"])
        result[way] = {
            **scores(probs["test"], test.y.cpu()),
            "auroc": {name: metrics.auroc(known, entropy(probs[name])) for name in strange},
            "corrupted": {name: scores(probs[name], part.y.cpu()) for name, part in damaged.items()},
        }
        for part in result[way]["corrupted"].values():
            del part["reliability"]
    return result
