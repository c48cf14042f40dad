"""The paper's matrix-variate Gaussian (MVG) and its eigenvalue-corrected form (EMVG) as PyTorch distributions.

Matrices are ``(..., p, n)`` with p outputs and n inputs, flattened row by row: the paper's ``V ⊗ U`` of eq. 16 and 18
is ``out ⊗ in`` here. ``torch.distributions.kl_divergence`` has the KL divergences.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, constraints
from torch.distributions.kl import register_kl

from eigenoise import checks
from eigenoise.linalg.kronecker import kron, outer, rotate, unrotate

if TYPE_CHECKING:
    from typing_extensions import Self


@final
class _Orthogonal(constraints.Constraint):
    """Square matrices with ``QᵀQ = I``, each element up to the square root of machine epsilon."""

    event_dim = 2

    def check(self, value: Tensor) -> Tensor:
        """Return whether each matrix of ``(..., n, n)`` is orthogonal, ``(...)``."""
        eye = torch.eye(value.shape[-1], dtype=value.dtype, device=value.device)
        tolerance = math.sqrt(torch.finfo(value.dtype).eps)
        return ((value.mT @ value - eye).abs() < tolerance).all(-1).all(-1)


orthogonal = _Orthogonal()


class _MatrixGaussian(Distribution, ABC):
    """A Gaussian over matrices ``W = loc + L(X)`` with X standard normal and L linear and invertible.

    ``loc`` is expanded to the batch shape; the other parameters keep their shapes and broadcast, so that ``expand``
    copies and computes nothing.
    """

    support = constraints.independent(constraints.real, 2)
    has_rsample = True

    def __init__(self, validate_args: bool | None, loc: Tensor, **parameters: tuple[str, Tensor]) -> None:
        """Check each parameter against its shape, written in the letters p and n, and expand ``loc``."""
        if checks.floating("loc", loc).dim() < 2:
            raise ValueError(f"loc must have the shape (..., p, n), got {tuple(loc.shape)}")
        batch_shape, event_shape = loc.shape[:-2], loc.shape[-2:]
        sizes = dict(zip("pn", event_shape, strict=True))
        for name, (letters, value) in parameters.items():
            _check_matrix(checks.floating(name, value), name, *(sizes[letter] for letter in letters))
            try:
                batch_shape = torch.broadcast_shapes(batch_shape, value.shape[:-2])
            except RuntimeError as error:
                message = f"{name} must have leading dimensions that broadcast with {tuple(batch_shape)}"
                raise ValueError(f"{message}, got {tuple(value.shape[:-2])}") from error
        self.loc = loc.expand(batch_shape + event_shape)
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    @abstractmethod
    def _color(self, noise: Tensor) -> Tensor:
        """Return ``L(noise)``, ``(..., p, n)``."""

    @abstractmethod
    def _whiten(self, deviation: Tensor) -> Tensor:
        """Return ``L⁻¹(deviation)``, ``(..., p, n)``."""

    @abstractmethod
    def _logdet(self) -> Tensor:
        """Return the log-determinant of the covariance, broadcastable to the batch shape."""

    @abstractmethod
    def _marginals(self) -> Tensor:
        """Return the variance of each element, broadcastable to ``(..., p, n)``."""

    @abstractmethod
    def _dense(self) -> Tensor:
        """Return the covariance of the flattened matrix, broadcastable to ``(..., pn, pn)``."""

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """Return the distribution expanded to ``batch_shape``; it shares its tensors with this one."""
        new = self._get_checked_instance(type(self), _instance)
        new.__dict__.update(self.__dict__)
        new._batch_shape = torch.Size(batch_shape)
        new.loc = self.loc.expand(new._batch_shape + self._event_shape)
        return new

    @property
    def mean(self) -> Tensor:
        """Mean and mode ``(..., p, n)``."""
        return self.loc

    mode = mean

    @property
    def variance(self) -> Tensor:
        """Marginal variance of each element ``(..., p, n)``."""
        return self._marginals().expand(self._extended_shape())

    @property
    def covariance_matrix(self) -> Tensor:
        """Covariance of the matrix flattened row by row, ``(..., pn, pn)``."""
        size = self._event_shape.numel()
        return self._dense().expand(*self._batch_shape, size, size)

    def from_standard(self, eps: Tensor) -> Tensor:
        """Map standard normal noise to a sample (eq. 19 and 20), differentiable in the parameters.

        Args:
            eps: noise ``(..., p, n)``; its leading dimensions broadcast with the batch shape.

        Returns:
            ``loc + L(eps)``, ``(..., p, n)``.

        Raises:
            ValueError: if ``eps`` does not end in ``(p, n)``.
        """
        return self.loc + self._color(_check_matrix(eps, "eps", *self._event_shape))

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return reparameterised samples ``(*sample_shape, ..., p, n)`` from the global generator."""
        shape = self._extended_shape(torch.Size(sample_shape))
        return self.from_standard(torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density ``(...)`` of matrices ``(..., p, n)`` (eq. 15; eq. 17 with |R|^½)."""
        if self._validate_args:
            self._validate_sample(value)
        constant = self._event_shape.numel() * math.log(2 * math.pi)
        return -0.5 * (_sum(self._whiten(value - self.loc).square()) + self._logdet() + constant)

    def entropy(self) -> Tensor:
        """Return the differential entropy in nats, ``(...)``."""
        constant = self._event_shape.numel() * (1 + math.log(2 * math.pi))
        return (0.5 * (self._logdet() + constant)).expand(self._batch_shape)


@final
class MatrixNormal(_MatrixGaussian):
    """Matrix-variate Gaussian (eq. 15): ``W.flatten() ~ N(loc.flatten(), cov_out ⊗ cov_in)`` (eq. 16).

    Args:
        loc: mean ``(..., p, n)``.
        cov_out: covariance among the rows ``(..., p, p)``, positive definite.
        cov_in: covariance among the columns ``(..., n, n)``, positive definite.
        validate_args: whether to check the values of the arguments; shapes are always checked.

    Raises:
        TypeError, ValueError: if an argument is not a floating-point tensor of its shape, or has invalid values.
    """

    arg_constraints: ClassVar = {
        "loc": constraints.independent(constraints.real, 2),
        "cov_out": constraints.positive_definite,
        "cov_in": constraints.positive_definite,
    }

    def __init__(self, loc: Tensor, cov_out: Tensor, cov_in: Tensor, validate_args: bool | None = None) -> None:
        self.cov_out, self.cov_in = cov_out, cov_in
        super().__init__(validate_args, loc, cov_out=("pp", cov_out), cov_in=("nn", cov_in))
        self._tril_out, self._tril_in = torch.linalg.cholesky(cov_out), torch.linalg.cholesky(cov_in)

    def _color(self, noise: Tensor) -> Tensor:
        return unrotate(self._tril_out, noise, self._tril_in)

    def _whiten(self, deviation: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(self._tril_out, deviation, upper=False)
        return torch.linalg.solve_triangular(self._tril_in.mT, half, upper=True, left=False)

    def _logdet(self) -> Tensor:
        p, n = self._event_shape
        log_out, log_in = (t.diagonal(dim1=-2, dim2=-1).log().sum(-1) for t in (self._tril_out, self._tril_in))
        return 2 * (n * log_out + p * log_in)

    def _marginals(self) -> Tensor:
        return outer(self.cov_out.diagonal(dim1=-2, dim2=-1), self.cov_in.diagonal(dim1=-2, dim2=-1))

    def _dense(self) -> Tensor:
        return kron(self.cov_out, self.cov_in)


@final
class EigenMatrixNormal(_MatrixGaussian):
    """Eigenvalue-corrected matrix-variate Gaussian (eq. 13): ``W = loc + q_out (X ∘ √variance) q_inᵀ`` (eq. 20).

    The covariance of ``W.flatten()`` is ``(q_out ⊗ q_in) diag(variance.flatten()) (q_out ⊗ q_in)ᵀ`` (eq. 18).

    Args:
        loc: mean ``(..., p, n)``.
        q_out: orthogonal basis of the outputs ``(..., p, p)``, eigenvectors as columns.
        q_in: orthogonal basis of the inputs ``(..., n, n)``, eigenvectors as columns.
        variance: variance along each pair of eigenvectors ``(..., p, n)``, positive; the attribute
            ``eigen_variance``. The property ``variance`` is that of the elements of W.
        validate_args: whether to check the values of the arguments; shapes are always checked.

    Raises:
        TypeError, ValueError: if an argument is not a floating-point tensor of its shape, or has invalid values.
    """

    arg_constraints: ClassVar = {
        "loc": constraints.independent(constraints.real, 2),
        "q_out": orthogonal,
        "q_in": orthogonal,
        "eigen_variance": constraints.independent(constraints.positive, 2),
    }

    def __init__(
        self, loc: Tensor, q_out: Tensor, q_in: Tensor, variance: Tensor, validate_args: bool | None = None
    ) -> None:
        self.q_out, self.q_in, self.eigen_variance = q_out, q_in, variance
        super().__init__(validate_args, loc, q_out=("pp", q_out), q_in=("nn", q_in), variance=("pn", variance))

    def _color(self, noise: Tensor) -> Tensor:
        return unrotate(self.q_out, noise * self.eigen_variance.sqrt(), self.q_in)

    def _whiten(self, deviation: Tensor) -> Tensor:
        return rotate(self.q_out, deviation, self.q_in) / self.eigen_variance.sqrt()

    def _logdet(self) -> Tensor:
        return _sum(self.eigen_variance.log())

    def _marginals(self) -> Tensor:
        return unrotate(self.q_out.square(), self.eigen_variance, self.q_in.square())

    def _dense(self) -> Tensor:
        basis = kron(self.q_out, self.q_in)
        return (basis * self.eigen_variance.flatten(-2)[..., None, :]) @ basis.mT


def isotropic(
    shape: Sequence[int], variance: float, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Independent:
    """Return the prior N(0, variance · I) over matrices, to which both Gaussians have a KL divergence.

    Args:
        shape: ``(..., p, n)``; the last two dimensions are one event.
        variance: variance of every element, a positive number.
        dtype: dtype of the prior, PyTorch's default if None.
        device: device of the prior, PyTorch's default if None.

    Raises:
        TypeError, ValueError: if ``variance`` is not a positive number, or ``shape`` has fewer than two dimensions.
    """
    scale = math.sqrt(checks.number("variance", variance, open_low=True))
    return Independent(Normal(torch.zeros(tuple(shape), dtype=dtype, device=device), scale), 2)


def _check_matrix(value: Tensor, name: str, rows: int, columns: int) -> Tensor:
    if tuple(value.shape[-2:]) != (rows, columns):
        raise ValueError(f"{name} must have the shape (..., {rows}, {columns}), got {tuple(value.shape)}")
    return value


def _sum(matrix: Tensor) -> Tensor:
    """Sum the elements of each matrix: ``(..., p, n)`` to ``(...)``."""
    return matrix.sum((-2, -1))


def _kl(p: _MatrixGaussian, trace: Tensor, white: Tensor, logdet: Tensor) -> Tensor:
    """Return KL(p ‖ q) from tr(Σ_q⁻¹ Σ_p), the difference of the means whitened by q, and log |Σ_q|."""
    return 0.5 * (trace + _sum(white.square()) - p.event_shape.numel() + logdet - p._logdet())


def _same_event(p: Distribution, q: Distribution) -> None:
    if p.event_shape != q.event_shape:
        shapes = f"{tuple(p.event_shape)} and {tuple(q.event_shape)}"
        raise ValueError(f"a KL divergence needs two distributions of one event shape, got {shapes}")


@register_kl(MatrixNormal, MatrixNormal)
def _kl_matrix_normal(p: MatrixNormal, q: MatrixNormal) -> Tensor:
    _same_event(p, q)
    ratio_out = torch.linalg.solve_triangular(q._tril_out, p._tril_out, upper=False)
    ratio_in = torch.linalg.solve_triangular(q._tril_in, p._tril_in, upper=False)
    trace = _sum(ratio_out.square()) * _sum(ratio_in.square())
    return _kl(p, trace, q._whiten(p.loc - q.loc), q._logdet())


@register_kl(EigenMatrixNormal, EigenMatrixNormal)
def _kl_eigen_matrix_normal(p: EigenMatrixNormal, q: EigenMatrixNormal) -> Tensor:
    _same_event(p, q)
    change_out, change_in = q.q_out.mT @ p.q_out, q.q_in.mT @ p.q_in
    marginals = unrotate(change_out.square(), p.eigen_variance, change_in.square())  # of p, in the basis of q
    return _kl(p, _sum(marginals / q.eigen_variance), q._whiten(p.loc - q.loc), q._logdet())


@register_kl(MatrixNormal, Independent)
@register_kl(EigenMatrixNormal, Independent)
def _kl_independent(p: _MatrixGaussian, q: Independent) -> Tensor:
    base = q.base_dist
    if not (isinstance(base, Normal) and q.reinterpreted_batch_ndims == 2):
        raise NotImplementedError(f"the KL divergence to an Independent needs Independent(Normal, 2), got {q}")
    _same_event(p, q)
    trace, white = _sum(p.variance / base.variance), (p.loc - base.loc) / base.scale
    return _kl(p, trace, white, _sum(base.variance.log()))
