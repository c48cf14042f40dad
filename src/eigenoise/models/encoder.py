"""A small transformer encoder of plain Linear layers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from eigenoise import checks
from eigenoise.models.chain import Chain


class _Block(nn.Module):
    """A pre-norm block: attention, then an MLP, each with a residual connection."""

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
        attended = functional.scaled_dot_product_attention(*parts)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class TransformerEncoder(Chain):
    """Map sequences ``(b, t, width)`` to logits ``(b, classes)``: blocks, layer norm, mean over t, one Linear layer.

    Args:
        width: size of a token.
        depth: number of blocks.
        heads: number of attention heads; must divide ``width``.
        classes: number of classes.
    """

    def __init__(self, width: int = 256, depth: int = 4, heads: int = 4, classes: int = 10):
        if checks.integer("width", width) % checks.integer("heads", heads):
            raise ValueError(f"width must be a multiple of heads, got width {width} and {heads} heads")
        blocks = [_Block(width, heads) for _ in range(checks.integer("depth", depth))]
        head = nn.Linear(width, checks.integer("classes", classes))
        super().__init__(*blocks, nn.LayerNorm(width), _MeanOverTokens(), head)


class _MeanOverTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)
