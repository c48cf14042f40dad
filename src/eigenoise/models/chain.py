"""Base class of the sequential networks."""

from __future__ import annotations

from typing import Any

from torch import nn


class Chain(nn.Sequential):
    """An ``nn.Sequential`` whose subclasses have their own constructors; slices are plain ``nn.Sequential``."""

    def __getitem__(self, index: Any) -> Any:
        """Return a layer, or for a slice an ``nn.Sequential``."""
        if isinstance(index, slice):
            return nn.Sequential(*list(self)[index])
        return super().__getitem__(index)
