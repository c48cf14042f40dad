"""How a layer is a matrix ``(..., p, n)``: the sole owner of the bias column and of shared positions.

Each class maps between a module's parameters and one matrix whose last column is the bias, and brings inputs and output
gradients into the canonical form ``a (..., b, t, n)`` and ``g (..., b, t, p)``, t being positions that share weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eigenoise.models import StackedLinear


class MatrixLayer(ABC):
    """A module's trainable weight, with its bias as last column if that trains too and is wanted.

    Attributes:
        name: the module's name in the model.
        params: the parameters that make up the matrix, weight first.
        shape: ``(..., p, n)``, bias column included.
        stack: the number of models if the leading axis counts models, else None.
        batch_dim: the axis of the input that counts examples where there is a choice, else None.
        unfolds: whether activations take more memory than the input they come from.
    """

    stack: int | None = None
    batch_dim: int | None = None
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

    @abstractmethod
    def views(self, matrix: Tensor) -> list[Tensor]:
        """Parts of ``matrix`` in the shapes of ``params``, sharing its memory."""

    @abstractmethod
    def activations(self, x: Tensor) -> Tensor:
        """The module's input as ``(..., b, t, n)``, a column of ones appended if there is a bias."""

    @abstractmethod
    def gradients(self, g: Tensor) -> Tensor:
        """A gradient by the module's output as ``(..., b, t, p)``."""

    def check_batch_axis(self, x: Tensor, examples: int) -> None:
        """Raise ValueError if ``batch_dim`` of a sequence ``x`` cannot count the examples but another axis can."""
        if self.batch_dim is None or x.ndim < 3:
            return
        if self.batch_dim > x.ndim - 2:
            raise ValueError(f"batch_dim={self.batch_dim}, but layer {self.name!r} got an input {tuple(x.shape)}")
        fitting = [axis for axis, size in enumerate(x.shape[:-1]) if size == examples]
        if fitting and x.shape[self.batch_dim] % examples:
            raise ValueError(
                f"layer {self.name!r} got an input {tuple(x.shape)} for {examples} examples, which are on axis "
                f"{fitting[0]}: build the optimiser with batch_dim={fitting[0]}"
            )

    def some(self, x: Tensor, examples: int, start: int, stop: int) -> Tensor:
        """The part of an input, or of a gradient by the output, that belongs to examples ``start`` to ``stop``.

        Raises:
            ValueError: if its rows cannot be told apart by examples.
        """
        if stop - start == examples:
            return x
        axis = self.batch_dim or 0
        if x.ndim > 2 and axis and x.shape[axis] == examples:
            return x.narrow(axis, start, stop - start)
        if x.shape[0] % examples:
            raise ValueError(
                f"layer {self.name!r} got {x.shape[0]} rows for {examples} examples, and which row belongs to which "
                "example is unknown: use stats_fraction=1"
            )
        if axis:  # rows flattened from a sequence-first input have the examples last
            return x.unflatten(0, (-1, examples))[:, start:stop].flatten(0, 1)
        rows = x.shape[0] // examples
        return x[start * rows : stop * rows]

    def regroup(self, x: Tensor, examples: int) -> Tensor:
        """``(..., b, t, ·)`` where b counts several rows of each of ``examples``: those become positions.

        Rows that were flattened from a sequence-first input have the examples last.
        """
        rows = x.shape[-3]
        if rows == examples or rows % examples:
            return x
        if self.batch_dim:
            return x.unflatten(-3, (-1, examples)).movedim(-4, -3).flatten(-3, -2)
        return x.unflatten(-3, (examples, -1)).flatten(-3, -2)

    def _with_ones(self, a: Tensor) -> Tensor:
        return functional.pad(a, (0, 1), value=1.0) if self.has_bias else a.clone()  # the user's own may change

    def _split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        return (matrix[..., :-1], matrix[..., -1]) if self.has_bias else (matrix, None)


class LinearLayer(MatrixLayer):
    """``nn.Linear`` with any leading dimensions: the batch axis counts examples, all others are shared positions."""

    def __init__(self, name: str, module: nn.Module, with_bias: bool = True, batch_dim: int = 0):
        super().__init__(name, module, with_bias)
        self.batch_dim: int = batch_dim

    @property
    def shape(self) -> tuple[int, ...]:
        """``(p, n)``."""
        p, n = self.params[0].shape
        return p, n + self.has_bias

    def views(self, matrix: Tensor) -> list[Tensor]:
        """Weight ``(p, n)`` and bias ``(p,)``."""
        return [part for part in self._split(matrix) if part is not None]

    def activations(self, x: Tensor) -> Tensor:
        """``(b, ..., n)`` as ``(b, t, n)``."""
        return self._with_ones(self._examples_first(x))

    def gradients(self, g: Tensor) -> Tensor:
        """``(b, ..., p)`` as ``(b, t, p)``."""
        return self._examples_first(g)

    def _examples_first(self, x: Tensor) -> Tensor:
        if x.ndim == 1:
            x = x.unsqueeze(0)
        if x.ndim > 2:
            return x.movedim(self.batch_dim, 0).flatten(1, -2)
        return x.unsqueeze(1)


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

    def activations(self, x: Tensor) -> Tensor:
        """``(..., b, n)`` as ``(s, b, 1, n)``."""
        return self._with_ones(self._models_first(x))

    def gradients(self, g: Tensor) -> Tensor:
        """``(..., b, p)`` as ``(s, b, 1, p)``."""
        return self._models_first(g)

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

    def activations(self, x: Tensor) -> Tensor:
        """Patches ``(b, t, n)``, or ``(groups, b, t, n)``."""
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

    def gradients(self, g: Tensor) -> Tensor:
        """``(b, p, places...)`` as ``(b, t, p)``, or ``(groups, b, t, p)``."""
        g = g if g.ndim == len(self.module.kernel_size) + 2 else g.unsqueeze(0)
        return self._groups_first(g.flatten(2))

    def _groups_first(self, x: Tensor) -> Tensor:
        groups = self.module.groups
        if groups == 1:
            return x.mT
        return x.unflatten(1, (groups, -1)).movedim(1, 0).mT


class BareParameter:
    """A parameter that is no layer's matrix: it gets the diagonal structure in its own shape."""

    stack = None
    unfolds = False

    def __init__(self, name: str, param: nn.Parameter):
        self.name = name
        self.params = [param]
        self.param_names = [name]
        self.shape = tuple(param.shape)

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
