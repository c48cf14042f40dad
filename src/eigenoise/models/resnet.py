"""The residual network of He et al. (2016) for CIFAR-10."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from eigenoise import checks
from eigenoise.models.chain import Chain


class _Block(nn.Module):
    """Two 3×3 convolutions and a parameter-free shortcut: strided, with new channels padded by zeros."""

    def __init__(self, channels: int, size: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(channels, size, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(size, size, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(size), nn.BatchNorm2d(size)
        self.stride, self.new_channels = stride, size - channels

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.first_norm(self.first(x)))
        h = self.second_norm(self.second(h))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return functional.relu(h + functional.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels)))


class ResNet20(Chain):
    """ResNet-20: a convolution, nine residual blocks of 16, 32 and 64 channels, average pooling, one linear layer.

    Args:
        width: factor on the number of channels.
        in_channels: channels of an image.
        classes: number of classes.
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
