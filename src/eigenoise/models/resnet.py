"""Residual networks for images of 32×32, as He et al. (2016) have them for CIFAR-10."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from eigenoise import checks
from eigenoise.models.chain import Chain


class _Block(nn.Module):
    """Two 3×3 convolutions and a shortcut: where sizes change, every second pixel, and zeros for the new channels."""

    def __init__(self, channels: int, size: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(channels, size, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(size, size, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(size), nn.BatchNorm2d(size)
        self.stride, self.more = stride, size - channels

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.first_norm(self.first(x)))
        h = self.second_norm(self.second(h))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return functional.relu(h + functional.pad(shortcut, (0, 0, 0, 0, 0, self.more)))


class ResNet20(Chain):
    """A convolution, nine blocks of two with 16, 32 and 64 channels, the mean over places and one linear layer.

    Args:
        width: factor on the number of channels.
        in_channels: of an image.
        classes: outputs.
    """

    def __init__(self, *, width: float = 1.0, in_channels: int = 3, classes: int = 10):
        checks.number("width", width, open_low=True)
        sizes = [max(1, round(width * 16 * 2**stage)) for stage in range(3)]
        start = nn.Conv2d(checks.integer("in_channels", in_channels), sizes[0], 3, padding=1, bias=False)
        layers: list[nn.Module] = [start, nn.BatchNorm2d(sizes[0]), nn.ReLU()]
        channels = sizes[0]
        for stage, size in enumerate(sizes):
            for block in range(3):
                layers.append(_Block(channels, size, stride=2 if stage and not block else 1))
                channels = size
        head = nn.Linear(channels, checks.integer("classes", classes))
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(head.bias)
