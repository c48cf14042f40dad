"""A factored basis for a convolution's patches: one over the kernel's taps times one over channels for each tap mode.

It is another family than the paper's, which decomposes A ``(c·taps, c·taps)`` as one matrix. What R is in it is exact
all the same (eq. 6). With 9 taps, turning a patch costs about a ninth, and decompositions an 81st.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eigenoise import linalg
from eigenoise.linalg.kronecker import matmul
from eigenoise.linalg.moving_average import Averaged, PendingMean, Product


@dataclass(frozen=True)
class TapBasis:
    """First the taps are mixed, then the channels of each mixture.

    The coordinate (m, j) of a patch ``w (c, taps)`` is Σ over channels i and taps s of w_is·U_sm·V_mij; the last
    column, which the bias is multiplied with, stays as it is.

    Attributes:
        taps: U ``(..., taps, taps)``, orthogonal.
        channels: V ``(..., taps, c, c)``, an orthogonal matrix for each mode of the taps.
    """

    taps: Tensor
    channels: Tensor

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Patches ``x (..., r, k)`` with their taps first, ``(..., taps, r·c)``, and the columns after the last tap."""
        taps, c = self.channels.shape[-3:-1]
        body = x[..., : taps * c].unflatten(-1, (c, taps))
        return body.movedim(-1, -3).flatten(-2), x[..., taps * c :]

    def modes(self, patches: Tensor) -> Tensor:
        """``(..., taps, r·c)`` as the channels of each mode, ``(..., taps, r, c)``."""
        return matmul(self.taps.mT, patches).unflatten(-1, (-1, self.channels.shape[-1]))

    def turn(self, x: Tensor) -> Tensor:
        """x·Q."""
        patches, rest = self.split(x)
        return _joined(matmul(self.modes(patches), self.channels).movedim(-3, -2), rest)

    def turn_back(self, x: Tensor) -> Tensor:
        """x·Qᵀ."""
        taps, c = self.channels.shape[-3:-1]
        modes = x[..., : taps * c].unflatten(-1, (taps, c)).movedim(-2, -3)
        mixed = matmul(self.taps, matmul(modes, self.channels.mT).flatten(-2))  # (..., taps, r·c)
        return _joined(mixed.unflatten(-1, (-1, c)).movedim(-3, -1), x[..., taps * c :])

    def squared(self) -> TapBasis:
        """The same with every number squared, which makes Q∘Q of Q."""
        return TapBasis(self.taps.square(), self.channels.square())


@dataclass(frozen=True)
class TapChange:
    """A change from one such basis to another, P = Q_newᵀ·Q."""

    old: TapBasis
    new: TapBasis

    def carry(self, x: Tensor) -> Tensor:
        """x·Pᵀ."""
        return self.new.turn(self.old.turn_back(x))

    def carry_variances(self, x: Tensor) -> Tensor:
        """x·(P∘P)ᵀ, where P has the blocks (U_newᵀU)_ml·V_new,mᵀ·V_l."""
        taps, c = self.new.channels.shape[-3:-1]
        weights = matmul(self.new.taps.mT, self.old.taps).square()
        body = x[..., : taps * c]
        found = []
        for m in range(taps):
            block = (self.new.channels[..., m : m + 1, :, :].mT @ self.old.channels).square()  # (..., l, c, c)
            block *= weights[..., m, :, None, None]
            found.append(matmul(body, block.mT.flatten(-3, -2)))
        return torch.cat([*found, x[..., taps * c :]], -1)


class TapSide:
    """The input side of a convolution, with the same methods as ``FullSide``.

    Kept are the taps' moments, summed over channels, and those of the channels of each mode of the taps. When the taps'
    basis changes, the channels' moments of the new modes are mixed from those of the old ones as if modes were
    uncorrelated; only the basis comes from them, and new statistics take over.

    Args:
        lead: leading dimensions, the groups.
        size: k = c·taps, and one more with a bias.
        kernel: c and taps.
        start: the moments start as this times the identity.
        options: dtype and device.
    """

    def __init__(self, lead: tuple[int, ...], size: int, kernel: tuple[int, int], start: float, options: dict):
        c, taps = kernel
        eyes = [torch.eye(k, **options).repeat(*more, 1, 1) for k, more in ((taps, lead), (c, (*lead, taps)))]
        self.q = TapBasis(*eyes)
        self.tap_moments, self.moments = start * c * eyes[0], start * eyes[1]
        self.rest = torch.full((*lead, size - c * taps), start, **options)
        self.values = torch.full((*lead, size), start, **options)
        self.turn_cost = c * taps * (c + taps)
        self.decomposition_cost = self.moments.numel() * c + self.tap_moments.numel() * taps
        self._taps, self._channels, self._rest = PendingMean(), PendingMean(), PendingMean()
        self._averages = (
            (self._taps, self.tap_moments),
            (self._channels, self.moments),
            (self._rest, self.rest),
        )

    def update(self, x: Tensor, count: int) -> None:
        """Take in the sums of products over ``x (..., b, t, k)``, which are over ``count`` members."""
        patches, rest = self.q.split(x.flatten(-3, -2))
        modes = self.q.modes(patches)
        self._taps.add(matmul(patches, patches.mT), count)
        self._channels.add(Product(modes, modes), count)
        self._rest.add(rest.square().sum(-2), count)

    def commit(self, ema: float) -> None:
        """Blend the pending means into the moments (eq. 12)."""
        for pending, average in self._averages:
            pending.blend_into(average, ema)

    def add(self, x: Tensor, weight: float) -> None:
        """Add ``weight``·Σ xxᵀ of rows ``x (..., r, k)`` in the basis to the moments, its diagonal to the values."""
        patches, rest = self.q.split(self.turn_back(x))
        modes = self.q.modes(patches)
        self.tap_moments.add_(matmul(patches, patches.mT), alpha=weight)
        self.moments.add_(matmul(modes.mT, modes), alpha=weight)
        self.rest.add_(rest.square().sum(-2), alpha=weight)
        self.values.add_(x.square().sum(-2), alpha=weight)

    def averages(self) -> list[Averaged]:
        """Each of the moments with what was gathered for it."""
        return list(self._averages)

    def decompose(self) -> list[Tensor] | None:
        """A basis of taps and of channels, the channels' moments and eigenvalues, or None if they cannot be had."""
        taps = linalg.eigh_psd(self.tap_moments)
        if taps is None:
            return None
        mix = matmul(taps[1].mT, self.q.taps).square()
        moments = matmul(mix, self.moments.flatten(-2)).view_as(self.moments)
        channels = linalg.eigh_psd(moments)
        return None if channels is None else [taps[1], channels[1], moments, channels[0]]

    def decomposed(self) -> list[Tensor]:
        """Tensors like those that ``decompose`` gives."""
        return [self.q.taps, self.q.channels, self.moments, self.moments[..., 0]]

    def adopt(self, found: list[Tensor]) -> TapChange:
        """Take it over."""
        taps, channels, moments, values = found
        new = TapBasis(taps, channels)
        old = TapBasis(self.q.taps.clone(), self.q.channels.clone())
        self.q.taps.copy_(new.taps)
        self.q.channels.copy_(new.channels)
        self.moments.copy_(moments)
        torch.cat([values.flatten(-2), self.rest], -1, out=self.values)
        return TapChange(old, new)

    def turn(self, x: Tensor) -> Tensor:
        """x·Q."""
        return self.q.turn(x)

    def turn_back(self, x: Tensor) -> Tensor:
        """x·Qᵀ."""
        return self.q.turn_back(x)

    def turn_back_variances(self, x: Tensor) -> Tensor:
        """x·(Q∘Q)ᵀ."""
        return self.q.squared().turn_back(x)

    def matrix(self) -> None:
        """There is none."""

    def basis(self) -> Tensor:
        """Q ``(..., k, k)``, multiplied out."""
        return self.turn(torch.diag_embed(torch.ones_like(self.values)))

    def diagonal(self) -> Tensor:
        """The diagonal ``(..., k)`` of the moments in the basis."""
        channels = self.q.channels
        return torch.cat([(channels * (self.moments @ channels)).sum(-2).flatten(-2).clamp_min(0.0), self.rest], -1)

    def state(self, moments: str, end: str) -> dict[str, Tensor]:
        """The tensors that make it up; names begin with ``moments`` or have ``end`` in them."""
        return {
            moments: self.moments,
            f"{moments}_taps": self.tap_moments,
            f"{moments}_rest": self.rest,
            f"q_{end}": self.q.channels,
            f"q_{end}_taps": self.q.taps,
            f"values_{end}": self.values,
        }


def _joined(body: Tensor, rest: Tensor) -> Tensor:
    """``(..., r, ·, ·)`` as rows ``(..., r, ·)``, with the columns that were set aside."""
    return torch.cat([body.flatten(-2), rest.expand(*body.shape[:-2], -1)], -1)
