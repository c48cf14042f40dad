"""Networks: a multilayer perceptron, for one model or for a stack of many trained at once."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from eigenoise import checks


class StackedLinear(nn.Module):
    """s Linear layers side by side: weight ``(s, p, n)``, bias ``(s, p)``.

    Takes ``(s, b, n)``, or ``(b, n)`` to show the same batch to every model, and returns ``(s, b, p)``. While
    ``sample`` is set, k weight samples ``(k, s, p, n)`` and ``(k, s, p)`` take the parameters' place, and the result
    is ``(k, s, b, p)``.
    """

    def __init__(self, stack: int, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.stack = checks.integer("stack", stack)
        self.in_features = checks.integer("in_features", in_features)
        self.out_features = checks.integer("out_features", out_features)
        self.weight = nn.Parameter(torch.empty(stack, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(stack, out_features)) if bias else None
        self.sample: tuple[Tensor, ...] | None = None
        bound = in_features**-0.5  # as torch's Linear starts
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Each model's own affine map."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.sample is not None:
            weight, bias = self.sample[0], self.sample[1] if len(self.sample) > 1 else self.bias
        lead = weight.shape[:-2]
        x = x.expand(*lead, *x.shape[-2:])
        if len(lead) > 1:
            x, weight = x.flatten(0, -3), weight.flatten(0, -3)
        if bias is None:
            out = torch.bmm(x, weight.mT)
        else:
            bias = bias.expand(*lead, bias.shape[-1]).reshape(-1, 1, bias.shape[-1])
            out = torch.baddbmm(bias, x, weight.mT)
        return out if len(lead) == 1 else out.unflatten(0, lead)

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        return f"stack={self.stack}, in_features={self.in_features}, out_features={self.out_features}"


class MLP(nn.Sequential):
    """A multilayer perceptron with ReLU, weights and biases started as Glorot and Bengio propose.

    Args:
        in_features: size of an input.
        hidden: sizes of the hidden layers; the paper uses one of 50 or 100.
        out_features: size of the output.
        stack: train this many models at once; inputs and outputs are then ``(s, b, ·)``.
    """

    def __init__(self, in_features: int, hidden: list[int], out_features: int, stack: int | None = None):
        sizes = [in_features, *hidden, out_features]
        layers: list[nn.Module] = []
        for n, p in itertools.pairwise(sizes):
            checks.integer("a layer's size", n)
            linear = nn.Linear(n, p) if stack is None else StackedLinear(stack, n, p)
            bound = (6 / (n + 1 + p)) ** 0.5  # the bias column counts as one more input
            for parameter in linear.parameters():
                nn.init.uniform_(parameter, -bound, bound)
            layers += [linear, nn.ReLU()]
        super().__init__(*layers[:-1])
