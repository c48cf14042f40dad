"""Whether a model is still the one that an optimiser was built for."""

from __future__ import annotations

from typing import Any

from torch import nn


class ModelSnapshot:
    """The modules and parameters of a model, by identity, with what an optimiser relies on.

    Args:
        model: the model as it is now.
    """

    def __init__(self, model: nn.Module):
        tables: list[tuple[str, dict[str, Any]]] = []
        for path, module in model.named_modules():
            tables += [(path, module._modules), (path, module._parameters)]
        self._sizes = [(table, len(table)) for _, table in tables]
        self._places = [(path, table, name, entry) for path, table in tables for name, entry in table.items()]
        self._params = [
            (name, p, p.requires_grad, p.dtype, p.device) for name, p in model.named_parameters(remove_duplicate=False)
        ]

    def refuse_changes(self) -> None:
        """Check that nothing was added, removed or replaced, and no parameter frozen, unfrozen, cast or moved.

        Raises:
            RuntimeError: if something was.
        """
        remedy = "build a new optimiser"
        for path, table, name, entry in self._places:
            if table.get(name) is not entry:
                what = f"{path}.{name}".lstrip(".")
                change = "replaced" if name in table else "removed"
                raise RuntimeError(f"{what!r} was {change} after the optimiser was built: {remedy}")
        for table, size in self._sizes:
            if len(table) != size:
                added = next(reversed(table))
                raise RuntimeError(f"{added!r} was added after the optimiser was built: {remedy}")
        for name, param, trains, dtype, device in self._params:
            if param.requires_grad != trains:
                change = "frozen" if trains else "unfrozen"
                raise RuntimeError(f"{name!r} was {change} after the optimiser was built: {remedy}")
            if param.dtype != dtype or param.device != device:
                raise RuntimeError(
                    f"{name!r} was {dtype} on {device} when the optimiser was built, got {param.dtype} on "
                    f"{param.device}: {remedy}"
                )
