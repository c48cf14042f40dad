"""Which Fisher structure a layer gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eigenoise.fisher import BasisOptions, Diagonal, Fisher
from eigenoise.layers.assignment import Assignment


def diagonal_fisher(assignment: Assignment, init: float | None) -> Diagonal:
    """The diagonal Fisher of a layer, or of a bare parameter in its own shape."""
    shape = assignment.layer.shape
    event_dims = 2 if assignment.kind == "structured" else len(shape)
    return Diagonal(shape, event_dims=event_dims, init=init, **_like_weights(assignment))


def kronecker_fishers(
    structure: Callable[..., Fisher], damping_form: str, init: float | None, basis: BasisOptions
) -> Callable[[Assignment], Fisher]:
    """Builds Fishers with Kronecker factors for layers, diagonal ones for bare parameters.

    Args:
        structure: ``Kronecker`` or ``Eigen``.
        damping_form: ``"exact"`` or ``"factored"``.
        init: as for ``Fisher``.
        basis: which basis each side of a layer's matrix has.
    """

    def make(assignment: Assignment) -> Fisher:
        if assignment.kind != "structured":
            return diagonal_fisher(assignment, init)
        options = _like_weights(assignment)
        return structure(assignment.layer.shape, damping_form=damping_form, basis=basis, init=init, **options)

    return make


def _like_weights(assignment: Assignment) -> dict[str, Any]:
    param = assignment.layer.params[0]
    return {"dtype": param.dtype, "device": param.device}
