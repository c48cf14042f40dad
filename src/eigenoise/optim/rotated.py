"""Parameters that live in an eigenbasis: their values are worked out only when someone looks.

A large layer's mean and sample are kept as coordinates W̃ = Q_SᵀWQ_A. Between blocks the layer's parameters are of the
class ``Rotated``: the first function that needs their values brings them up to date. Within a block such a function
sees the sample, and a linear map of few rows is done in the basis, without forming the weight. Gradients that reach the
parameters are coordinates in the basis too, which leaves their norms as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils import _pytree as pytree

from eigenoise.fisher.base import FLOOR
from eigenoise.fisher.kronecker_factors import KroneckerFactors
from eigenoise.layers.matrix_layer import MatrixLayer
from eigenoise.linalg.kronecker import full_precision

WORTHWHILE = 1 << 20  # multiplications in one rotation

# What can be asked of a parameter without looking at its value.
_PROPERTIES = (
    "shape dtype device layout ndim requires_grad is_leaf grad grad_fn is_sparse is_quantized is_meta is_cuda is_cpu "
    "itemsize nbytes _version _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "size dim numel stride storage_offset is_contiguous element_size get_device is_floating_point is_complex "
    "register_hook register_post_accumulate_grad_hook requires_grad_ __hash__ __len__"
)
_BLIND = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
    torch.Tensor.grad.__delete__,  # type: ignore[union-attr]
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}


def worthwhile(layer: MatrixLayer) -> bool:
    """Whether the layer is so large that a rotation of its matrix costs more than what is done here to save one."""
    ordinary = all(type(param) is nn.Parameter for param in layer.params)
    return ordinary and math.prod(layer.shape) * sum(layer.shape[-2:]) >= WORTHWHILE


@dataclass(frozen=True)
class FreshNoise:
    """Noise of the weights that is drawn anew for every example, in the place of one sample for all.

    Attributes:
        variance: ``(p, n)`` in the basis, up to ``spread²``.
        spread: factor on the standard deviation.
        generator: source.
        share: draws one sample for all, where that is to be preferred; None if it never is.
    """

    variance: Tensor
    spread: float
    generator: torch.Generator
    share: Callable[[], None] | None = None

    def like(self, variance: Tensor) -> Tensor:
        """Independent normal numbers of ``variance``, up to ``spread²``, differentiable by it."""
        white = torch.randn(
            variance.shape, generator=self.generator, dtype=variance.dtype, device=self.generator.device
        ).to(variance.device)
        return variance.clamp_min(FLOOR).sqrt() * white.mul_(self.spread)


class Keeper:
    """One layer's matrix in the basis of its Fisher.

    Args:
        layer: whose parameters stand for the matrix.
        basis: Q_S and Q_A, or None for that of the weights.
        mean: ``(..., p, n)`` in the basis; whoever moves it sets ``behind``.
        sample: ``(..., p, n)`` in the basis, what is seen within a block.

    Attributes:
        behind: whether the parameters' memory is older than the mean.
        inside: whether a block is running.
        weights_wanted: whether a backward pass wants gradients by the weights; statistics want those by outputs only.
        fresh: if set, calls of the layer within the block add noise of their own for every example to the mean, until
            one of them prefers a shared sample.
    """

    def __init__(self, layer: MatrixLayer, basis: KroneckerFactors | None, mean: Tensor, sample: Tensor):
        self.layer, self.basis, self.mean, self.sample = layer, basis, mean, sample
        self.behind = self.inside = False
        self.fresh: FreshNoise | None = None
        self.weights_wanted = True
        self._formed: tuple[Tensor, ...] | None = None

    # Between blocks.

    @property
    def hidden(self) -> bool:
        """Whether nobody, nor another optimiser's keeper, has looked since the parameters were last hidden."""
        return len(self._own()) == len(self.layer.params)

    def _own(self) -> list[Any]:
        """Parameters that are hidden by this keeper."""
        return [param for param in self.layer.params if type(param) is Rotated and param._keeper is self]

    def read(self) -> None:
        """The mean from the parameters if someone has looked at them, and so may have changed them, and hide them.

        Where they hold just what they were shown as, the mean stays as it is, to the last bit.
        """
        if self.hidden:
            return
        for param in self.layer.params:
            if type(param) is Rotated:
                param._keeper.show()
        shown = torch.empty_like(self.mean)
        for view, param in zip(self.layer.views(shown), self.layer.params, strict=True):
            view.copy_(param)
        with full_precision(self.mean.device):
            if not torch.equal(self._as_weights(self.mean), shown):
                self.mean.copy_(shown if self.basis is None else self.basis.rotate(shown))
        for param in self.layer.params:
            param.__class__ = Rotated
            param._keeper = self  # type: ignore[attr-defined]

    @torch.no_grad()
    def show(self) -> None:
        """The mean into the parameters, which are ordinary ones from now on."""
        hidden = self._own()
        if not hidden:
            return
        for param in hidden:
            param.__class__ = nn.Parameter
            del param._keeper
        if self.behind:
            with full_precision(self.mean.device):
                views = self.layer.views(self._as_weights(self.mean))
            torch._foreach_copy_([*self.layer.params], views)
            self.behind = False

    def _as_weights(self, matrix: Tensor) -> Tensor:
        return matrix if self.basis is None else self.basis.unrotate(matrix)

    # Within a block.

    def enter(self) -> None:
        """From now on the sample is seen."""
        self.inside = True

    def leave(self) -> None:
        """The sample is gone, and a backward pass that comes too late is autograd's error."""
        if self.fresh is not None:
            self.sample.copy_(self.mean)  # around which the noise was drawn
        self.inside, self._formed, self.fresh = False, None, None
        self.sample[:0].zero_()  # moves its version on

    def look(self, param: Tensor) -> Tensor:
        """What stands for ``param`` when its value is needed: itself, up to date, or within a block its sample."""
        if not self.inside:
            self.show()
            return param
        return self.formed()[next(i for i, own in enumerate(self.layer.params) if own is param)]

    def formed(self) -> tuple[Tensor, ...]:
        """The sample in the shapes of the parameters; their gradients are rotated on the way."""
        self._share()
        if self._formed is None or (torch.is_grad_enabled() and not self._formed[0].requires_grad):
            # A checkpoint must not count what is kept here among what it computes again.
            with saved_tensors_hooks(lambda t: t, lambda t: t), full_precision(self.sample.device):
                matrix = self.sample if self.fresh is None else self.mean
                self._formed = _Form.apply(self.layer, self.basis, matrix, *self.layer.params)
        return self._formed

    def _share(self) -> None:
        """Draw one sample for all from now on, if that may be."""
        if self.fresh is not None and self.fresh.share is not None:
            with torch.no_grad(), full_precision(self.sample.device):
                self.fresh.share()
            self.fresh = None

    def linear(self, x: Tensor) -> Tensor:
        """W·[x; 1] for rows ``x (..., n)``, done in the basis where that costs less than forming W."""
        p, n = self.sample.shape[-2:]
        rows = x.numel() // max(1, x.shape[-1])
        turn = 0 if self.basis is None else self.basis.inputs.turn_cost
        few = self.basis is not None and rows * (p * p + turn) <= p * (p * n + turn)
        few = few and not torch.is_autocast_enabled(x.device.type)
        if not (few and x.ndim == 2) or _is_checkpointed():
            self._share()
        if self.fresh is None and not few:
            return functional.linear(x, *self.formed())
        a = self._turned(x)
        matrix = self.sample if self.fresh is None else self.mean
        out = _Rows.apply(a, matrix, self, *self.layer.params)
        if self.fresh is not None:
            _refuse_second_forward(self.layer)
            with full_precision(a.device):
                variance = functional.linear(a.to(self.mean.dtype).square(), self.fresh.variance)
            out = out + self.fresh.like(variance).to(out.dtype)
        return out if self.basis is None else functional.linear(out, self.basis.q_out)

    def _turned(self, x: Tensor) -> Tensor:
        """[x; 1]·Q_A, or x·Q_A if there is no bias."""
        has_bias = self.layer.has_bias
        q_in = None if self.basis is None else self.basis.inputs.matrix()
        if q_in is None:
            return functional.pad(x, (0, 1), value=1.0) if has_bias else x
        return functional.linear(x, q_in[:-1].mT, q_in[-1]) if has_bias else functional.linear(x, q_in.mT)

    def convolve(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, rest: Any) -> Tensor:
        """``conv`` of ``x`` with the mean, plus noise drawn for every place of every example.

        It has the variance that independent weights of the same marginal variances give: correlations between weights
        and between places are left out.
        """
        assert self.fresh is not None
        _refuse_second_forward(self.layer)
        variance = self.fresh.variance
        if self.basis is not None:
            variance = self.basis.unrotate_variances(variance)
        own = len(self.layer.params) > 1
        spread = [view.contiguous() for view in self.layer.views(variance)]
        args, kwargs = rest
        mean = conv(x, *self.formed(), *(() if own else (bias,)), *args, **kwargs)
        with full_precision(x.device):
            squares = x.to(variance.dtype).square()
            noise = self.fresh.like(conv(squares, *spread, *(() if own else (None,)), *args, **kwargs))
        return mean + noise.to(mean.dtype)


def _is_checkpointed() -> bool:
    """Whether what is computed now may be computed again, as autograd does not keep what it needs by itself."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _refuse_second_forward(layer: MatrixLayer) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"layer {layer.name!r} is computed a second time in the backward pass, by activation checkpointing, and "
            "would get other noise: use noise='shared'"
        )


class _Rows(torch.autograd.Function):
    """Rows times the sample in the basis, with gradients in the shapes of the parameters, which need no more copies."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, matrix: Tensor, keeper: Keeper, *params: Tensor) -> Tensor:
        """``a (..., n)`` times ``matrixᵀ (n, p)``."""
        ctx.save_for_backward(a, matrix)
        ctx.keeper = keeper
        return functional.linear(a, matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient's product with the sample, and its products with the columns of each parameter."""
        keeper = ctx.keeper
        a, matrix = ctx.saved_tensors
        with full_precision(matrix.device):
            g = grads[0].to(matrix.dtype)
            if torch.is_grad_enabled():  # it will be differentiated again, by the parameters too
                matrix = _Attach.apply(keeper.layer, matrix, *keeper.layer.params)
            below = (g @ matrix).to(a.dtype) if ctx.needs_input_grad[0] else None
            if not keeper.weights_wanted:
                return below, None, None, *(None for _ in keeper.layer.params)
            outputs = g.reshape(-1, g.shape[-1]).mT  # (p, rows)
            columns = keeper.layer.views(a.to(matrix.dtype).reshape(-1, a.shape[-1]))
            return below, None, None, *(outputs @ part for part in columns)


class _Attach(torch.autograd.Function):
    """The sample in the basis, with gradients that go to the parameters."""

    @staticmethod
    def forward(ctx: Any, layer: MatrixLayer, sample: Tensor, *params: Tensor) -> Tensor:
        """``sample (p, n)`` itself."""
        ctx.layer = layer
        return sample.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient's parts."""
        return None, None, *_gradients(ctx.layer, grads[0])


class _Form(torch.autograd.Function):
    """The sample as parameters, with gradients that go to them as coordinates in the basis."""

    @staticmethod
    def forward(
        ctx: Any, layer: MatrixLayer, basis: KroneckerFactors | None, sample: Tensor, *params: Tensor
    ) -> tuple[Tensor, ...]:
        """``Q_S·sample·Q_Aᵀ`` in its parts."""
        ctx.layer, ctx.basis, ctx.sample, ctx.version = layer, basis, sample, sample._version
        ctx.set_materialize_grads(False)
        matrix = sample.clone() if basis is None else basis.unrotate(sample)
        return tuple(view.contiguous() for view in layer.views(matrix))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """``Q_Sᵀ·gradient·Q_A`` in its parts."""
        if ctx.sample._version != ctx.version:  # not among autograd's saved tensors: several losses share this node
            raise RuntimeError(
                f"the sampled weights of {ctx.layer.name!r} have been modified by an inplace operation: backward() "
                "must be called inside the sampled_params() block of its forward pass"
            )
        gradient = torch.zeros_like(ctx.sample)
        for view, grad in zip(ctx.layer.views(gradient), grads, strict=True):
            if grad is not None:
                view.copy_(grad)
        if ctx.basis is not None:
            with full_precision(gradient.device):
                gradient = ctx.basis.rotate(gradient)
        return None, None, None, *_gradients(ctx.layer, gradient)


def _gradients(layer: MatrixLayer, matrix: Tensor) -> list[Tensor]:
    """Parts of ``matrix`` for the layer's parameters; of a single row as copies, whose strides are in order."""
    views = layer.views(matrix)
    return views if matrix.shape[-2] > 1 else [view.clone(memory_format=torch.contiguous_format) for view in views]


class Rotated(nn.Parameter):
    """A parameter whose value its keeper knows."""

    _keeper: Keeper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Any function of torch that is given such a parameter comes here first."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _BLIND:
                return func(*args, **kwargs)
            if func is functional.linear:
                return _linear(*args, **kwargs)
            if func in _CONVOLUTIONS:
                return _convolution(func, *args, **kwargs)
            args, kwargs = pytree.tree_map_only(Rotated, _look, (tuple(args), kwargs))
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Tensor:
        """An ordinary parameter with the value that is seen now."""
        if id(self) not in memo:
            memo[id(self)] = self._ordinary()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """An ordinary parameter with the value that is seen now."""
        return nn.Parameter.__reduce_ex__(self._ordinary(), protocol)

    def _ordinary(self) -> nn.Parameter:
        return nn.Parameter(_look(self).detach().clone(), self.requires_grad)


def _look(param: Rotated) -> Tensor:
    return param._keeper.look(param)


_CONVOLUTIONS = (functional.conv1d, functional.conv2d)


def _convolution(
    conv: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """``functional.conv1d`` or ``conv2d`` where at least one argument is rotated."""
    if type(weight) is Rotated and weight._keeper.fresh is not None:
        return weight._keeper.convolve(conv, input, bias, (args, kwargs))
    return conv(*(_look(t) if isinstance(t, Rotated) else t for t in (input, weight, bias)), *args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``functional.linear`` where at least one argument is rotated."""
    if type(weight) is Rotated and weight._keeper.inside:
        keeper = weight._keeper
        own = len(keeper.layer.params) > 1
        if type(input) is not Rotated and (bias is keeper.layer.params[1] if own else type(bias) is not Rotated):
            out = keeper.linear(input)
            return out if own or bias is None else out + bias
    return functional.linear(*(_look(t) if isinstance(t, Rotated) else t for t in (input, weight, bias)))  # type: ignore[arg-type]
