"""Linear layers of s models in one batched layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from eigenoise import checks


class SampledLinear(torch.autograd.Function):
    """k affine maps for each of s models; a parameter's gradient is the sum over its k weight samples.

    Autograd alone would materialise k·s gradients before the sum; here they exist only if ``sample`` requires grad. In
    memory k comes after s, so that each model's samples are contiguous.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sample: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the maps of all weight samples.

        Args:
            ctx: autograd's context.
            x: inputs ``(k, s, b, n)``, ``(s, b, n)`` or ``(b, n)``.
            sample: weight samples ``(s, k, p, n)``, or ``(s, k, p, n + 1)`` with the bias as last column.
            weight: the parameter ``(s, p, n)`` that receives the gradient.
            bias: the parameter ``(s, p)`` or None; added if the samples have no bias column.

        Returns:
            The outputs ``(k, s, b, p)``.
        """
        s, k, p, columns = sample.shape
        b, n = x.shape[-2:]
        rows = x.transpose(0, 1) if x.ndim > 3 else x.expand(s, b, n).unsqueeze(1)
        rows = rows.to(sample.dtype)
        if columns > n:
            rows = functional.pad(rows, (0, 1), value=1.0)
        rows = rows.expand(s, k, b, columns).flatten(0, 1)
        out = torch.empty_permuted((k, s, b, p), (1, 0, 2, 3), dtype=sample.dtype, device=sample.device)
        torch.bmm(rows, sample.flatten(0, 1).mT, out=out.transpose(0, 1).flatten(0, 1))
        if columns == n and bias is not None:
            out += bias.unsqueeze(1)
        ctx.save_for_backward(rows, sample)
        ctx.like_x = x.shape, x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of ``forward``, given ``g (k, s, b, p)`` of its output."""
        rows, sample = ctx.saved_tensors
        (shape, dtype), (s, k) = ctx.like_x, sample.shape[:2]
        n = shape[-1]
        wanted = ctx.needs_input_grad
        g = g.transpose(0, 1)  # (s, k, b, p)
        flat = g.flatten(0, 1)
        by_x = by_sample = by_bias = total = None
        if wanted[0]:
            by_x = torch.bmm(flat, sample.flatten(0, 1)[..., :n]).unflatten(0, (s, k)).transpose(0, 1)
            by_x = by_x.sum_to_size(shape).to(dtype)
        if wanted[1]:
            by_sample = torch.bmm(flat.mT, rows).unflatten(0, (s, k))
            total = by_sample.sum(1)
        elif wanted[2]:
            total = torch.bmm(g.flatten(1, 2).mT, rows.unflatten(0, (s, k)).flatten(1, 2))  # (s, p, n or n + 1)
        if wanted[3]:
            by_bias = g.sum((1, 2)) if total is None or total.shape[-1] == n else total[..., n]
        return by_x, by_sample, None if total is None or not wanted[2] else total[..., :n], by_bias


class StackedLinear(nn.Module):
    """The Linear layers of s models: weight ``(s, p, n)``, bias ``(s, p)``.

    Maps ``(s, b, n)``, or ``(b, n)`` for a batch that all models share, to ``(s, b, p)``. While ``sample`` is set,
    ``SampledLinear`` applies k weight samples of each model instead and returns ``(k, s, b, p)``.
    """

    def __init__(self, stack: int, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.stack = checks.integer("stack", stack)
        self.in_features = checks.integer("in_features", in_features)
        self.out_features = checks.integer("out_features", out_features)
        self.weight = nn.Parameter(torch.empty(stack, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(stack, out_features)) if bias else None
        self.sample: Tensor | None = None
        bound = in_features**-0.5  # as in nn.Linear
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Apply each model's affine map."""
        if self.sample is not None:
            return SampledLinear.apply(x, self.sample, self.weight, self.bias)
        x = x.expand(self.stack, *x.shape[-2:])
        if self.bias is None:
            return torch.bmm(x, self.weight.mT)
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)

    def extra_repr(self) -> str:
        """Return the sizes for ``print``."""
        return f"stack={self.stack}, in_features={self.in_features}, out_features={self.out_features}"
