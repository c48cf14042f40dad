"""Which Fisher structure a layer gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from eigenoise import checks
from eigenoise.fisher import BasisOptions, Diagonal, Fisher
from eigenoise.fisher.base import DAMPINGS
from eigenoise.layers.assignment import Assignment
from eigenoise.layers.matrix_layer import ConvLayer
from eigenoise.linalg.precision import PRECISIONS

CONV_BASES = ("full", "factored")


def diagonal_fisher(assignment: Assignment, init: float | None) -> Diagonal:
    """The diagonal Fisher of a layer, or of a bare parameter in its own shape."""
    shape = assignment.layer.shape
    event_dims = 2 if assignment.kind == "structured" else len(shape)
    return Diagonal(shape, event_dims=event_dims, init=init, **_like_weights(assignment))


class KroneckerFishers:
    """Builds Fishers with Kronecker factors for layers, diagonal ones for bare parameters.

    Args:
        structure: ``Kronecker`` or ``Eigen``.
        damping_form: ``"exact"`` or ``"factored"``.
        init: as for ``Fisher``.
        precision: as for ``linalg.precision``.
        conv_basis: ``"full"`` or ``"factored"``.
        fixed_inputs: names of layers whose Q_A stays the identity.
        max_side: sides larger than this keep the identity as their basis.
    """

    def __init__(
        self,
        structure: Callable[..., Fisher],
        damping_form: str,
        init: float | None,
        precision: str,
        conv_basis: str,
        *,
        fixed_inputs: Sequence[str] = (),
        max_side: int,
    ):
        self.structure, self.init = structure, init
        self.damping_form = checks.choice("damping_form", damping_form, DAMPINGS)
        self.precision = checks.choice("precision", precision, PRECISIONS)
        self.conv_basis = checks.choice("conv_basis", conv_basis, CONV_BASES)
        self.max_side = checks.integer("max_side", max_side)
        self.fixed_inputs = frozenset(fixed_inputs)

    def __call__(self, assignment: Assignment) -> Fisher:
        """The Fisher of one layer or bare parameter."""
        if assignment.kind != "structured":
            return diagonal_fisher(assignment, self.init)
        layer, kernel = assignment.layer, None
        if self.conv_basis == "factored" and isinstance(layer, ConvLayer):
            kernel = (layer.params[0].shape[1], math.prod(layer.module.kernel_size))
        basis = BasisOptions(self.precision, layer.name in self.fixed_inputs, kernel, self.max_side)
        options = _like_weights(assignment)
        return self.structure(layer.shape, damping_form=self.damping_form, basis=basis, init=self.init, **options)

    def check_names(self, assignments: Sequence[Assignment]) -> None:
        """Raise ValueError if ``fixed_inputs`` names something that is no structured layer."""
        unknown = self.fixed_inputs - {a.layer.name for a in assignments if a.kind == "structured"}
        if unknown:
            raise ValueError(f"fixed_inputs names {sorted(unknown)}, which are no structured layers of the model")


def _like_weights(assignment: Assignment) -> dict[str, Any]:
    param = assignment.layer.params[0]
    return {"dtype": param.dtype, "device": param.device}
