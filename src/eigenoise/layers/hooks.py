"""Hooks that capture a layer's inputs and the places of its outputs in the autograd graph.

They are on only within a block that takes statistics, so they cost nothing at any other time and nothing is left
behind. A gradient is asked for by its place in the graph, noted before anything can change the output in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from eigenoise.layers.matrix_layer import MatrixLayer


@dataclass(frozen=True)
class Call:
    """One call of a layer: its input and the place of its output in the graph."""

    layer: MatrixLayer
    x: Tensor
    edge: GradientEdge


class Capture:
    """Watches ``layers`` between ``open`` and ``close``.

    Args:
        layers: the layers to watch.
        bare: parameters outside them whose gradients are wanted as well.
    """

    def __init__(self, layers: Sequence[MatrixLayer], bare: Sequence[nn.Parameter]):
        self.layers, self.bare = list(layers), list(bare)
        self.calls: list[Call] = []
        self._handles: list[Any] = []

    def open(self) -> None:
        """Put the hooks on."""
        for layer in self.layers:

            def hook(module, args, kwargs, output, layer=layer):
                if not (torch.is_grad_enabled() and output.requires_grad):
                    return None
                if output._is_view():  # an in-place change of a view would move its place in the graph
                    output = output.clone()
                x = args[0] if args else next(iter(kwargs.values()))
                self.calls.append(Call(layer, x.detach(), get_gradient_edge(output)))
                return output

            self._handles.append(layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True))

    def close(self) -> None:
        """Take the hooks off and forget all calls."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.calls.clear()

    def backward(
        self, f: Tensor, vectors: Tensor, calls: Sequence[Call], bare: bool = True
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of ``f`` along ``vectors (v, *f.shape)``; the graph stays, and no ``.grad`` is touched.

        Args:
            f: the model's output.
            vectors: v vectors in its shape.
            calls: whose outputs' gradients are wanted.
            bare: whether those by bare parameters are wanted too.

        Returns:
            For each call ``(v, ...)``, the gradients at its output, or None if ``f`` did not come from it; for each
            bare parameter ``(v, *shape)`` or None.
        """
        edges: list[Any] = [*(call.edge for call in calls), *(self.bare if bare else [])]
        if not edges:
            return [], []
        columns = [torch.autograd.grad(f, edges, u, retain_graph=True, allow_unused=True) for u in vectors]
        gradients = [None if rows[0] is None else stack(rows, 0) for rows in zip(*columns, strict=True)]
        return gradients[: len(calls)], gradients[len(calls) :]

    def release(self, done: Iterable[Call]) -> None:
        """Let go of calls whose loss has been backpropagated."""
        gone = {id(call) for call in done}
        self.calls = [call for call in self.calls if id(call) not in gone]


def stack(parts: Sequence[Tensor | None], dim: int) -> Tensor:
    """``torch.stack`` that does not copy a single part; None counts as zeros."""
    like = next(part for part in parts if part is not None)
    known = [torch.zeros_like(like) if part is None else part for part in parts]
    return known[0].unsqueeze(dim) if len(known) == 1 else torch.stack(known, dim)
