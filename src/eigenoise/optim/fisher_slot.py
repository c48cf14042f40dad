"""One layer of the natural-gradient methods: its Fisher, which is preconditioner and posterior, and its momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor
from torch.distributions import Distribution

from eigenoise.fisher import Fisher
from eigenoise.fisher.base import Damping
from eigenoise.layers.matrix_layer import BareParameter, MatrixLayer
from eigenoise.optim.priors import LayerPrior
from eigenoise.optim.step_size import SQUARES_RATE, move_damping
from eigenoise.optim.weight_swap import Group, Slot


def posterior_scale(group: Group) -> float:
    """λ/N: the posterior covariance is this times (F + γ_in·I)⁻¹."""
    return group["kl_weight"] / group["num_data"]


@final
class FisherSlot(Slot):
    """A slot with its Fisher, its gradient and its momentum, all ``(..., p, n)``.

    Args:
        layer: as for ``Slot``.
        fisher: its structure.
        has_posterior: as for ``Slot``.
        noisy: whether it is sampled in training.
        mirrored: whether noise is used twice, see ``draw``.

    Attributes:
        gradient: of −log p(y | x, W) + the prior's, at the sampled weights.
        coordinates: the same in the basis, then the new momentum, until ``move`` makes it that.
        momentum: moving average of coordinates.
        squares: moving average of squared coordinates of gradients, v, from 0.
        new_squares: the same with this step's, until ``move`` keeps them; None if moves have no bound.
        prior: an earlier posterior in the place of N(0, ηI), or None.
        updates: steps it took part in.
    """

    def __init__(
        self,
        layer: MatrixLayer | BareParameter,
        fisher: Fisher,
        has_posterior: bool,
        *,
        noisy: bool,
        mirrored: bool = False,
    ):
        super().__init__(layer, has_posterior)
        self.fisher, self.noisy = fisher, noisy and has_posterior
        self.prior: LayerPrior | None = None
        self.gradient, self.momentum = self.empty(), self.empty()
        self.gradient_views = layer.views(self.gradient)
        self.coordinates = self.momentum
        self.squares = self.empty()
        self.new_squares: Tensor | None = None
        self.updates = 0
        self._deviation = self.empty() if mirrored and self.noisy else None
        self._waiting = False  # the deviation was used once
        self._drawn_with: tuple[Tensor | None, float] = (None, 0.0)
        self._prior_precision: Tensor | None = None  # of an earlier posterior, its diagonal in the basis
        self._damping: tuple[float, Damping] | None = None  # λ/N, and γ_in that follows from it

    def set_prior(self, prior: LayerPrior | None) -> None:
        """Let an earlier posterior take the place of N(0, ηI)."""
        self.prior = prior
        if prior is not None:
            prior.set_basis(self.fisher)

    # Sampling (line 5 of the algorithms).

    def draw(self, generator: torch.Generator, group: Group, ramp: float | None = None) -> None:
        """``sample`` from N(mean, (λ/N)·(F + γ_in·I)⁻¹) (eq. 20), or the mean itself.

        In training its deviation from the mean is multiplied by ``ramp``. With ``mirrored`` it is used a second time
        with the other sign, unless the posterior's covariance has changed since.
        """
        if not self.noisy or ramp == 0:
            self.sample.copy_(self.mean)
            return
        if self._deviation is None or ramp is None:
            scale = posterior_scale(group) ** 0.5 * (1.0 if ramp is None else ramp)
            torch.add(self.mean, self._draw_deviation(generator, group), alpha=scale, out=self.sample)
            return
        root = self.fisher.inverse_root(self.damping(group))  # another tensor whenever the spectrum has changed
        scale = posterior_scale(group)
        mirror = self._waiting and self._drawn_with[0] is root and self._drawn_with[1] == scale
        if not mirror:
            self._deviation = self._draw_deviation(generator, group)
            self._drawn_with = root, scale
        self._waiting = not mirror
        size = ramp * scale**0.5
        torch.add(self.mean, self._deviation, alpha=-size if mirror else size, out=self.sample)

    def _draw_deviation(self, generator: torch.Generator, group: Group) -> Tensor:
        """From N(0, (F + γ_in·I)⁻¹)."""
        return self.fisher.root(self.white(generator), self.damping(group))

    # The step (lines 6 to 16).

    def damping(self, group: Group) -> Damping:
        """γ_in = (λ/N)·Λ₀ with the prior's precision Λ₀: 1/η, or its diagonal in the basis if it is no N(0, ηI)."""
        scale = posterior_scale(group)
        if self.prior is None:
            return scale * (1 / self.prior_var(group))
        precision = self.prior_precision(group)
        if self._damping is None or self._damping[0] != scale:
            self._damping = scale, scale * precision
        return self._damping[1]

    def prior_precision(self, group: Group) -> Damping:
        """Λ₀: 1/η, or the diagonal in the basis of an earlier posterior's precision."""
        if self.prior is None:
            return 1 / self.prior_var(group)
        if self._prior_precision is None:
            self._prior_precision = self.prior.diagonal(self.fisher)
        return self._prior_precision

    def add_prior_gradient(self, drawn: Tensor, group: Group) -> None:
        """Add (λ/N)·Λ₀·(W − M₀), the gradient of the prior, at the weights ``drawn``."""
        if self.prior is None:
            self.gradient.add_(drawn, alpha=posterior_scale(group) / self.prior_var(group))
        else:
            self.gradient.add_(self.prior.pull(drawn), alpha=posterior_scale(group))

    def rotate_gradient(self) -> None:
        """Coordinates of the gradient in the Fisher's basis: the first stage of eq. 4."""
        rotated = self.fisher.rotate(self.gradient)
        self.coordinates = rotated.clone() if rotated is self.gradient else rotated

    def update_momentum(self, group: Group) -> None:
        """Coordinates become the new momentum, and their squares enter v; ``move`` keeps both."""
        self.new_squares = None
        if group["max_move"] is not None:
            self.new_squares = self.coordinates.square().lerp_(self.squares, 1 - SQUARES_RATE)
        self.coordinates.lerp_(self.momentum, group["momentum"])

    def precondition(self, group: Group, rate: float) -> tuple[Tensor, Tensor]:
        """D⁻¹m of the new momentum m, as coordinates, with D = F + γ_in + γ_ex; and mᵀD⁻¹m, ``()`` or ``(s,)``."""
        spectrum = self.fisher.spectrum(self.damping(group) + group["damping"])
        if self.new_squares is not None:
            roots, precision = self.new_squares.sqrt(), self.prior_precision(group)
            size = move_damping(group, rate, self.updates + 1)
            if isinstance(precision, Tensor):
                spectrum.addcmul_(roots, precision.sqrt(), value=size)
            else:
                spectrum.add_(roots, alpha=size * precision**0.5)
        direction = torch.div(self.coordinates, spectrum, out=spectrum)
        if self.layer.stack is None:
            return direction, torch.dot(self.coordinates.reshape(-1), direction.reshape(-1))
        return direction, (self.coordinates * direction).flatten(1).sum(-1)

    def move(self, direction: Tensor, rate: Tensor | float) -> None:
        """Mean ← mean − rate·direction, which is given as coordinates (the last stage of eq. 4); keep the momentum."""
        if isinstance(rate, Tensor):
            direction, rate = direction.mul_(rate), 1.0
        self.mean.sub_(self.fisher.unrotate(direction, overwrite=True), alpha=rate)
        self.momentum = self.coordinates
        if self.new_squares is not None:
            self.squares, self.new_squares = self.new_squares, None
        self.updates += 1

    def refresh(self, decomposition: list[Tensor] | None) -> bool:
        """Use a new basis for the Fisher, the momentum and v; False if its decomposition failed (None)."""
        refreshed = decomposition is not None and self.fisher.refresh([self.momentum], [self.squares], decomposition)
        self._prior_precision = self._damping = None
        if self.prior is not None:
            self.prior.set_basis(self.fisher)
        return refreshed

    @property
    def max_rate(self) -> float:
        """The step size up to which a step cannot overshoot the prior."""
        return math.inf if self.prior is None else self.prior.max_rate

    # The posterior.

    def distribution(self, group: Group) -> Distribution:
        """N(mean, (λ/N)·(F + γ_in·I)⁻¹) (eq. 10)."""
        _refuse_no_spread(group)
        return self.fisher.posterior(self.mean.clone(), posterior_scale(group), self.damping(group))

    def kl(self, group: Group) -> Tensor:
        """½·[(tr Σ + ‖M‖²)/η − d + d·log η − log det Σ] with Σ = (λ/N)·(F + γ_in·I)⁻¹."""
        _refuse_no_spread(group)
        scale, damping, dims = posterior_scale(group), self.damping(group), self.fisher.event_dims
        if self.prior is not None:
            return self.prior.kl(self.mean, scale * self.fisher.inverse(damping), self.fisher)
        mean = self.mean.flatten(-dims) if dims else self.mean.unsqueeze(-1)
        d, prior_var = mean.shape[-1], self.prior_var(group)
        trace = scale * self.fisher.inv_trace(damping) + mean.square().sum(-1)
        log_ratio = self.fisher.logdet(damping) + d * math.log(prior_var / scale)
        return 0.5 * (trace / prior_var - d + log_ratio)

    # Keeping.

    def state(self) -> dict[str, Tensor]:
        """Momentum, v, Fisher, and the noise that waits to be used again."""
        state = {"momentum": self.momentum, "squares": self.squares, **self.fisher.state()}
        state["steps"] = torch.tensor(self.updates)
        if self._deviation is not None:
            self._waiting = self._waiting and self.fisher.is_current(self._drawn_with[0])  # else it is drawn again
            state |= {"deviation": self._deviation, "waiting": torch.tensor(self._waiting)}
        if self.prior is not None:
            state["prior"] = self.prior.fingerprint()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave."""
        for name, tensor in self.state().items():
            if name != "prior":
                tensor.copy_(state[name])
        self.updates, self._waiting = int(state["steps"]), bool(state.get("waiting", False))
        self.fisher.forget_cache()
        self._prior_precision = self._damping = None
        if self.prior is not None:
            self.prior.set_basis(self.fisher)

    def resume(self, group: Group) -> None:
        """After ``load``: noise that waits was drawn from the posterior as it is."""
        if self._waiting:
            self._drawn_with = self.fisher.inverse_root(self.damping(group)), posterior_scale(group)

    def describe(self) -> str:
        """The structure, and what is special about it."""
        notes = [f"{type(self.fisher).__name__} Fisher"]
        if self.fisher.factors is not None:
            notes += self.fisher.factors.describe()
        if self.prior is not None:
            notes.append("earlier posterior as prior")
        if not self.has_posterior:
            notes.append("point estimate")
        elif not self.noisy:
            notes.append("no noise in training")
        return ", ".join(notes)


def _refuse_no_spread(group: Group) -> None:
    if group["kl_weight"] == 0:
        raise ValueError("with kl_weight=0 the posterior has no spread, and its KL to the prior is infinite")
