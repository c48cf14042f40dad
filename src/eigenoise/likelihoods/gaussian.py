"""Gaussian noise of one precision, known or with a Gamma posterior."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Gamma, kl_divergence
from torch.nn import functional
from torch.optim.adam import adam

from eigenoise import checks
from eigenoise.distributions.mixtures import GaussianMixture
from eigenoise.likelihoods.base import Likelihood, check_real_targets, scaled_unit_vectors
from eigenoise.linalg.moving_average import Averaged, PendingMean

LOG_2PI = math.log(2 * math.pi)
UPDATES = ("closed-form", "adam")


def _squares(f: Tensor, y: Tensor) -> Tensor:
    """Return (y − f)², with a backward pass of one operation."""
    return functional.mse_loss(f, y.expand_as(f), reduction="none")


class GaussianLikelihood(Likelihood):
    """y ~ N(f, 1/τ) with f ``(..., b, d)``; the precision τ has a Gamma prior and a Gamma posterior q(τ).

    Args:
        precision: a known τ; nothing is learned then.
        prior: shape and rate (a₀, b₀) of the Gamma prior. The default is weak; the paper uses (6, 6) for targets of
            unit variance.
        update: ``"closed-form"`` sets q(τ) to its optimum Gam(a₀ + Nd/2, b₀ + N·E[residual²]/2), where the squared
            residual is a moving average over about one epoch; ``"adam"`` takes Adam steps on (log a, log b), as the
            paper's authors do.
        lr: learning rate of ``"adam"``.
        stack: number of models, as for ``Likelihood``; each model has its own q(τ).
    """

    def __init__(
        self,
        precision: float | None = None,
        *,
        prior: tuple[float, float] = (1.0, 0.01),
        update: str = "closed-form",
        lr: float = 1e-3,
        stack: int | None = None,
    ):
        super().__init__(stack)
        if len(prior) != 2:
            raise ValueError(f"prior must be the pair (shape, rate), got {prior!r}")
        self.prior = tuple(checks.number(f"prior[{i}]", value, open_low=True) for i, value in enumerate(prior))
        self.precision = None if precision is None else checks.number("precision", precision, open_low=True)
        self.method = checks.choice("update", update, UPDATES)
        self.lr = checks.number("lr", lr, open_low=True)
        # q(τ) starts with the prior's shape and mean 1: targets are usually standardised. What is known of each model
        # are plain numbers, as operations on tensors of so few cost more.
        models = stack or 1
        self._a, self._b = [self.prior[0]] * models, [self.prior[0]] * models
        self._residual = [0.0] * models
        self._digamma: list[float] | None = None  # ψ(a)
        self.steps = 0
        self._pending = PendingMean()  # squared residuals of the current step
        self._outputs = 1
        self._adam = LogAdam(lr)

    @property
    def learns_noise(self) -> bool:  # type: ignore[override]
        """Whether the precision is learned."""
        return self.precision is None

    def _tensor(self, numbers: list[float]) -> Tensor:
        """Return one number for each model as ``()`` or ``(s,)``."""
        return torch.tensor(numbers[0] if self.stack is None else numbers, dtype=torch.float64)

    @property
    def a(self) -> Tensor:
        """The shape of q(τ), ``()`` or ``(s,)``."""
        return self._tensor(self._a)

    @property
    def b(self) -> Tensor:
        """The rate of q(τ), ``()`` or ``(s,)``."""
        return self._tensor(self._b)

    @property
    def residual(self) -> Tensor:
        """The mean squared residual, summed over the d outputs, ``()`` or ``(s,)``."""
        return self._tensor(self._residual)

    @property
    def posterior(self) -> Gamma:
        """The posterior q(τ), with batch shape ``()`` or ``(s,)``.

        Raises:
            ValueError: if the precision is known.
        """
        if self.precision is not None:
            raise ValueError(f"the precision is known to be {self.precision:g}: it has no posterior")
        return Gamma(self.a, self.b)

    @property
    def tau(self) -> Tensor:
        """The mean E[τ], ``()`` or ``(s,)``."""
        return self._tensor(self._host_moments()[0])

    def check(self, f: Tensor, y: Tensor) -> None:
        """Require targets of the shape of ``f``."""
        check_real_targets(y, f.shape)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return E_q[log N(y; f, 1/τ)], summed over the d outputs, ``(..., b)``."""
        tau, normaliser = self._moments(f)
        return f.shape[-1] * normaliser - 0.5 * tau * _squares(f, y).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sample ``f + noise`` with noise of precision E[τ], ``(..., b, d)``."""
        noise = torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)
        return f + noise / self._tau(f) ** 0.5

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Return E[τ]·(y − f), ``(..., b, d)``."""
        return self._tau(f) * (y - f)

    def fisher_vectors(self, f: Tensor) -> Tensor:
        """Return √E[τ] along each output, ``(d, ..., b, d)``."""
        return scaled_unit_vectors(torch.ones_like(f) * self._tau(f) ** 0.5)

    def predictive(self, f: Tensor, generator: torch.Generator | None = None) -> GaussianMixture:
        """Return a mixture of normals; with a posterior over τ, each weight sample has its own sample of τ."""
        shape = (f.shape[0], *self.a.shape)
        if self.precision is None:
            device = f.device if generator is None else generator.device
            unit = torch._standard_gamma(self.a.to(device).expand(shape).contiguous(), generator)
            tau = unit / self.b.to(device)
        else:
            tau = torch.full(shape, self.precision, dtype=f.dtype)
        tau = tau.to(f).reshape(f.shape[0], *(1,) * (f.ndim - 1 - len(shape[1:]) - 2), *shape[1:], 1, 1)
        return GaussianMixture(f, tau.rsqrt())

    def constant_loss(self, f: Tensor, y: Tensor) -> float:
        """Return the loss of the targets' means, with the best precision or the known one."""
        variance, d = y.double().var(0, unbiased=False), y.shape[-1]
        if self.precision is not None:
            return float(0.5 * (self.precision * variance.sum() - d * (math.log(self.precision) - LOG_2PI)))
        return float(0.5 * d * (1 + LOG_2PI + variance.mean().clamp_min(1e-30).log()))

    def kl(self) -> Tensor:
        """Return KL(q(τ) ‖ Gam(a₀, b₀)), ``()`` or ``(s,)``; 0 for a known precision."""
        if self.precision is not None:
            return torch.zeros_like(self.a)
        q = self.posterior
        prior = Gamma(torch.full_like(q.rate, self.prior[0]), torch.full_like(q.rate, self.prior[1]))
        return kl_divergence(q, prior)

    def observe(self, f: Tensor, y: Tensor) -> None:
        """Record the squared residuals."""
        self._record(self._sum_of_squares(f.detach(), y), f)

    def _sum_of_squares(self, f: Tensor, y: Tensor) -> Tensor:
        """Return Σ(y − f)² of each model, ``()`` or ``(s,)``."""
        if self.stack is None:
            return functional.mse_loss(f, y, reduction="sum")
        return _squares(f, y).sum([axis for axis in range(f.ndim) if axis != f.ndim - 3])

    def _record(self, squares: Tensor, f: Tensor) -> None:
        if self.precision is None:
            self._pending.add(squares, self.terms(f))
            self._outputs = f.shape[-1]

    def _loss(self, f: Tensor, y: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Return ½·E[τ]·Σ(y − f)²/b − d·½·(E[log τ] − log 2π), summed over models, in few operations."""
        squares, weight = self._sum_of_squares(f, y), 0.5 / self.terms(f)
        tau, normaliser = self._moments(f)
        if self.stack is None:
            constant = torch.full((), -f.shape[-1] * normaliser, dtype=f.dtype, device=f.device)
            loss = torch.add(constant, squares, alpha=weight * tau)
        else:
            loss = torch.add(-f.shape[-1] * normaliser.sum(), torch.dot(tau.flatten(), squares), alpha=weight)
        detached, output = squares.detach(), f.detach()
        return loss, lambda: self._record(detached, output)

    def update(self, num_data: int, samples: int = 1) -> None:
        """Update q(τ) from the recorded residuals, of ``samples`` weight samples for each example."""
        if self._pending.total is None:
            return
        self.steps += 1
        count = self._pending.count
        residuals = [total / count for total in self._pending.total.view(-1).tolist()]
        self._pending.clear()
        if self.method == "closed-form":
            rate = max(1 / self.steps, min(1.0, count / (samples * num_data)))
            self._residual = [old + rate * (new - old) for old, new in zip(self._residual, residuals, strict=True)]
            a = self._optimal_a(num_data)
            if a != self._a[0]:  # constant while N is
                self._a, self._digamma = [a] * len(self._a), None
            self._b = [self.prior[1] + 0.5 * num_data * residual for residual in self._residual]
        else:
            self._residual = residuals
            ab = self._adam.step((self.a, self.b), self._elbo_gradient(num_data) / -num_data)
            (self._a, self._b), self._digamma = ab.view(2, -1).tolist(), None

    def _optimal_a(self, num_data: int) -> float:
        """Return the optimum of a, whatever b is."""
        return self.prior[0] + 0.5 * num_data * self._outputs

    def _elbo_gradient(self, num_data: int) -> Tensor:
        """Return the gradient of N·E_q[log N(y; f, 1/τ)] − KL(q ‖ prior) by (log a, log b), ``(2, ...)``."""
        optimum, a = self._optimal_a(num_data), self.a
        ratio = (self.residual * (0.5 * num_data) + self.prior[1]) / self.b
        by_log_a = a * ((optimum - a) * torch.polygamma(1, a) - ratio + 1)
        return torch.stack([by_log_a, a * ratio - optimum])

    def averages(self) -> list[Averaged]:
        """Return the mean squared residual if the precision is learned."""
        like = self.residual if self._pending.total is None else self._pending.total  # on the model's device
        return [(self._pending, like)] if self.precision is None else []

    def discard(self) -> None:
        """Discard the recorded residuals."""
        self._pending.clear()

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments."""
        arguments = {"precision": self.precision, "prior": list(self.prior), "update": self.method, "lr": self.lr}
        return {**arguments, **super().config()}

    def state_dict(self) -> dict[str, Any]:
        """Return q(τ), the mean squared residual, the number of updates and Adam's moments."""
        posterior = {"a": self.a, "b": self.b, "residual": self.residual, "steps": torch.tensor(self.steps)}
        return {**posterior, **self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned.

        Raises:
            ValueError: if a tensor is missing or has another shape.
        """
        for name in ("a", "b", "residual", "steps"):
            if name not in state:
                raise ValueError(f"GaussianLikelihood: the state must hold {name!r}, got {sorted(state)}")
            if name != "steps":
                checks.shape(f"GaussianLikelihood: {name}", state[name], tuple(self.a.shape))
        self._a, self._b, self._residual = (state[name].reshape(-1).tolist() for name in ("a", "b", "residual"))
        self.steps = int(state["steps"])
        self._adam.load_state_dict(state)
        self.discard()
        self._digamma = None

    def _tau(self, f: Tensor) -> Any:
        """Return E[τ] as a number, or for a stack as ``(s, 1, 1)`` like ``f``."""
        tau, _ = self._moments(f)
        return tau if self.stack is None else tau.unsqueeze(-1)

    def _moments(self, f: Tensor) -> tuple[Any, Any]:
        """Return E[τ] and ½·(E[log τ] − log 2π) as numbers, or for a stack as ``(s, 1)`` like ``f``."""
        moments = self._host_moments()
        if self.stack is None:
            return moments[0][0], moments[1][0]
        tau, normaliser = torch.tensor(moments, dtype=f.dtype, device=f.device).unsqueeze(-1)
        return tau, normaliser

    def _host_moments(self) -> tuple[list[float], list[float]]:
        """Return the same as numbers, one for each model."""
        if self.precision is not None:
            models = len(self._b)
            return [self.precision] * models, [0.5 * (math.log(self.precision) - LOG_2PI)] * models
        if self._digamma is None:
            self._digamma = torch.digamma(self.a).view(-1).tolist()
        tau = [a / b for a, b in zip(self._a, self._b, strict=True)]
        return tau, [0.5 * (psi - math.log(b) - LOG_2PI) for psi, b in zip(self._digamma, self._b, strict=True)]


class LogAdam:
    """Adam on the logarithms of positive numbers, by torch's functional Adam."""

    names = ("exp_avg", "exp_avg_sq", "step")

    def __init__(self, lr: float):
        self.lr = lr
        self._state: dict[str, Tensor] = {}

    def step(self, values: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """Return ``values`` after one descent step, given the ``gradient (len(values), ...)`` by their logarithms."""
        logs = torch.stack(values).log()
        if not self._state:
            zero = torch.zeros((), dtype=torch.float32, device=logs.device)
            self._state = dict(zip(self.names, (torch.zeros_like(logs), torch.zeros_like(logs), zero), strict=True))
        self._state = {name: value.to(logs.device) for name, value in self._state.items()}  # loaded state may differ
        first, second, steps = ([self._state[name]] for name in self.names)
        rates: dict[str, Any] = {"lr": self.lr, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
        adam([logs], [gradient], first, second, [], steps, fused=True, amsgrad=False, maximize=False, **rates)
        return logs.exp()

    def state_dict(self) -> dict[str, Tensor]:
        """Return Adam's moments and step count, by name."""
        return {f"adam.{name}": value for name, value in self._state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the entries that ``state_dict`` returned."""
        self._state = {k.removeprefix("adam."): v.clone() for k, v in state.items() if k.startswith("adam.")}
