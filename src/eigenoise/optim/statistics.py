"""Gathering a Fisher's statistics in a training block: which Fisher, from which backward pass (eq. 12)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eigenoise import checks
from eigenoise.layers.hooks import Call, Capture, stack
from eigenoise.layers.matrix_layer import BareParameter, MatrixLayer
from eigenoise.likelihoods import Likelihood
from eigenoise.linalg import full_precision
from eigenoise.linalg.moving_average import Averaged
from eigenoise.optim.compiled import run_eagerly
from eigenoise.optim.examples import ExampleMatcher, Match
from eigenoise.optim.fisher_slot import FisherSlot

FISHERS = ("sampled", "exact", "empirical")
MIN_ROWS = 512  # of activations for A and S; where a part of the batch has fewer, more of it is used
MIN_EXAMPLES = 16  # for R
AUTO_FRACTION = 1 / 8
MAX_ACTIVATIONS_PER_CHUNK = 1 << 22  # numbers in the activations of one layer that are formed at once


@dataclass(frozen=True)
class Schedule:
    """Steps between updates of what is amortised.

    Attributes:
        stats_every: T_stats, of A and S.
        scale_every: T_scale, of R or of the diagonal.
        refresh_every: T_eig or T_inv, of decompositions.
        reinit_every: of R from the K-FAC eigenvalues, or None for never.
    """

    stats_every: int
    scale_every: int
    refresh_every: int
    reinit_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("stats_every", "scale_every", "refresh_every"):
            checks.integer(name, getattr(self, name))
        if self.reinit_every is not None:
            checks.integer("reinit_every", self.reinit_every)

    def factors_due(self, step: int) -> bool:
        """Whether A and S are updated at this step."""
        return step % self.stats_every == 0

    def scale_due(self, step: int) -> bool:
        """Whether R is updated at this step."""
        return step % self.scale_every == 0

    def stats_due(self, step: int) -> bool:
        """Whether any statistics are."""
        return self.factors_due(step) or self.scale_due(step)

    def reinit_due(self, step: int) -> bool:
        """Whether R is re-initialised at this step."""
        return self.reinit_every is not None and step % self.reinit_every == 0


class Statistics:
    """Brings activations and gradients of training blocks to the slots' Fishers.

    Args:
        slots: all slots of a model.
        matcher: tells which rows of a layer belong to which example.
        likelihood: whose targets are drawn, or whose Fisher is exact.
        fisher: ``"sampled"`` draws targets from the model, ``"exact"`` sums over all outputs or classes,
            ``"empirical"`` uses the training targets.
        fraction: the part of a batch's examples, its first ones, that statistics use; ``"auto"`` uses an eighth, but
            at least 16, and at least as many as give 512 rows of activations.
    """

    def __init__(
        self,
        slots: Sequence[FisherSlot],
        matcher: ExampleMatcher,
        likelihood: Likelihood,
        fisher: str,
        fraction: float | str,
    ):
        self.fisher = checks.choice("fisher", fisher, FISHERS)
        if fraction != "auto":
            checks.number("stats_fraction", fraction, open_low=True, high=1.0)
            if fraction != 1 and likelihood.stack is not None:
                raise ValueError(f"stats_fraction must be 1 for a stack of models, got {fraction}: use smaller batches")
        self.fraction = fraction
        self.slots, self.matcher, self.likelihood = slots, matcher, likelihood
        self._slot_of = {id(slot.layer): slot for slot in slots}
        self._bare = [slot for slot in slots if isinstance(slot.layer, BareParameter)]
        layers = [slot.layer for slot in slots if isinstance(slot.layer, MatrixLayer)]
        self.capture = Capture(layers, [slot.layer.params[0] for slot in self._bare])
        self.seen: set[str] = set()  # slots that statistics came for since ``discard``
        self._factors = self._scale = False

    def begin(self, factors: bool, scale: bool, generator: torch.Generator) -> AbstractContextManager:
        """Watch this block for A and S, for R, or for both; with neither this costs nothing.

        Args:
            factors: whether A and S are wanted.
            scale: whether R is.
            generator: of drawn targets and signs.

        Returns:
            A context for the block: compiled models run eagerly within it, where hooks can see their layers.
        """
        self._factors, self._scale, self._generator = factors, scale, generator
        if not ((factors or scale) and torch.is_grad_enabled()):
            return nullcontext()
        self.capture.open()
        return run_eagerly()

    def end(self) -> None:
        """The block is over: take the hooks off."""
        self.capture.close()

    def on_loss(self, f: Tensor, loss: Tensor) -> Callable[[], None] | None:
        """A loss was computed from ``f``; returns what to do when it is backpropagated."""
        if not (self._factors or self._scale):
            return None
        terms = self.likelihood.terms(f)
        calls = list(self.capture.calls)  # a checkpoint that is computed again would add to them
        vectors = self._vectors(f, loss, terms)
        at_calls, at_bare = self.capture.backward(f, vectors, calls)
        used = [(call, g) for call, g in zip(calls, at_calls, strict=True) if g is not None]
        layers = _by_layer(used, self.matcher.match(self.capture, f, vectors, used))

        def backpropagated() -> None:
            while layers:  # each is let go of before the next, as gradients take as much memory as activations
                calls_of_layer = layers.pop(0)
                slot = self._slot_of[id(calls_of_layer[0].call.layer)]
                self.seen.add(slot.name)
                with full_precision(f.device):
                    self._take_in(slot, calls_of_layer, terms)
                self.capture.release(matched.call for matched in calls_of_layer)
            for slot, total in zip(self._bare, at_bare, strict=True):
                if total is not None:
                    self.seen.add(slot.name)
                    if self._scale:
                        slot.fisher.update_from_sum(total, terms)

        return backpropagated

    def averages(self) -> list[Averaged]:
        """Of all Fishers, with what was gathered for them."""
        return [average for slot in self.slots for average in slot.fisher.averages()]

    def refuse_unseen(self, active: Sequence[FisherSlot]) -> None:
        """Raise RuntimeError for a layer that has a gradient but no statistics."""
        for slot in active:
            seen = slot.name in self.seen or any(mean.count for mean, _ in slot.fisher.averages())
            if not seen and any(p.grad is not None and p.grad.any() for p in slot.layer.params):
                raise RuntimeError(
                    f"layer {slot.name!r} got a gradient but no statistics: its weight is used without calling the "
                    "layer, its forward ran outside sampled_params(), or hooks do not reach it (reentrant "
                    f"checkpointing); overrides={{{slot.name!r}: 'diagonal'}} treats it as a bare parameter"
                )

    def pending(self) -> list[Tensor]:
        """The sums that the next ``commit`` of the Fishers would use."""
        return [total for slot in self.slots for total in slot.fisher.pending()]

    def discard(self) -> None:
        """Forget what was gathered."""
        if self._factors or self._scale:
            self.seen.clear()
            for slot in self.slots:
                slot.fisher.discard()

    def _vectors(self, f: Tensor, loss: Tensor, terms: int) -> Tensor:
        """Vectors ``(v, *f.shape)`` whose outer products have the Fisher of f as their sum, or as its expectation.

        Those of different terms are independent with mean zero, so that sums over terms can be squared.
        """
        output = f.detach()
        if self.fisher == "sampled":
            finite = output.nan_to_num(0.0, 0.0, 0.0)  # what is not finite shows in the score, and stops the step
            return self.likelihood.score(output, self.likelihood.sample(finite, self._generator)).unsqueeze(0)
        if self.fisher == "exact":
            vectors = self.likelihood.fisher_vectors(output)
        else:
            (gradient,) = torch.autograd.grad(loss, f, retain_graph=True)
            vectors = (-terms * gradient).unsqueeze(0)
        signs = torch.randint(2, (*f.shape[:-1], 1), generator=self._generator, device=self._generator.device)
        return vectors * (2 * signs - 1).to(vectors)

    def _take_in(self, slot: FisherSlot, calls: Sequence[Matched], terms: int) -> None:
        """Bring one layer's calls to its Fisher, as many examples at a time as keep memory bounded."""
        if any(matched.match is None for matched in calls):
            self._take_in_sum(slot, calls, terms)
            return
        examples = calls[0].match.examples  # type: ignore[union-attr]
        t = max(1, _rows(calls) // examples)
        for_scale, for_factors = self._subset(examples, t, slot)
        size = _chunk(slot.layer, t) if slot.layer.unfolds else examples
        for first, last, scale in ((0, for_scale, self._scale), (for_scale, for_factors, False)):
            for start in range(first, last if scale or self._factors else first, size):
                stop = min(start + size, last)
                a, g = _join(calls, start, stop)
                slot.fisher.update(a, g, round(terms * (stop - start) / examples), factors=self._factors, scale=scale)

    def _subset(self, examples: int, t: int, slot: FisherSlot) -> tuple[int, int]:
        """How many of the examples are used for R, and for A and S; each has ``t`` rows."""
        enough = -(-MIN_ROWS // t)
        if self.likelihood.stack is not None:
            return examples, examples
        if self.fraction == "auto":
            some = min(examples, max(MIN_EXAMPLES, math.ceil(AUTO_FRACTION * examples), enough))
            return some, some
        some = max(1, round(float(self.fraction) * examples))
        return some, some if slot.fisher.factors is None else min(examples, max(some, enough))

    def _take_in_sum(self, slot: FisherSlot, calls: Sequence[Matched], terms: int) -> None:
        """Take all rows as one example: right whatever rows belong to, if noisier (see ``Fisher.update_from_sum``)."""
        total: Tensor | None = None
        for i, matched in enumerate(calls):
            layer, x, vectors = matched.call.layer, matched.call.x, matched.g
            size = _chunk(layer, max(1, _rows([matched]) // x.shape[0])) if layer.unfolds else x.shape[0]
            for start in range(0, x.shape[0], size):
                last = i == len(calls) - 1 and start + size >= x.shape[0]
                a = layer.activations(x[start : start + size], 1, None)
                g = stack([layer.gradients(vector[start : start + size], 1, None) for vector in vectors], -4)
                if self._factors:
                    slot.fisher.update(a, g, terms if last else 0, factors=True, scale=False)
                if self._scale:
                    part = (g.mT @ a.unsqueeze(-4).to(g.dtype)).squeeze(-3)
                    total = part if total is None else total + part
        if total is not None:
            slot.fisher.update_from_sum(total, terms)


class Matched(NamedTuple):
    """One call with the gradients ``(v, ...)`` at its output, and which of its rows belong to which example."""

    call: Call
    g: Tensor
    match: Match | None


def _by_layer(used: Sequence[tuple[Call, Tensor]], matches: Sequence[Match | None]) -> list[list[Matched]]:
    """The calls of each layer."""
    layers: dict[int, list[Matched]] = {}
    for (call, g), match in zip(used, matches, strict=True):
        layers.setdefault(id(call.layer), []).append(Matched(call, g, match))
    return list(layers.values())


def _rows(calls: Sequence[Matched]) -> int:
    """Rows of a layer in all its calls, positions included."""
    return sum(matched.g[0].numel() for matched in calls) // math.prod(calls[0].call.layer.shape[:-1])


def _chunk(layer: MatrixLayer | BareParameter, t: int) -> int:
    """How many examples of ``t`` rows may be unfolded at once."""
    *lead, _, n = layer.shape
    return max(1, MAX_ACTIVATIONS_PER_CHUNK // (t * math.prod(lead) * n))


def _join(calls: Sequence[Matched], start: int, stop: int) -> tuple[Tensor, Tensor]:
    """One layer's calls, of the examples from ``start`` to ``stop``; several calls are further positions.

    Returns:
        Activations ``(..., b, t, n)`` and gradients ``(..., v, b, t, p)``.
    """
    a = [matched.match.activations(matched.call, start, stop) for matched in calls]  # type: ignore[union-attr]
    g = [
        stack([matched.match.gradients(matched.call, vector, start, stop) for vector in matched.g], -4)  # type: ignore[union-attr]
        for matched in calls
    ]
    return (a[0], g[0]) if len(calls) == 1 else (torch.cat(a, -2), torch.cat(g, -2))
