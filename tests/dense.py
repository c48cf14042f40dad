"""Autodiff oracles in float64: per-example gradients and dense Fisher blocks, straight from torch.func.

Nothing here uses the package's own hooks, layers or Fishers, only how parameters lie in a matrix (bias last).
Axis letters: b examples, d outputs, p rows, n columns with the bias.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from eigenoise.models import StackedLinear

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs and targets, a scalar


def to_matrix(module: nn.Module, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A weight and bias of ``module``, after any leading axes, as one matrix with the bias as last column."""
    lead = weight.ndim - module.weight.ndim
    if not isinstance(module, StackedLinear):
        weight = weight.flatten(lead + 1)  # (..., p, n)
    groups = getattr(module, "groups", 1)
    if groups > 1:
        weight = weight.unflatten(lead, (groups, -1))  # (..., groups, p, n)
        bias = None if bias is None else bias.unflatten(lead, (groups, -1))
    return weight if bias is None else torch.cat([weight, bias.unsqueeze(-1)], -1)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that train, by name, detached."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def layer_matrix(model: nn.Module, name: str, values: dict[str, Tensor]) -> Tensor:
    """The entries of ``values`` that belong to the layer ``name``, as matrices (..., p, n)."""
    dot = f"{name}." if name else ""
    return to_matrix(model.get_submodule(name), values[f"{dot}weight"], values.get(f"{dot}bias"))


def per_example_gradients(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, batch_dim: int = 0) -> dict[str, Tensor]:
    """Gradient of each example's own loss by every parameter that trains, (b, *shape)."""

    def of_one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        f = functional_call(model, params, (x.unsqueeze(batch_dim),))
        return loss(f, y.unsqueeze(batch_dim))

    return vmap(grad(of_one), in_dims=(None, batch_dim, batch_dim))(trainable(model), x, y)


def jacobians(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs (b, d) and their Jacobians by every parameter that trains, (b, d, *shape)."""

    def outputs(params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        f = functional_call(model, params, (x,))
        return f, f

    by_params, f = jacrev(outputs, has_aux=True)(trainable(model))
    return f.detach(), by_params


def gaussian_fisher(f: Tensor, tau: float) -> Tensor:
    """Fisher of N(f, 1/tau) by f (b, d): tau·I, (b, d, d)."""
    return tau * torch.eye(f.shape[-1], dtype=f.dtype).expand(*f.shape, -1)


def categorical_fisher(f: Tensor) -> Tensor:
    """Fisher of softmax(f) by the logits f (b, d): diag(p) − ppᵀ, (b, d, d)."""
    p = f.softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def fisher_block(model: nn.Module, name: str, x: Tensor, output_fisher: Callable[[Tensor], Tensor]) -> Tensor:
    """The layer's exact Fisher (1/b)·Σ Jᵀ·F_f·J over its matrix flattened by rows, (..., pn, pn)."""
    f, by_params = jacobians(model, x)
    J = layer_matrix(model, name, by_params).flatten(-2)  # (b, d, [groups,] pn)
    return torch.einsum("bd...i,bde,be...j->...ij", J, output_fisher(f), J) / x.shape[0]


def fisher_diagonal(model: nn.Module, name: str, x: Tensor, output_fisher: Callable[[Tensor], Tensor]) -> Tensor:
    """The diagonal of the exact Fisher of the parameter ``name``, in its own shape."""
    f, by_params = jacobians(model, x)
    return torch.einsum("bd...,bde,be...->...", by_params[name], output_fisher(f), by_params[name]) / f.shape[0]


def diagonal_in_basis(block: Tensor, q_out: Tensor, q_in: Tensor) -> Tensor:
    """The diagonal of a block (..., pn, pn) in the basis q_out⊗q_in, as (..., p, n)."""
    p, n = q_out.shape[-1], q_in.shape[-1]
    F = block.unflatten(-1, (p, n)).unflatten(-3, (p, n))  # (..., p, n, p, n)
    return torch.einsum("...ijkl,...ir,...jc,...kr,...lc->...rc", F, q_out, q_in, q_out, q_in)
