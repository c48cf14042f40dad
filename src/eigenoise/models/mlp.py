"""The multilayer perceptron, single or stacked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import nn

from eigenoise import checks
from eigenoise.models.chain import Chain
from eigenoise.models.stacked import StackedLinear


class MLP(Chain):
    """A multilayer perceptron with Glorot-uniform initialisation of weights and biases.

    Args:
        in_features: size of an input.
        hidden: sizes of the hidden layers; the paper uses one of 50 or 100.
        out_features: size of an output.
        stack: number of models to train in parallel, with inputs and outputs ``(s, b, ·)``; None for a single one.
        activation: constructor of the activation after each hidden layer.
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        out_features: int,
        stack: int | None = None,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ):
        sizes = [in_features, *hidden, out_features]
        layers: list[nn.Module] = []
        for n, p in itertools.pairwise(sizes):
            checks.integer("a layer's size", n)
            linear = nn.Linear(n, p) if stack is None else StackedLinear(stack, n, p)
            bound = (6 / (n + 1 + p)) ** 0.5  # the bias is one more input
            for parameter in linear.parameters():
                nn.init.uniform_(parameter, -bound, bound)
            layers += [linear, activation()]
        super().__init__(*layers[:-1])
