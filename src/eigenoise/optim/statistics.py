"""Gathering a Fisher's statistics in a training block: which Fisher, from which backward pass (eq. 12)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eigenoise import checks
from eigenoise.fisher import Diagonal, Fisher
from eigenoise.layers.hooks import Call, Capture, Used, by_layer, join, positions
from eigenoise.layers.matrix_layer import BareParameter, MatrixLayer
from eigenoise.likelihoods import Likelihood
from eigenoise.linalg.kronecker import full_precision
from eigenoise.linalg.moving_average import Averaged
from eigenoise.optim.priors import LayerPrior
from eigenoise.optim.rotated import FreshNoise
from eigenoise.optim.weight_swap import Slot

FISHERS = ("sampled", "exact", "empirical")
ENOUGH = 512  # rows of activations for A and S; where a part of the batch has fewer, more of it is looked at
AT_ONCE = 1 << 24  # numbers in the activations of one layer that are looked at at once


class FisherSlot(Slot):
    """A slot with its Fisher, its gradient and its momentum, all ``(..., p, n)``.

    Args:
        layer: as for ``Slot``.
        fisher: its structure.
        noisy: whether it is sampled.
        rotated: whether mean, sample, gradient and momentum are kept as coordinates in the Fisher's basis.
    """

    def __init__(self, layer: MatrixLayer | BareParameter, fisher: Fisher, noisy: bool, rotated: bool = False):
        super().__init__(layer, rotated, fisher.factors)
        self.fisher, self.noisy, self.rotated = fisher, noisy, rotated
        self.gradient, self.momentum = self.empty(), self.empty()
        self.updates = 0  # steps it took part in
        self._views = layer.views(self.gradient), layer.views(self.momentum)
        self._basis = None if rotated else fisher.factors  # None if the slot's numbers are coordinates in it
        self.prior: LayerPrior | None = None  # instead of N(0, ηI)
        self.largest_rate = math.inf  # α up to which a step cannot overshoot that prior

    @property
    def gradient_views(self) -> list[Tensor]:
        """Parts of ``gradient`` in the shapes of the layer's parameters."""
        return self._views[0]

    def keep_momentum(self) -> None:
        """Take what ``gradient`` holds for the new momentum; the memory of the old one holds the next gradient."""
        self.momentum, self.gradient = self.gradient, self.momentum
        self._views = self._views[1], self._views[0]
        self.updates += 1

    def draw(self, generator: torch.Generator, spread: float, damping: float) -> None:
        """``sample`` from N(mean, spread²·(F + γI)⁻¹) (eq. 20), or the mean itself."""
        if not self.noisy:
            self.sample.copy_(self.mean)
        elif self._basis is None:
            root = self.fisher.inverse_root(damping)
            torch.addcmul(self.mean, self.white(generator), root, value=spread, out=self.sample)
        else:
            noise = self.white(generator) * self.fisher.inverse_root(damping)
            self._basis.add_unrotated(self.mean, noise, spread, self.sample)

    def draw_later(self, generator: torch.Generator, spread: float, damping: float, share: bool) -> None:
        """Have the layer's calls draw noise of the same distribution for each row, or for all if they may ``share``."""
        assert self.keeper is not None
        draw = functools.partial(self.draw, generator, spread, damping) if share else None
        self.keeper.fresh = FreshNoise(self.fisher.inverse(damping), spread, generator, draw)

    def coordinates(self) -> Tensor:
        """The gradient as coordinates in the Fisher's basis; not to be written to."""
        return self.gradient if self._basis is None else self.fisher.rotate(self.gradient)

    def solve(self, V: Tensor, damping: float) -> tuple[Tensor, Tensor]:
        """(F + γI)⁻¹V (eqs 3, 4, 21), as coordinates in the Fisher's basis, and Vᵀ(F + γI)⁻¹V, ``()`` or ``(s,)``."""
        coordinates = V if self._basis is None else self.fisher.rotate(V)
        memory = self.sample if self.rotated else None  # it is used no more
        direction = torch.mul(coordinates, self.fisher.inverse(damping), out=memory)
        if self.layer.stack is None:
            return direction, torch.dot(coordinates.reshape(-1), direction.reshape(-1))
        return direction, (coordinates * direction).flatten(1).sum(-1)

    def move(self, direction: Tensor, rate: float) -> None:
        """Mean ← mean − rate·direction, which is given as coordinates in the Fisher's basis."""
        if self._basis is None:
            self.mean.sub_(direction, alpha=rate)
        else:
            self._basis.add_unrotated(self.mean, direction, -rate, self.mean)

    def refresh(self, found: list[Tensor]) -> bool:
        """Take over a new basis for the Fisher and for what is kept in it."""
        if self.keeper is not None:
            self.keeper.behind = True  # by rounding, even if no step follows
        return self.fisher.refresh([self.mean, self.momentum, self.gradient] if self.rotated else [], found)

    def intrinsic(self, damping: float) -> float:
        """γ_in, or nothing where an earlier posterior takes its place."""
        return damping if self.prior is None else 0.0

    def meet_prior(self) -> None:
        """Find out how the prior looks in the Fisher's basis, which is new."""
        if self.prior is not None:
            self._prior_diagonal = self.prior.diagonal(self.fisher)
            self.largest_rate = 1 / self.prior.stretch(self.fisher, self._prior_diagonal)

    def add_prior_spectrum(self, scale: float) -> None:
        """Let (λ/N)·Λ₀ take the place of γ_in·I beside F, as its diagonal in the basis."""
        if self.prior is not None:
            self.fisher.add_to_spectrum(scale * self._prior_diagonal)

    def add_prior_gradient(self, drawn: Tensor, scale: float) -> None:
        """Let (λ/N)·Λ₀·(W − M₀) take the place of γ_in·W in the gradient."""
        assert self.prior is not None
        pull = self.prior.pull(self.weights(drawn))
        self.gradient.add_(self.fisher.rotate(pull) if self.rotated else pull, alpha=scale)

    def weights(self, matrix: Tensor) -> Tensor:
        """``matrix`` as a new one that holds weights, not coordinates."""
        return matrix.clone() if self.fisher.factors is None or not self.rotated else self.fisher.unrotate(matrix)


class Statistics:
    """Brings activations and gradients of training blocks to the slots' Fishers.

    Args:
        slots: all slots of a model.
        likelihood: whose targets are drawn, or whose Fisher is exact.
        fisher: ``"sampled"``, ``"exact"`` or ``"empirical"``.
        fraction: of a batch's examples, its first ones, that are looked at; for A and S more where they have few
            positions.
    """

    def __init__(
        self,
        slots: Sequence[FisherSlot],
        likelihood: Likelihood,
        fisher: str,
        fraction: float = 1.0,
    ):
        self.fisher = checks.choice("fisher", fisher, FISHERS)
        self.fraction = checks.number("stats_fraction", fraction, open_low=True, high=1.0)
        if self.fraction < 1 and likelihood.stack is not None:
            raise ValueError(
                f"stats_fraction must be 1 for a stack of models, but {fraction} came: use smaller batches"
            )
        self.slots, self.likelihood = slots, likelihood
        self._slot_of = {id(slot.layer): slot for slot in slots}
        self._bare = [slot for slot in slots if isinstance(slot.layer, BareParameter)]
        layers = [slot.layer for slot in slots if isinstance(slot.layer, MatrixLayer)]
        self.capture = Capture(layers, [slot.layer.params[0] for slot in self._bare])
        self.seen: set[str] = set()  # slots that statistics came for since ``discard``
        self._factors = self._scale = False
        self._deliveries: list[Callable[[], None]] = []  # what the user's backward pass leaves for the block's end

    def begin(self, factors: bool, scale: bool, generator: torch.Generator) -> None:
        """Watch this block for A and S, for R, or for both; with neither this costs nothing.

        Args:
            factors: whether A and S are wanted.
            scale: whether R is.
            generator: of drawn targets and signs.
        """
        self._factors, self._scale, self._generator = factors, scale, generator
        if (factors or scale) and torch.is_grad_enabled():
            self.capture.open(receive=self.fisher == "empirical")

    def end(self, trained: bool) -> None:
        """The block is over: take in what its backward passes left, and take the hooks off."""
        try:
            if trained:
                for deliver in self._deliveries:
                    deliver()
        finally:
            self._deliveries.clear()
            self.capture.close()

    def on_loss(self, f: Tensor) -> Callable[[Tensor], None] | None:
        """A loss was computed from ``f``; returns what to do when it is backpropagated, given the loss's gradient."""
        if not (self._factors or self._scale):
            return None
        terms = self.likelihood.terms(f)
        examples = f.shape[0] if self.likelihood.stack is None else terms
        if self.fisher == "empirical":
            return self._from_training_gradient(self.capture.calls_behind(f), examples, terms)
        keepers = [slot.keeper for slot in self.slots if slot.keeper is not None]
        for keeper in keepers:
            keeper.weights_wanted = False
        try:
            used, bare = self.capture.backward(f, self._vectors(f.detach()))
        finally:
            for keeper in keepers:
                keeper.weights_wanted = True

        def backpropagated(scale: Tensor) -> None:
            self._take_in(used, examples, bare, terms)
            self.capture.release(call for call, _ in used)

        return backpropagated

    def averages(self) -> list[Averaged]:
        """Of all Fishers, with what was gathered for them."""
        return [each for slot in self.slots for each in slot.fisher.averages()]

    def refuse_unseen(self, active: Sequence[FisherSlot]) -> None:
        """Raise RuntimeError for a layer that has a gradient but no statistics."""
        for slot in active:
            seen = slot.name in self.seen or any(mean.count for mean, _ in slot.fisher.averages())
            if not seen and any(p.grad is not None and p.grad.any() for p in slot.layer.params):
                raise RuntimeError(
                    f"layer {slot.name!r} got a gradient but no statistics: its weight is used without calling the "
                    "layer, its forward ran outside sampled_params(), or hooks do not reach it (reentrant "
                    "checkpointing; torch.compile(model) where model.compile() would do); "
                    f"overrides={{{slot.name!r}: 'diagonal'}} treats it as a bare parameter"
                )

    def pending(self) -> list[Tensor]:
        """The sums that the next ``commit`` of the Fishers would use."""
        return [total for slot in self.slots for total in slot.fisher.pending()]

    def discard(self) -> None:
        """Forget what was gathered."""
        self.seen.clear()
        for slot in self.slots:
            slot.fisher.discard()

    def _vectors(self, f: Tensor) -> Tensor:
        """Vectors ``(v, *f.shape)`` whose outer products have the Fisher of f as their sum, or as its expectation."""
        if self.fisher == "sampled":
            finite = f.nan_to_num(0.0, 0.0, 0.0)  # what is not finite shows in the score, and stops the step everywhere
            return self.likelihood.score(f, self.likelihood.sample(finite, self._generator)).unsqueeze(0)
        if f.ndim > 2 and self.likelihood.stack is None:
            raise ValueError(
                f"fisher='exact' needs one target for each example, but the output has the shape {tuple(f.shape)}; "
                "use fisher='sampled'"
            )
        vectors = self.likelihood.fisher_vectors(f)
        if self._bare:  # random signs make the square of a sum over examples an unbiased sum of squares
            signs = torch.randint(2, (*f.shape[:-1], 1), generator=self._generator, device=self._generator.device)
            vectors = vectors * (2 * signs - 1).to(vectors)
        return vectors

    def _from_training_gradient(self, calls: list[Call], examples: int, terms: int) -> Callable[[Tensor], None]:
        """The training gradient itself, freed of the mean over the batch and of any scaling of the loss."""

        def backward_begins(scale: Tensor) -> None:
            factor = terms / scale
            bare = self.capture.expect_bare()

            def deliver() -> None:
                used = [(call, factor * call.g.unsqueeze(0)) for call in calls if call.g is not None]
                self._take_in(used, examples, [None if g is None else factor * g.unsqueeze(0) for g in bare], terms)

            self._deliveries.append(deliver)

        return backward_begins

    def _take_in(self, used: Used, examples: int, bare: Sequence[Tensor | None], terms: int) -> None:
        """Bring the first examples to the Fishers, as many at a time as keep memory bounded."""
        for calls in by_layer(used):
            slot = self._slot_of[id(calls[0][0].layer)]
            self.seen.add(slot.name)
            t = positions(calls, examples)
            few = max(1, round(self.fraction * examples))
            many = few if slot.fisher.factors is None else min(examples, max(few, -(-ENOUGH // t)))
            size = self._at_once(calls, examples, t)
            for first, last, scale in ((0, few, self._scale), (few, many, False)):
                for start in range(first, last if scale or self._factors else first, size):
                    stop = min(start + size, last)
                    a, g = join(calls, examples, start, stop)
                    count = round(terms * (stop - start) / examples)
                    with full_precision(a.device):
                        slot.fisher.update(a, g, count, factors=self._factors, scale=scale)
        for slot, total in zip(self._bare, bare, strict=True):
            if total is not None:
                self.seen.add(slot.name)
                if self._scale:
                    assert isinstance(slot.fisher, Diagonal)
                    slot.fisher.update_from_sum(total, terms)

    @staticmethod
    def _at_once(calls: Used, examples: int, positions: int) -> int:
        """How many examples of a layer are looked at at once: all, unless unfolding them would take much memory."""
        layer = calls[0][0].layer
        if not layer.unfolds or any(call.x.shape[0] % examples for call, _ in calls):  # rows cannot be told apart
            return examples
        *lead, _, n = layer.shape
        return max(1, AT_ONCE // (positions * math.prod(lead) * n))
