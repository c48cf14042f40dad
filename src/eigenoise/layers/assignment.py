"""Which parameter of a model gets which treatment: a layer's structure, a diagonal, a point estimate, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from eigenoise import checks
from eigenoise.layers.matrix_layer import BareParameter, MatrixLayer, as_matrix_layer

TREATMENTS = ("diagonal", "point")


@dataclass(frozen=True)
class Assignment:
    """One entry: a layer or a bare parameter, and ``"structured"``, ``"diagonal"`` or ``"point"``."""

    layer: MatrixLayer | BareParameter
    kind: str

    @property
    def has_posterior(self) -> bool:
        """Whether it has a posterior rather than a point estimate."""
        return self.kind != "point"


def assign(model: nn.Module, others: str = "diagonal", overrides: Mapping[str, str] | None = None) -> list[Assignment]:
    """Decide for every trainable parameter of ``model``.

    Args:
        model: any module; its frozen parameters are left alone.
        others: what parameters outside Linear and convolution layers get: ``"diagonal"`` or ``"point"``.
        overrides: the same choice for a module's or parameter's name and everything below it.

    Raises:
        TypeError: if ``model`` is no module, or a parameter is neither float32 nor float64.
        ValueError: if nothing trains, a parameter is tied, not yet initialised, or an override names nothing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got a {type(model).__name__}")
    checks.choice("others", others, TREATMENTS)
    overrides = dict(overrides or {})
    for name, kind in overrides.items():
        checks.choice(f"overrides[{name!r}]", kind, TREATMENTS)
        if not any(is_below(path, name) and param.requires_grad for path, param in model.named_parameters()):
            raise ValueError(f"overrides names {name!r}, but the model has no trainable parameter there")
    _check_parameters(model)

    chosen: list[Assignment] = []
    covered: set[int] = set()
    for name, module in model.named_modules():
        weight, bias = (f"{name}.{part}".lstrip(".") for part in ("weight", "bias"))
        if _inside_attention(model, name) or any(is_below(weight, o) for o in overrides):
            continue
        layer = as_matrix_layer(name, module, with_bias=not any(is_below(bias, o) for o in overrides))
        if layer is not None:
            chosen.append(Assignment(layer, "structured"))
            covered.update(id(p) for p in layer.params)
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in covered:
            kinds = [kind for o, kind in overrides.items() if is_below(name, o)]
            owner = model.get_submodule(name.rpartition(".")[0])
            chosen.append(Assignment(BareParameter(name, param, owner), kinds[-1] if kinds else others))
    if not chosen:
        raise ValueError("the model has nothing to train: every parameter is frozen, or there is none")
    return chosen


def is_below(path: str, name: str) -> bool:
    """Whether the module or parameter ``path`` is ``name`` or within it; the empty name is the whole model."""
    return not name or path == name or path.startswith(name + ".")


def _inside_attention(model: nn.Module, name: str) -> bool:
    """Whether a module sits in a MultiheadAttention, which uses its output projection's weight without calling it."""
    parent = name.rpartition(".")[0]
    return bool(name) and isinstance(model.get_submodule(parent), nn.MultiheadAttention)


def _check_parameters(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(f"{name!r} has sparse gradients, which are not supported: build it with sparse=False")
    seen: dict[int, str] = {}
    own = [(f"{path}.{name}".lstrip("."), p) for path, m in model.named_modules() for name, p in m._parameters.items()]
    for name, param in own:
        if param is None or not param.requires_grad:
            continue
        if isinstance(param, UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run the model once before building the optimiser")
        if param.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device and has no values: load the weights first")
        if not param.numel():
            raise ValueError(
                f"parameter {name!r} has no elements, its shape is {tuple(param.shape)}: leave it out, or freeze it "
                "with requires_grad_(False)"
            )
        if param.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"parameter {name!r} must be float32 or float64, got {param.dtype}; for mixed precision keep "
                "float32 parameters and use torch.autocast"
            )
        if id(param) in seen:
            raise ValueError(
                f"parameter {name!r} is tied to {seen[id(param)]!r}: a posterior over shared weights is not supported; "
                "untie them, or freeze the shared parameter with requires_grad_(False)"
            )
        seen[id(param)] = name


def describe(model: nn.Module, kinds: Mapping[str, tuple[MatrixLayer | BareParameter, str]]) -> list[str]:
    """One line for each parameter of ``model``: its name, its matrix's shape and what it gets; frozen ones last.

    Args:
        model: the model.
        kinds: for each entry of ``assign``, by name, the layer and a word for its treatment.
    """
    rows = [(name, f"{tuple(layer.shape)}  {kind}") for layer, kind in kinds.values() for name in layer.param_names]
    rows += [(name, "frozen, left alone") for name, param in model.named_parameters() if not param.requires_grad]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:{width}}  {about}" for name, about in rows]
