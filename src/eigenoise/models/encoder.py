"""A small transformer encoder of plain Linear layers, for sequences of vectors."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from eigenoise import checks
from eigenoise.models.chain import Chain


class _Block(nn.Module):
    """Attention, then two Linear layers, each with a norm before and a shortcut around."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before_attention(x)
        parts = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(*parts)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class TransformerEncoder(Chain):
    """Sequences ``(b, t, width)`` to class scores ``(b, classes)``: blocks, a norm, the mean over t, one Linear layer.

    Args:
        width: of a token.
        depth: number of blocks.
        heads: of the attention; they divide the width.
        classes: outputs.
    """

    def __init__(self, width: int = 256, depth: int = 4, heads: int = 4, classes: int = 10):
        if checks.integer("width", width) % checks.integer("heads", heads):
            raise ValueError(f"width must be a multiple of heads, but {width} and {heads} came")
        blocks = [_Block(width, heads) for _ in range(checks.integer("depth", depth))]
        head = nn.Linear(width, checks.integer("classes", classes))
        super().__init__(*blocks, nn.LayerNorm(width), _MeanOverTokens(), head)


class _MeanOverTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)
