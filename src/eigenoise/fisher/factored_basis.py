"""A factored basis for a convolution's patches: one over the kernel's taps times one over channels for each tap mode.

It is another family than the paper's, which decomposes A ``(c·taps, c·taps)`` as one matrix. R is exact in it all the
same (eq. 6). With 9 taps, rotating a patch costs about a ninth, and decompositions an 81st.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from eigenoise import linalg
from eigenoise.fisher.bases import Basis, SideChange, mean_of_entries, scaled_identity
from eigenoise.linalg.kronecker import matmul
from eigenoise.linalg.moving_average import Averaged, MovingAverage, Product


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

    def rotate(self, x: Tensor) -> Tensor:
        """x·Q."""
        patches, rest = self.split(x)
        return _joined(matmul(self.modes(patches), self.channels).movedim(-3, -2), rest)

    def unrotate(self, x: Tensor) -> Tensor:
        """x·Qᵀ."""
        taps, c = self.channels.shape[-3:-1]
        modes = x[..., : taps * c].unflatten(-1, (taps, c)).movedim(-2, -3)
        mixed = matmul(self.taps, matmul(modes, self.channels.mT).flatten(-2))  # (..., taps, r·c)
        return _joined(mixed.unflatten(-1, (-1, c)).movedim(-3, -1), x[..., taps * c :])


@dataclass(frozen=True)
class TapChange(SideChange):
    """A change from one such basis to another, P = Q_newᵀ·Q."""

    old: TapBasis
    new: TapBasis

    def rotate(self, x: Tensor) -> Tensor:
        """x·Pᵀ."""
        return self.new.rotate(self.old.unrotate(x))

    def rotate_variances(self, x: Tensor) -> Tensor:
        """x·(P∘P)ᵀ, where P has the blocks (U_newᵀU)_ml·V_new,mᵀ·V_l."""
        taps, c = self.new.channels.shape[-3:-1]
        weights = matmul(self.new.taps.mT, self.old.taps).square()
        body = x[..., : taps * c]
        blocks = []
        for m in range(taps):
            block = (self.new.channels[..., m : m + 1, :, :].mT @ self.old.channels).square()  # (..., l, c, c)
            block *= weights[..., m, :, None, None]
            blocks.append(matmul(body, block.mT.flatten(-3, -2)))
        return torch.cat([*blocks, x[..., taps * c :]], -1)


@final
class FactoredBasis(Basis):
    """The input side of a convolution.

    Kept are the taps' moments, summed over channels, and those of the channels of each mode of the taps. When the taps'
    basis changes, the channels' moments of the new modes are mixed from those of the old ones as if modes were
    uncorrelated; only the basis comes from them, and new statistics take over.

    Args:
        lead: leading dimensions, the groups.
        size: k = c·taps, and one more with a bias.
        kernel: c and taps.
        init: the moments start as this times the identity, or None to start from the first statistics.
        options: dtype and device.
    """

    def __init__(
        self, lead: tuple[int, ...], size: int, kernel: tuple[int, int], init: float | None, options: dict[str, Any]
    ):
        self.size = size
        c, taps = kernel
        start = init or 0.0
        eyes = [torch.eye(k, **options).repeat(*more, 1, 1) for k, more in ((taps, lead), (c, (*lead, taps)))]
        self.q = TapBasis(*eyes)
        self._taps = MovingAverage(start * c * eyes[0], scaled_identity)
        self._channels = MovingAverage(start * eyes[1], scaled_identity)
        self._rest = MovingAverage(torch.full((*lead, size - c * taps), start, **options), mean_of_entries)
        self.values = torch.full((*lead, size), start, **options)
        self.rotation_cost = c * taps * (c + taps)
        self.decomposition_cost = eyes[1].numel() * c + eyes[0].numel() * taps

    @property
    def moments(self) -> Tensor:
        """Of the channels of each mode, ``(..., taps, c, c)``."""
        return self._channels.value

    @property
    def tap_moments(self) -> Tensor:
        """Of the taps, ``(..., taps, taps)``."""
        return self._taps.value

    def update(self, x: Tensor, count: int) -> None:
        """Gather sums of products over ``x (..., b, t, k)``."""
        patches, rest = self.q.split(x.flatten(-3, -2))
        modes = self.q.modes(patches)
        self._taps.add(matmul(patches, patches.mT), count)
        self._channels.add(Product(modes, modes), count)
        self._rest.add(rest.square().sum(-2), count)

    def commit(self, rate: float, first: bool) -> None:
        """Blend the gathered means into the moments (eq. 12)."""
        for average in (self._taps, self._channels, self._rest):
            average.blend(rate, first)

    def averages(self) -> list[Averaged]:
        """Moments of taps, of channels and of the bias."""
        return [self._taps.averaged(), self._channels.averaged(), self._rest.averaged()]

    def add(self, x: Tensor, weight: float) -> None:
        """Add to the moments and to the values."""
        patches, rest = self.q.split(self.unrotate(x))
        modes = self.q.modes(patches)
        self.tap_moments.add_(matmul(patches, patches.mT), alpha=weight)
        self.moments.add_(matmul(modes.mT, modes), alpha=weight)
        self._rest.value.add_(rest.square().sum(-2), alpha=weight)
        self.values.add_(x.square().sum(-2), alpha=weight)

    def decompose(self) -> list[Tensor] | None:
        """Bases of taps and of channels, the channels' moments and eigenvalues."""
        taps = linalg.eigh_psd(self.tap_moments)
        if taps is None:
            return None
        mix = matmul(taps[1].mT, self.q.taps).square()
        moments = matmul(mix, self.moments.flatten(-2)).view_as(self.moments)
        channels = linalg.eigh_psd(moments)
        return None if channels is None else [taps[1], channels[1], moments, channels[0]]

    def decomposed(self) -> list[Tensor]:
        """Bases of taps and of channels, the channels' moments and eigenvalues."""
        return [self.q.taps, self.q.channels, self.moments, self.moments[..., 0]]

    def set_basis(self, decomposition: list[Tensor]) -> TapChange:
        """Use new bases of taps and of channels."""
        taps, channels, moments, values = decomposition
        old = TapBasis(self.q.taps.clone(), self.q.channels.clone())
        self.q.taps.copy_(taps)
        self.q.channels.copy_(channels)
        self.moments.copy_(moments)
        torch.cat([values.flatten(-2), self._rest.value], -1, out=self.values)
        return TapChange(old, TapBasis(taps, channels))

    def rotate(self, x: Tensor) -> Tensor:
        """x·Q."""
        return self.q.rotate(x)

    def unrotate(self, x: Tensor) -> Tensor:
        """x·Qᵀ."""
        return self.q.unrotate(x)

    def rotate_columns(self, x: Tensor) -> Tensor:
        """Qᵀ·x."""
        return self.rotate(x.mT).mT

    def unrotate_columns(self, x: Tensor) -> Tensor:
        """Q·x."""
        return self.unrotate(x.mT).mT

    def matrix(self) -> Tensor:
        """Q ``(..., k, k)``, multiplied out."""
        return self.rotate(torch.diag_embed(torch.ones_like(self.values)))

    def diagonal(self) -> Tensor:
        """The diagonal ``(..., k)`` of the current moments in the basis."""
        channels = self.q.channels
        values = (channels * (self.moments @ channels)).sum(-2).flatten(-2).clamp_min(0.0)
        return torch.cat([values, self._rest.value], -1)

    def state(self, moments: str, side: str) -> dict[str, Tensor]:
        """Moments, bases and eigenvalues of taps and channels."""
        return {
            moments: self.moments,
            f"{moments}_taps": self.tap_moments,
            f"{moments}_rest": self._rest.value,
            f"q_{side}": self.q.channels,
            f"q_{side}_taps": self.q.taps,
            f"values_{side}": self.values,
        }


def _joined(body: Tensor, rest: Tensor) -> Tensor:
    """``(..., r, ·, ·)`` as rows ``(..., r, ·)``, with the columns that were set aside."""
    return torch.cat([body.flatten(-2), rest.expand(*body.shape[:-2], -1)], -1)
