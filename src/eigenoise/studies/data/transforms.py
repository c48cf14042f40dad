"""Transforms of batches of images, on their device: normalising, augmenting, corrupting."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eigenoise import checks

CORRUPTIONS = {  # five severities each, as Hendrycks and Dietterich (2019) have them for CIFAR-10
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation, white being 1
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # standard deviation in pixels
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # what is left of it
}


@dataclass(frozen=True)
class Normalise:
    """Whole numbers from 0 to 255 to numbers of mean 0 and variance 1 in each colour.

    Attributes:
        mean: ``(3, 1, 1)``.
        std: ``(3, 1, 1)``.
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Normalise:
        """Uses the mean and standard deviation of training images ``x (N, 3, h, w)``; a constant colour keeps its size.

        Raises:
            ValueError: if there are no images.
        """
        if not x.numel():
            raise ValueError(f"x: expected images, got the shape {tuple(x.shape)}")
        count = x.numel() // x.shape[1]
        mean = torch.stack([colour.sum(dtype=torch.float64) / count for colour in x.unbind(1)])
        square = torch.stack([colour.double().square_().sum() / count for colour in x.unbind(1)])
        std = (square - mean.square()).clamp_min(0.0).sqrt()
        std = torch.where(std > 0, std, 1.0)
        return cls(mean.float()[:, None, None], std.float()[:, None, None])

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises ``x (b, 3, h, w)``, as float32."""
        return x.float().sub_(self.mean.to(x.device)).div_(self.std.to(x.device))


def augment(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Shifts each image by up to ``padding`` pixels, filling with black, and mirrors it half of the time.

    Args:
        x: ``(b, c, h, w)``.
        generator: source of shifts and mirrors; on the CPU, a batch is the same on every device.
        padding: pixels at each side.
    """
    b, c, h, w = x.shape
    home = generator.device
    down, right = torch.randint(2 * padding + 1, (2, b, 1), generator=generator, device=home).to(x.device)
    mirrored = torch.randint(2, (b, 1), generator=generator, device=home).to(x.device, torch.bool)
    rows = down + torch.arange(h, device=x.device)  # (b, h)
    columns = torch.arange(w, device=x.device).expand(b, -1)
    columns = right + torch.where(mirrored, w - 1 - columns, columns)
    padded = functional.pad(x, (padding,) * 4)
    images = torch.arange(b, device=x.device)[:, None, None, None]
    colours = torch.arange(c, device=x.device)[None, :, None, None]
    return padded[images, colours, rows[:, None, :, None], columns[:, None, None, :]]


def corrupt(x: Tensor, kind: str, severity: int, generator: torch.Generator) -> Tensor:
    """Corrupts images ``x (b, 3, h, w)`` uint8, as uint8.

    Args:
        x: the images.
        kind: ``"noise"``, ``"blur"`` or ``"contrast"``.
        severity: from 1 to 5.
        generator: source of noise.
    """
    sizes = CORRUPTIONS[checks.choice("kind", kind, CORRUPTIONS)]
    if not 1 <= checks.integer("severity", severity, low=0) <= len(sizes):
        raise ValueError(f"severity: expected 1 to {len(sizes)}, got {severity}")
    size = sizes[severity - 1]
    image = x.float() / 255
    if kind == "noise":
        white = torch.randn(x.shape, generator=generator, device=generator.device)
        image += size * white.to(x.device)
    elif kind == "blur":
        image = _blurred(image, size)
    else:
        mean = image.mean((2, 3), keepdim=True)
        image = torch.lerp(mean, image, size)
    return image.mul_(255).round_().clamp_(0, 255).to(torch.uint8)


def _blurred(image: Tensor, std: float) -> Tensor:
    """Applies a Gaussian filter in both directions; the image is mirrored at its edges."""
    radius = math.ceil(4 * std)
    at = torch.arange(-radius, radius + 1, device=image.device, dtype=image.dtype)
    filter_ = (-0.5 * (at / std).square()).exp()
    filter_ = filter_ / filter_.sum()
    c = image.shape[1]
    image = functional.pad(image, (radius,) * 4, mode="reflect")
    image = functional.conv2d(image, filter_.view(1, 1, -1, 1).expand(c, -1, -1, -1), groups=c)
    return functional.conv2d(image, filter_.view(1, 1, 1, -1).expand(c, -1, -1, -1), groups=c)
