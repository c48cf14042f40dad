"""Which rows of a layer belong to which example.

R needs squares of per-example gradients, but a layer sees rows: examples, tokens of examples, nodes of a graph, both
halves of a pair. Guessing by sizes alone can be silently wrong. So a guess is verified: if the vectors of some examples
change their sign, exactly the gradients at their own rows change theirs. Where no guess holds, because rows depend on
several examples, all rows are taken as one example, which is unbiased for drawn targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from eigenoise.layers.hooks import Call, Capture
from eigenoise.layers.matrix_layer import Grouping, MatrixLayer
from eigenoise.likelihoods.base import at_least_float32

MIN_AGREEMENT = 0.999  # of gradients with signs changed; what is missing enters R with its root
MIN_AGREEMENT_HALF = 0.99  # in bfloat16 or float16
MIN_SIGNS = 64  # drawn in all; few examples are looked at several times
MIN_AGREEMENT_BATCH_NORM = 0.3  # batch norm couples all rows of a batch a little
NEGLIGIBLE = 1e-16  # a square so much smaller than another example's may have lost its digits on the way
MAX_PARTS, MIN_PART = 4, 1 << 20  # layers are looked at in parts of so many numbers, to hold fewer at once


class Match(NamedTuple):
    """The rows of one call as examples and positions.

    Attributes:
        examples: how many there are.
        grouping: where they are; None in a stack of models, whose rows are examples.
    """

    examples: int
    grouping: Grouping | None

    def activations(self, call: Call, start: int, stop: int) -> Tensor:
        """Of examples ``start`` to ``stop``, ``(..., b, t, n)``."""
        if self.grouping is None:
            return call.layer.rows(call.x, None)
        x = call.layer.narrow(call.x, self.examples, self.grouping, start, stop)
        return call.layer.activations(x, stop - start, self.grouping)

    def gradients(self, call: Call, g: Tensor, start: int, stop: int) -> Tensor:
        """Of examples ``start`` to ``stop``, ``(..., b, t, p)``."""
        if self.grouping is None:
            return call.layer.gradient_rows(g, None)
        g = call.layer.narrow(g, self.examples, self.grouping, start, stop)
        return call.layer.gradients(g, stop - start, self.grouping)


class ExampleMatcher:
    """Finds the examples in every layer's rows, and remembers them by the shapes they were found with.

    Args:
        model: whose batch norm couples rows.
        stack: whether the model is a stack of models.
        batch_dim: the axis of a sequence-first output that counts examples.
    """

    def __init__(self, model: nn.Module, stack: int | None, batch_dim: int):
        self.model, self.stack, self.batch_dim = model, stack, batch_dim
        self._known: dict[tuple, Grouping | None] = {}

    def match(
        self, capture: Capture, f: Tensor, vectors: Tensor, used: Sequence[tuple[Call, Tensor]]
    ) -> list[Match | None]:
        """For each call of ``used`` its examples, or None if its rows belong to several.

        Args:
            capture: for one more backward pass, when shapes are new.
            f: the model's output.
            vectors: ``(v, *f.shape)``, what was backpropagated.
            used: calls with the gradients ``(v, ...)`` at their outputs.
        """
        axis = self._axis(f)
        examples = f.shape[axis]
        keys = _keys(used, examples)
        unknown = [i for i, (call, _) in enumerate(used) if keys[i] not in self._known and call.layer.stack is None]
        if unknown:
            self._verify(capture, f, axis, vectors, {keys[i]: used[i] for i in unknown})
        return [
            Match(_stacked_rows(call.layer, g), None) if call.layer.stack is not None else self._lookup(key, examples)
            for key, (call, g) in zip(keys, used, strict=True)
        ]

    def _axis(self, f: Tensor) -> int:
        if self.stack is not None:
            return f.ndim - 2
        return self.batch_dim if f.ndim > self.batch_dim + 1 else 0

    def _lookup(self, key: tuple, examples: int) -> Match | None:
        grouping = self._known.get(key)
        return None if grouping is None else Match(examples, grouping)

    def _verify(
        self, capture: Capture, f: Tensor, axis: int, vectors: Tensor, calls: dict[tuple, tuple[Call, Tensor]]
    ) -> None:
        """Backpropagate once more with the signs of about half the examples changed, and compare."""
        examples = f.shape[axis]
        generator = torch.Generator().manual_seed(examples)  # the same at every time, and nobody else's
        weights = torch.randn(len(vectors), generator=generator).to(vectors)  # vectors alone may add up to nothing
        combined, shape = torch.tensordot(weights, vectors, 1), (-1, *(1,) * (f.ndim - 1 - axis))
        agreements: dict[tuple, list[Tensor]] = {key: [] for key in calls}  # for each draw and way

        def look(part: list[tuple]) -> None:
            signs = torch.randint(2, (examples,), generator=generator).mul_(2).sub_(1).to(vectors)
            turned = (combined * signs.reshape(shape)).unsqueeze(0)
            second, _ = capture.backward(f, turned, [calls[key][0] for key in part], bare=False)
            for key, g_turned in zip(part, second, strict=True):
                call, g = calls[key]
                ways = call.layer.groupings(call.x, examples)
                if g_turned is not None and ways:
                    first = torch.tensordot(weights.to(g), g, 1)
                    own = [_agreement(call.layer, first, g_turned[0], signs, way) for way in ways]
                    agreements[key].append(torch.stack(own))

        for part in _parts(calls):
            for _ in range(-(-MIN_SIGNS // examples)):
                look(part)
        for key, (call, g) in calls.items():
            if not bool(g.any()):
                continue  # nothing can be seen from it yet
            self._known[key] = None
            if agreements[key]:
                mean = torch.stack(agreements[key]).mean(0)
                if float(mean.max()) >= self._least(g.dtype):
                    self._known[key] = call.layer.groupings(call.x, examples)[int(mean.argmax())]

    def _least(self, dtype: torch.dtype) -> float:
        if any(isinstance(module, _BatchNorm) and module.training for module in self.model.modules()):
            return MIN_AGREEMENT_BATCH_NORM
        return MIN_AGREEMENT_HALF if dtype in (torch.bfloat16, torch.float16) else MIN_AGREEMENT


def _keys(used: Sequence[tuple[Call, Tensor]], examples: int) -> list[tuple]:
    """What a call is known by: its layer, its place among the layer's calls, its shape and the number of examples."""
    counts: dict[str, int] = {}
    keys = []
    for call, _ in used:
        counts[call.layer.name] = counts.get(call.layer.name, -1) + 1
        keys.append((call.layer.name, counts[call.layer.name], tuple(call.x.shape), examples))
    return keys


def _parts(calls: dict[tuple, tuple[Call, Tensor]]) -> list[list[tuple]]:
    """The keys in their order, as parts whose gradients have about equally many numbers."""
    most = max(MIN_PART, sum(g.numel() for _, g in calls.values()) / MAX_PARTS)
    parts: list[list[tuple]] = [[]]
    size = 0.0
    for key, (_, g) in calls.items():
        if parts[-1] and size + g.numel() > most and len(parts) < MAX_PARTS:
            parts.append([])
            size = 0.0
        parts[-1].append(key)
        size += g.numel()
    return parts


def _stacked_rows(layer: MatrixLayer, g: Tensor) -> int:
    return layer.gradient_rows(g[0], None).shape[-3]


def _agreement(layer: MatrixLayer, first: Tensor, second: Tensor, signs: Tensor, way: Grouping) -> Tensor:
    """How far ``second`` is ``first`` with the signs of examples, a mean over examples: 1 if each row is its own."""
    a, b = (layer.gradients(at_least_float32(g), len(signs), way) for g in (first, second))
    size = torch.stack(torch.aminmax(a)).abs().max()
    a = a / size  # else the squares of small gradients would vanish
    axes = tuple(axis for axis in range(a.ndim) if axis != a.ndim - 3)
    products, squares = (a * b).sum(axes) * signs.to(a) / size, a.square().sum(axes)
    counts = squares > NEGLIGIBLE * squares.max()
    return (products[counts] / squares[counts]).mean()
