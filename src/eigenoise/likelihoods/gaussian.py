"""Gaussian noise: one precision with a Gamma posterior, a known precision, or a level that depends on the input."""

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
from eigenoise.likelihoods.base import Likelihood, along_axes
from eigenoise.linalg.moving_average import Averaged, PendingMean

LOG_2PI = math.log(2 * math.pi)
UPDATES = ("closed-form", "adam")


def _check_targets(mean_shape: torch.Size, y: Tensor) -> None:
    checks.floating("y", y)
    remedy = "use y.unsqueeze(-1)" if y.shape == mean_shape[:-1] else ""
    checks.shape("y", y, tuple(mean_shape), remedy)


def _squares(f: Tensor, y: Tensor) -> Tensor:
    """(y − f)², with a backward pass of one operation."""
    return functional.mse_loss(f, y.expand_as(f), reduction="none")


class GaussianLikelihood(Likelihood):
    """y ~ N(f, 1/τ) with f ``(..., b, d)``; the precision τ has a Gamma prior and a Gamma posterior.

    Args:
        precision: a known τ; there is then nothing to learn.
        prior: shape and rate (a₀, b₀) of the Gamma prior. The paper's is (6, 6), for targets of unit variance; the
            default is weak.
        update: ``"closed-form"`` sets q(τ) to its optimum Gam(a₀ + Nd/2, b₀ + N·E[residual²]/2) with the squared
            residual averaged over about one pass through the data; ``"adam"`` takes Adam steps on (log a, log b), as
            the paper's authors do.
        lr: step size of ``"adam"``.
        stack: as for ``Likelihood``; each model has its own q(τ).
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
            raise ValueError(f"prior must be the pair (shape, rate), but {prior!r} came")
        self.prior = tuple(checks.number(f"prior[{i}]", value, open_low=True) for i, value in enumerate(prior))
        self.precision = None if precision is None else checks.number("precision", precision, open_low=True)
        self.method = checks.choice("update", update, UPDATES)
        self.lr = checks.number("lr", lr, open_low=True)
        shape = () if stack is None else (stack,)
        # q(τ) starts with the prior's shape and mean 1: targets are usually standardised.
        self.a, self.b = (torch.full(shape, self.prior[0], dtype=torch.float64) for _ in range(2))
        self.residual = torch.zeros(shape, dtype=torch.float64)  # average squared residual, summed over the d outputs
        self.steps = 0
        self._residual = PendingMean()
        self._outputs = 1
        self._adam = AdamOnLogs(lr)
        self._cached: tuple[Tensor, Tensor] | None = None
        self._shape: float | None = None  # what ``a`` was filled with
        self._digamma: Tensor | None = None  # ½·(ψ(a) − log 2π)

    @property
    def posterior(self) -> Gamma:
        """q(τ), with batch shape ``()`` or ``(s,)``.

        Raises:
            ValueError: if the precision is known.
        """
        if self.precision is not None:
            raise ValueError(f"the precision is known to be {self.precision:g}: there is no posterior over it")
        return Gamma(self.a, self.b)

    @property
    def tau(self) -> Tensor:
        """E[τ], ``()`` or ``(s,)``."""
        return self.a / self.b if self.precision is None else torch.full_like(self.b, self.precision)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Targets must have the shape of the output."""
        _check_targets(f.shape, y)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """E_q[log N(y; f, 1/τ)], summed over the d outputs."""
        tau, normaliser = self._moments(f)
        return torch.sub(f.shape[-1] * normaliser, tau * _squares(f, y).sum(-1), alpha=0.5)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """F plus noise of precision E[τ]."""
        noise = torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)
        return f + noise / self._moments(f)[0].unsqueeze(-1).sqrt()

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """E[τ]·(y − f)."""
        return self._moments(f)[0].unsqueeze(-1) * (y - f)

    def fisher_vectors(self, f: Tensor) -> Tensor:
        """√E[τ] along each output: closed form, one backward pass for each output."""
        return along_axes(self._moments(f)[0].unsqueeze(-1).sqrt().expand(f.shape))

    def predictive(self, f: Tensor, generator: torch.Generator | None = None) -> GaussianMixture:
        """A mixture of normals; with a posterior over τ each weight sample comes with its own draw of τ."""
        shape = (f.shape[0], *self.residual.shape)
        if self.precision is None:
            device = f.device if generator is None else generator.device
            unit = torch._standard_gamma(self.a.to(device).expand(shape).contiguous(), generator)
            tau = unit / self.b.to(device)
        else:
            tau = torch.full(shape, self.precision, dtype=f.dtype)
        tau = tau.to(f).reshape(f.shape[0], *(1,) * (f.ndim - 1 - len(shape[1:]) - 2), *shape[1:], 1, 1)
        return GaussianMixture(f, tau.rsqrt())

    def kl(self) -> Tensor:
        """KL(q(τ) ‖ Gam(a₀, b₀)), ``()`` or ``(s,)``; 0 for a known precision."""
        if self.precision is not None:
            return torch.zeros_like(self.residual)
        q = self.posterior
        prior = Gamma(torch.full_like(q.rate, self.prior[0]), torch.full_like(q.rate, self.prior[1]))
        return kl_divergence(q, prior)

    def observe(self, f: Tensor, y: Tensor) -> None:
        """Gather squared residuals."""
        self._gather(self._sum_of_squares(f.detach(), y), f)

    def _sum_of_squares(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ(y − f)² of each model, ``()`` or ``(s,)``."""
        if self.stack is None:
            return functional.mse_loss(f, y, reduction="sum")
        return _squares(f, y).sum([axis for axis in range(f.ndim) if axis != f.ndim - 3])

    def _gather(self, squares: Tensor, f: Tensor) -> None:
        if self.precision is None:
            if self.residual.device != f.device:  # follow the model, so that learning never waits for the host
                self.a, self.b, self.residual = (t.to(f.device) for t in (self.a, self.b, self.residual))
            self._residual.add(squares.double(), self.terms(f))
            self._outputs = f.shape[-1]

    def _loss(self, f: Tensor, y: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """½·E[τ]·Σ(y − f)²/b − d·½·(E[log τ] − log 2π), summed over models: few operations, as small networks need."""
        squares, (tau, normaliser) = self._sum_of_squares(f, y), self._moments(f)
        weight, constant = 0.5 / self.terms(f), normaliser * -f.shape[-1]
        if self.stack is None:
            loss = torch.addcmul(constant, squares, tau, value=weight)
        else:
            loss = torch.add(constant.sum(), torch.dot(tau.flatten(), squares), alpha=weight)
        seen, output = squares.detach(), f.detach()
        return loss, lambda: self._gather(seen, output)

    def update(self, num_data: int, samples: int = 1) -> None:
        """Move q(τ) by what was observed, when each example was seen ``samples`` times."""
        if self._residual.total is None:
            return
        self.steps += 1
        if self.method == "closed-form":
            rate = max(1 / self.steps, min(1.0, self._residual.count / (samples * num_data)))
            self._residual.blend_into(self.residual, rate)
            shape = self.prior[0] + 0.5 * num_data * self._outputs
            if shape != self._shape:  # it never changes while N stays
                self.a.fill_(shape)
                self._shape, self._digamma = shape, None
            self.b = self.prior[1] + 0.5 * num_data * self.residual
        else:
            self._residual.blend_into(self.residual, 1.0)
            self.a, self.b = self._adam.step((self.a, self.b), self._elbo_gradient(num_data) / -num_data)
            self._digamma = None
        self._cached = None

    def _elbo_gradient(self, num_data: int) -> Tensor:
        """Gradient of N·E_q[log N(y; f, 1/τ)] − KL(q ‖ prior) by (log a, log b), ``(2, ...)``."""
        a0, b0 = self.prior
        optimum = a0 + 0.5 * num_data * self._outputs  # of a, whatever b is
        ratio = (self.residual * (0.5 * num_data) + b0) / self.b
        by_log_a = self.a * ((optimum - self.a) * torch.polygamma(1, self.a) - ratio + 1)
        return torch.stack([by_log_a, self.a * ratio - optimum])

    def averages(self) -> list[Averaged]:
        """The squared residual, if the precision is to be learned."""
        return [(self._residual, self.residual)] if self.precision is None else []

    def discard(self) -> None:
        """Forget residuals not yet used."""
        self._residual.clear()

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        return {
            "precision": self.precision,
            "prior": list(self.prior),
            "update": self.method,
            "lr": self.lr,
            "stack": self.stack,
        }

    def state_dict(self) -> dict[str, Any]:
        """q(τ), the averaged residual, the counter and Adam's moments."""
        own = {"a": self.a, "b": self.b, "residual": self.residual, "steps": torch.tensor(self.steps)}
        return {**own, **self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave.

        Raises:
            ValueError: if a tensor is missing or has another shape.
        """
        for name in ("a", "b", "residual", "steps"):
            if name not in state:
                raise ValueError(f"GaussianLikelihood: the state must hold {name!r}, but it holds {sorted(state)}")
            if name != "steps":
                checks.shape(f"GaussianLikelihood: {name}", state[name], tuple(self.a.shape))
        self.a, self.b, self.residual = (state[name].detach().clone() for name in ("a", "b", "residual"))
        self.steps = int(state["steps"])
        self._adam.load_state_dict(state)
        self.discard()
        self._cached = self._shape = self._digamma = None

    def _moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """E[τ] and ½·(E[log τ] − log 2π) like ``f``, shaped to broadcast against ``(..., s, b)`` or ``(..., b)``."""
        if self._cached is None or self._cached[0].dtype != f.dtype or self._cached[0].device != f.device:
            if self.precision is not None:
                both = torch.stack([self.tau, 0.5 * (self.tau.log() - LOG_2PI)])
            else:
                if self._digamma is None or self._digamma.device != self.a.device:
                    self._digamma = 0.5 * (torch.digamma(self.a) - LOG_2PI)
                both = torch.stack([self.a / self.b, torch.sub(self._digamma, self.b.log(), alpha=0.5)])
            both = both.to(f)
            tau, normaliser = both if self.stack is None else both.unsqueeze(-1)
            if torch.is_inference_mode_enabled():  # such tensors could never be used in training
                return tau, normaliser
            self._cached = tau, normaliser
        return self._cached


class AdamOnLogs:
    """Adam on the logarithms of positive numbers, by torch's own."""

    names = ("exp_avg", "exp_avg_sq", "step")

    def __init__(self, lr: float):
        self.lr = lr
        self._state: dict[str, Tensor] = {}

    def step(self, values: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """``values`` one step down the ``gradient`` by their logarithms, ``(len(values), ...)``."""
        logs = torch.stack(values).log()
        if not self._state:
            zero = torch.zeros((), dtype=torch.float32, device=logs.device)
            self._state = dict(zip(self.names, (torch.zeros_like(logs), torch.zeros_like(logs), zero), strict=True))
        self._state = {name: value.to(logs.device) for name, value in self._state.items()}  # after a load, perhaps
        first, second, steps = ([self._state[name]] for name in self.names)
        rates: dict[str, Any] = {"lr": self.lr, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
        adam([logs], [gradient], first, second, [], steps, fused=True, amsgrad=False, maximize=False, **rates)
        return logs.exp()

    def state_dict(self) -> dict[str, Tensor]:
        """Adam's moments and counter, by name."""
        return {f"adam.{name}": value for name, value in self._state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over the entries that ``state_dict`` gave."""
        self._state = {k.removeprefix("adam."): v.clone() for k, v in state.items() if k.startswith("adam.")}


class HeteroscedasticGaussianLikelihood(Likelihood):
    """y ~ N(m, exp(s)) where the output ``(..., b, 2d)`` holds the means m and then the log-variances s."""

    def check(self, f: Tensor, y: Tensor) -> None:
        """The output has two numbers for each target."""
        if f.shape[-1] % 2:
            raise ValueError(
                "the model's last axis must hold d means and d log-variances, an even number, "
                f"but its size is {f.shape[-1]}"
            )
        _check_targets(torch.Size((*f.shape[:-1], f.shape[-1] // 2)), y)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log N(y; m, eˢ), summed over the d outputs."""
        mean, log_var = f.chunk(2, -1)
        return -0.5 * ((y - mean).square() * (-log_var).exp() + log_var + LOG_2PI).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Mean plus noise of the predicted variance."""
        mean, log_var = f.chunk(2, -1)
        noise = torch.randn(mean.shape, generator=generator, dtype=f.dtype, device=f.device)
        return mean + noise * (0.5 * log_var).exp()

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """(y − m)e⁻ˢ for the means, ½((y − m)²e⁻ˢ − 1) for the log-variances."""
        mean, log_var = f.chunk(2, -1)
        weighted = (y - mean) * (-log_var).exp()
        return torch.cat([weighted, 0.5 * (weighted * (y - mean) - 1)], -1)

    def fisher_vectors(self, f: Tensor) -> Tensor:
        """The Fisher is diagonal: e⁻ˢ for the means and ½ for the log-variances."""
        mean, log_var = f.chunk(2, -1)
        return along_axes(torch.cat([(-0.5 * log_var).exp(), torch.full_like(mean, 0.5**0.5)], -1))

    def predictive(self, f: Tensor, generator: torch.Generator | None = None) -> GaussianMixture:
        """A mixture of normals, each with its own predicted variance."""
        mean, log_var = f.chunk(2, -1)
        return GaussianMixture(mean, (0.5 * log_var).exp())
