"""Hooks that deliver activations and pre-activation gradients in the canonical form.

They are on only within one block of one statistics iteration, so they cost nothing at any other time and nothing is
left behind. A gradient is asked for by its place in the autograd graph, noted before anything can change the output in
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from eigenoise.layers import MatrixLayer


class Call:
    """One call of one layer: its input and the place of its output in the graph."""

    def __init__(self, layer: MatrixLayer, x: Tensor, edge: GradientEdge):
        self.layer, self.x, self.edge = layer, x, edge
        self.g: Tensor | None = None
        self.backward: object = None  # which backward pass delivered g


class Capture:
    """Watches ``layers`` between ``open`` and ``close``.

    Args:
        layers: the layers to watch.
        bare: parameters outside them whose gradients are wanted as well.
    """

    def __init__(self, layers: Sequence[MatrixLayer], bare: Sequence[nn.Parameter]):
        self.layers, self.bare = list(layers), list(bare)
        self.calls: list[Call] = []
        self._handles: list = []

    def open(self, on_backward: bool = False) -> None:
        """Put the hooks on; with ``on_backward`` calls also receive the gradient of the user's own backward pass."""
        for layer in self.layers:

            def hook(module, args, kwargs, output, layer=layer):
                if not (torch.is_grad_enabled() and output.requires_grad):
                    return None
                if output._is_view():  # an in-place change of a view would move its place in the graph
                    output = output.clone()
                x = args[0] if args else kwargs["input"]
                call = Call(layer, x.detach(), get_gradient_edge(output))
                if on_backward:
                    output.register_hook(lambda g: setattr(call, "g", g))
                self.calls.append(call)
                return output

            self._handles.append(layer.module.register_forward_hook(hook, with_kwargs=True))

    def close(self) -> None:
        """Take the hooks off and forget all calls."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.calls.clear()

    def backward(
        self, f: Tensor, vectors: Tensor
    ) -> tuple[list[tuple[MatrixLayer, Tensor, Tensor]], list[Tensor | None]]:
        """Gradients of ``f`` along ``vectors (v, *f.shape)`` at every call that ``f`` came from.

        Those calls are done with afterwards. The graph stays for the user's own backward pass, and no ``.grad`` is
        touched.

        Returns:
            For each layer that ``f`` came from: layer, a ``(..., b, t, n)``, g ``(..., v, b, t, p)``; and for each bare
            parameter ``(v, *shape)`` or None.
        """
        wanted: list[Any] = [*(call.edge for call in self.calls), *self.bare]
        columns = [torch.autograd.grad(f, wanted, u, retain_graph=True, allow_unused=True) for u in vectors]
        gradients = [None if rows[0] is None else torch.stack(rows) for rows in zip(*columns, strict=True)]
        count = len(self.calls)
        used = [(call, g) for call, g in zip(self.calls, gradients, strict=False) if g is not None]
        self.calls = [call for call, g in zip(self.calls, gradients, strict=False) if g is None]
        return _join(used), gradients[count:]

    def received(self, backward: object) -> list[tuple[MatrixLayer, Tensor, Tensor]]:
        """What the user's backward pass ``backward`` delivered, as ``backward`` returns it, with v = 1."""
        used = [(call, call.g.unsqueeze(0)) for call in self.calls if call.g is not None and call.backward is backward]
        return _join(used)


def _join(used: list[tuple[Call, Tensor]]) -> list[tuple[MatrixLayer, Tensor, Tensor]]:
    """Canonical form, layer by layer; several calls of one layer in one forward pass become further positions."""
    by_layer: dict[int, list[tuple[Call, Tensor]]] = {}
    for pair in used:
        by_layer.setdefault(id(pair[0].layer), []).append(pair)
    joined = []
    for calls in by_layer.values():
        layer = calls[0][0].layer
        a = [layer.activations(call.x) for call, _ in calls]
        g = [torch.stack([layer.gradients(vector) for vector in vectors], -4) for _, vectors in calls]
        if len({part.shape[-3] for part in a}) > 1:
            sizes = [part.shape[-3] for part in a]
            raise ValueError(
                f"layer {layer.name!r} was called {len(a)} times in one forward pass with batches of {sizes}: "
                "its examples cannot be matched; call it with equal batches"
            )
        joined.append((layer, torch.cat(a, -2), torch.cat(g, -2)) if len(a) > 1 else (layer, a[0], g[0]))
    return joined
