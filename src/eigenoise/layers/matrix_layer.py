"""How a layer is a matrix ``(..., p, n)``: the sole owner of the bias column and of shared positions.

Each class maps between a module's parameters and one matrix whose last column is the bias, and brings inputs and output
gradients into the canonical form ``a (..., b, t, n)`` and ``g (..., b, t, p)``, t being positions that share weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from eigenoise.models import StackedLinear


class Grouping(NamedTuple):
    """Where the examples are among a layer's rows.

    Attributes:
        axis: the axis of the layer's input that counts them, or None for all axes before the features, flattened.
        inner: if an example has several places on that axis, whether examples change fastest along it.
    """

    axis: int | None
    inner: bool = False


class MatrixLayer(ABC):
    """A module's trainable weight, with its bias as last column if that trains too and is wanted.

    Attributes:
        name: the module's name in the model.
        params: the parameters that make up the matrix, weight first.
        shape: ``(..., p, n)``, bias column included.
        stack: the number of models if the leading axis counts models, else None.
        unfolds: whether activations take more memory than the input they come from.
    """

    stack: int | None = None
    unfolds = False

    def __init__(self, name: str, module: nn.Module, with_bias: bool = True):
        self.name = name
        self.module: Any = module
        bias = module.bias
        self.has_bias = with_bias and isinstance(bias, nn.Parameter) and bias.requires_grad
        self.params: list[nn.Parameter] = [module.weight, bias] if self.has_bias else [module.weight]  # type: ignore[list-item]
        self.param_names = [f"{name}.{part}".lstrip(".") for part in ("weight", "bias")[: len(self.params)]]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape ``(..., p, n)`` of the matrix."""

    @property
    def fan_in(self) -> int | None:
        """Number of inputs, the bias column not counted."""
        return self.shape[-1] - self.has_bias

    @abstractmethod
    def views(self, matrix: Tensor) -> list[Tensor]:
        """Parts of ``matrix`` in the shapes of ``params``, sharing its memory."""

    @abstractmethod
    def rows(self, x: Tensor, axis: int | None) -> Tensor:
        """The module's input as ``(..., m, t, n)``, m counted by ``axis``, a column of ones appended for a bias."""

    @abstractmethod
    def gradient_rows(self, g: Tensor, axis: int | None) -> Tensor:
        """A gradient by the module's output as ``(..., m, t, p)``."""

    @abstractmethod
    def axes(self, x: Tensor) -> list[int | None]:
        """Axes of the input that may count examples; None stands for several of them, flattened."""

    def groupings(self, x: Tensor, examples: int) -> list[Grouping]:
        """Every way in which the rows of an input can belong to so many examples."""
        ways = []
        for axis in self.axes(x):
            size = self._size(x, axis)
            if size and size % examples == 0:
                ways += [Grouping(axis), Grouping(axis, inner=True)][: 1 + (size > examples)]
        return ways

    def activations(self, x: Tensor, examples: int, grouping: Grouping | None) -> Tensor:
        """The input as ``(..., b, t, n)``; without a grouping all rows are one example."""
        return _grouped(self.rows(x, None if grouping is None else grouping.axis), examples, grouping)

    def gradients(self, g: Tensor, examples: int, grouping: Grouping | None) -> Tensor:
        """A gradient by the output as ``(..., b, t, p)``."""
        return _grouped(self.gradient_rows(g, None if grouping is None else grouping.axis), examples, grouping)

    def narrow(self, x: Tensor, examples: int, grouping: Grouping, start: int, stop: int) -> Tensor:
        """The part of an input, or of a gradient by the output, that belongs to examples ``start`` to ``stop``."""
        if stop - start == examples:
            return x
        if grouping.axis is None:
            x, axis = x.flatten(0, -2), 0
        else:
            axis = grouping.axis
        places = x.shape[axis] // examples
        if not grouping.inner:
            return x.narrow(axis, start * places, (stop - start) * places)
        return x.unflatten(axis, (places, examples)).narrow(axis + 1, start, stop - start).flatten(axis, axis + 1)

    def _size(self, x: Tensor, axis: int | None) -> int:
        return x.shape[:-1].numel() if axis is None else x.shape[axis]

    def _with_ones(self, a: Tensor) -> Tensor:
        return functional.pad(a, (0, 1), value=1.0) if self.has_bias else a.clone()  # the caller may change its own

    def _split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        return (matrix[..., :-1], matrix[..., -1]) if self.has_bias else (matrix, None)


class LinearLayer(MatrixLayer):
    """``nn.Linear`` with any leading dimensions: one of them counts examples, all others are shared positions."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``(p, n)``."""
        p, n = self.params[0].shape
        return p, n + self.has_bias

    def views(self, matrix: Tensor) -> list[Tensor]:
        """Weight ``(p, n)`` and bias ``(p,)``."""
        return [part for part in self._split(matrix) if part is not None]

    def rows(self, x: Tensor, axis: int | None) -> Tensor:
        """``(..., n)`` as ``(m, t, n)``."""
        return self._with_ones(self._axis_first(x, axis))

    def gradient_rows(self, g: Tensor, axis: int | None) -> Tensor:
        """``(..., p)`` as ``(m, t, p)``."""
        return self._axis_first(g, axis)

    def axes(self, x: Tensor) -> list[int | None]:
        """Every axis before the features, and all of them together."""
        return [*range(x.ndim - 1), *([None] if x.ndim > 2 else [])]

    @staticmethod
    def _axis_first(x: Tensor, axis: int | None) -> Tensor:
        if axis is None or x.ndim <= 2:
            return x.reshape(-1, 1, x.shape[-1])
        return x.movedim(axis, 0).flatten(1, -2)


class StackedLinearLayer(MatrixLayer):
    """``StackedLinear``: the leading axis counts models."""

    def __init__(self, name: str, module: StackedLinear, with_bias: bool = True):
        super().__init__(name, module, with_bias)
        self.stack = module.stack
        self.lead: tuple[int, ...] = (module.stack,)  # (k, s) while k weight samples are drawn at once

    @property
    def shape(self) -> tuple[int, ...]:
        """``(s, p, n)``."""
        s, p, n = self.params[0].shape
        return s, p, n + self.has_bias

    def views(self, matrix: Tensor) -> list[Tensor]:
        """Weight ``(..., s, p, n)`` and bias ``(..., s, p)``."""
        return [part for part in self._split(matrix) if part is not None]

    def rows(self, x: Tensor, axis: int | None = 1) -> Tensor:
        """``(..., b, n)`` as ``(s, b, 1, n)``."""
        return self._with_ones(self._models_first(x))

    def gradient_rows(self, g: Tensor, axis: int | None = 1) -> Tensor:
        """``(..., b, p)`` as ``(s, b, 1, p)``."""
        return self._models_first(g)

    def axes(self, x: Tensor) -> list[int | None]:
        """None: rows of a stack are always examples, and nothing is to be found out."""
        return []

    def _models_first(self, x: Tensor) -> Tensor:
        x = x.expand(*self.lead, *x.shape[-2:])
        if len(self.lead) > 1:  # weight samples count as further examples
            x = x.movedim(0, 1).flatten(1, 2)
        return x.unsqueeze(2)


class ConvLayer(MatrixLayer):
    """``nn.Conv1d`` and ``nn.Conv2d``: positions are the output's places, groups a leading dimension."""

    unfolds = True

    @property
    def shape(self) -> tuple[int, ...]:
        """``(p, c·taps)``, or ``(groups, p, c·taps)`` with p and c counted in one group."""
        p, *rest = self.params[0].shape
        n = torch.Size(rest).numel() + self.has_bias
        groups = self.module.groups
        return (p, n) if groups == 1 else (groups, p // groups, n)

    def views(self, matrix: Tensor) -> list[Tensor]:
        """Weight ``(p, c, taps...)`` and bias ``(p,)``."""
        weight, bias = self._split(matrix)
        weight = weight.unflatten(-1, self.params[0].shape[1:])
        if self.module.groups > 1:
            weight = weight.flatten(0, 1)
            bias = None if bias is None else bias.flatten()
        return [weight] if bias is None else [weight, bias]

    def rows(self, x: Tensor, axis: int | None = 0) -> Tensor:
        """Patches ``(m, t, n)``, or ``(groups, m, t, n)``."""
        conv = self.module
        spatial = len(conv.kernel_size)
        x = x if x.ndim == spatial + 2 else x.unsqueeze(0)
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = functional.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
        kernel, dilation, stride = conv.kernel_size, conv.dilation, conv.stride
        if spatial == 1:
            x, kernel, dilation, stride = x.unsqueeze(2), (1, *kernel), (1, *dilation), (1, *stride)
        patches = functional.unfold(x, kernel, dilation=dilation, stride=stride)  # (b, channels·taps, t)
        patches = self._groups_first(patches)
        return self._with_ones(patches) if self.has_bias else patches

    def gradient_rows(self, g: Tensor, axis: int | None = 0) -> Tensor:
        """``(m, p, places...)`` as ``(m, t, p)``, or ``(groups, m, t, p)``."""
        g = g if g.ndim == len(self.module.kernel_size) + 2 else g.unsqueeze(0)
        return self._groups_first(g.flatten(2))

    def axes(self, x: Tensor) -> list[int | None]:
        """The first axis, if there is one before the channels."""
        return [0] if x.ndim == len(self.module.kernel_size) + 2 else []

    def _groups_first(self, x: Tensor) -> Tensor:
        groups = self.module.groups
        if groups == 1:
            return x.mT
        return x.unflatten(1, (groups, -1)).movedim(1, 0).mT


class BareParameter:
    """A parameter that is no layer's matrix: it gets the diagonal structure in its own shape.

    Args:
        name: its name in the model.
        param: the parameter.
        owner: the module that it belongs to.

    Attributes:
        fan_in: the number of inputs if it is a matrix that multiplies them, else None.
    """

    stack = None
    unfolds = False

    def __init__(self, name: str, param: nn.Parameter, owner: nn.Module | None = None):
        self.name = name
        self.params = [param]
        self.param_names = [name]
        self.shape = tuple(param.shape)
        is_lookup = isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        self.fan_in = None if param.ndim < 2 or is_lookup else param.shape[1:].numel()

    def views(self, matrix: Tensor) -> list[Tensor]:
        """The array itself."""
        return [matrix]


def as_matrix_layer(name: str, module: nn.Module, with_bias: bool = True) -> MatrixLayer | None:
    """The matrix that ``module`` is, with its bias as last column unless not wanted, or None if it is none we know.

    A subclass that computes something else in its ``forward`` is none, nor is a module whose weight is frozen, computed
    by a parametrisation, or used without calling the module.
    """
    kind: Any = type(module)
    if "forward" in module.__dict__:
        return None
    if not (isinstance(module._parameters.get("weight"), nn.Parameter) and module.weight.requires_grad):
        return None
    if kind.forward is nn.Linear.forward:
        return LinearLayer(name, module, with_bias)
    if kind.forward is StackedLinear.forward and isinstance(module, StackedLinear):
        return StackedLinearLayer(name, module, with_bias)
    for conv in (nn.Conv1d, nn.Conv2d):
        if kind.forward is conv.forward and kind._conv_forward is conv._conv_forward:
            return ConvLayer(name, module, with_bias)
    return None


def _grouped(rows: Tensor, examples: int, grouping: Grouping | None) -> Tensor:
    """``(..., m, t, k)`` as ``(..., examples, t', k)``: the places of an example are further positions."""
    if grouping is None:
        return rows.flatten(-3, -2).unsqueeze(-3)
    if rows.shape[-3] == examples:
        return rows
    if grouping.inner:
        return rows.unflatten(-3, (-1, examples)).movedim(-4, -3).flatten(-3, -2)
    return rows.unflatten(-3, (examples, -1)).flatten(-3, -2)
