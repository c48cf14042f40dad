"""Hooks that deliver activations and pre-activation gradients in the canonical form.

They are on only within one block of one statistics iteration, so they cost nothing at any other time and nothing is
left behind. A gradient is asked for by its place in the autograd graph, noted before anything can change the output in
place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from eigenoise.layers.matrix_layer import MatrixLayer

Used = Sequence[tuple["Call", Tensor]]  # calls of one forward pass and gradients (v, ...) at their outputs


class Call:
    """One call of one layer: its input, the place of its output in the graph, and perhaps the gradient there."""

    def __init__(self, layer: MatrixLayer, x: Tensor, edge: GradientEdge):
        self.layer, self.x, self.edge = layer, x, edge
        self.g: Tensor | None = None

    def receive(self, g: Tensor) -> None:
        """Keep a gradient that the user's backward pass brought."""
        self.g = g.detach()


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
        self._expecting: list[Tensor | None] = []

    def open(self, receive: bool = False) -> None:
        """Put the hooks on; with ``receive`` they also catch the gradients of the user's own backward pass."""
        for layer in self.layers:

            def hook(module, args, kwargs, output, layer=layer):
                if not (torch.is_grad_enabled() and output.requires_grad):
                    return None
                if output._is_view():  # an in-place change of a view would move its place in the graph
                    output = output.clone()
                x = args[0] if args else next(iter(kwargs.values()))
                call = Call(layer, x.detach(), get_gradient_edge(output))
                if receive:
                    self._handles.append(output.register_hook(call.receive))
                self.calls.append(call)
                return output

            self._handles.append(layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        if receive:
            for i, param in enumerate(self.bare):
                self._handles.append(param.register_hook(lambda g, i=i: self._receive_bare(i, g)))

    def close(self) -> None:
        """Take the hooks off and forget all calls."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.calls.clear()
        self._expecting = []

    def backward(self, f: Tensor, vectors: Tensor) -> tuple[list[tuple[Call, Tensor]], list[Tensor | None]]:
        """Gradients of ``f`` along ``vectors (v, *f.shape)`` at every call that ``f`` came from.

        The graph stays for the user's own backward pass, and no ``.grad`` is touched.

        Returns:
            Those calls with gradients ``(v, ...)`` at their outputs; for each bare parameter ``(v, *shape)`` or None.
        """
        calls = list(self.calls)  # a checkpoint that is computed again would add to them
        wanted: list[Any] = [*(call.edge for call in calls), *self.bare]
        if not wanted:
            return [], []
        columns = [torch.autograd.grad(f, wanted, u, retain_graph=True, allow_unused=True) for u in vectors]
        gradients = [None if rows[0] is None else _stack(rows, 0) for rows in zip(*columns, strict=True)]
        at_calls, at_bare = gradients[: len(calls)], gradients[len(calls) :]
        return [(call, g) for call, g in zip(calls, at_calls, strict=True) if g is not None], at_bare

    def calls_behind(self, f: Tensor) -> list[Call]:
        """The calls that ``f`` came from, by walking its graph."""
        seen, front = set(), [f.grad_fn]
        while front:
            node = front.pop()
            if node is not None and node not in seen:
                seen.add(node)
                front.extend(parent for parent, _ in node.next_functions)
        return [call for call in self.calls if call.edge.node in seen]

    def release(self, done: Iterable[Call]) -> None:
        """Let go of calls whose loss has been backpropagated."""
        gone = {id(call) for call in done}
        self.calls = [call for call in self.calls if id(call) not in gone]

    def expect_bare(self) -> list[Tensor | None]:
        """A list, one place for each bare parameter, that the backward pass now beginning will fill."""
        self._expecting = [None] * len(self.bare)
        return self._expecting

    def _receive_bare(self, index: int, g: Tensor) -> None:
        if self._expecting:
            self._expecting[index] = g.detach().clone()  # it may become the .grad that is added to or clipped


def by_layer(used: Used) -> list[Used]:
    """The calls of each layer."""
    found: dict[int, list[tuple[Call, Tensor]]] = {}
    for pair in used:
        found.setdefault(id(pair[0].layer), []).append(pair)
    return list(found.values())


def positions(calls: Used, examples: int) -> int:
    """How many positions of one layer an example has, in all its calls."""
    outputs = sum(vectors[0].numel() for _, vectors in calls)
    return max(1, outputs // (math.prod(calls[0][0].layer.shape[:-1]) * examples))


def join(calls: Used, examples: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The calls of one layer in one forward pass, of the examples from ``start`` to ``stop``, in the canonical form.

    Several calls become further positions, so that an example's gradient is the sum over them. So do the rows of a
    layer that sees several for each of the model's ``examples``, as after ``x.flatten(0, 1)``.

    Returns:
        Activations ``(..., b, t, n)`` and gradients ``(..., v, b, t, p)``.

    Raises:
        ValueError: if a layer's calls have batches of different sizes, or its batch is on another axis.
    """
    layer = calls[0][0].layer
    for call, _ in calls:
        layer.check_batch_axis(call.x, examples)
    part = (examples, start, stop)
    a = [layer.activations(layer.some(call.x, *part)) for call, _ in calls]
    g = [_stack([layer.gradients(layer.some(vector, *part)) for vector in vectors], -4) for _, vectors in calls]
    sizes = [piece.shape[-3] for piece in a]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"layer {layer.name!r} was called {len(a)} times in one forward pass with batches of {sizes}: "
            f"its examples cannot be matched; call it with equal batches, or treat it with overrides={{"
            f"{layer.name!r}: 'diagonal'}}"
        )
    a_all, g_all = (
        layer.regroup(pieces[0] if len(pieces) == 1 else torch.cat(pieces, -2), stop - start) for pieces in (a, g)
    )
    return a_all, g_all


def _stack(parts: Sequence[Tensor], dim: int) -> Tensor:
    """``torch.stack`` that does not copy a single part."""
    return parts[0].unsqueeze(dim) if len(parts) == 1 else torch.stack(list(parts), dim)
