"""The base of networks that are layers one after another."""

from __future__ import annotations

from typing import Any

from torch import nn


class Chain(nn.Sequential):
    """An ``nn.Sequential`` with a constructor of its own: a slice of it is an ordinary one."""

    def __getitem__(self, index: Any) -> Any:
        """A layer, or a part of the network."""
        if isinstance(index, slice):
            return nn.Sequential(*list(self)[index])
        return super().__getitem__(index)
