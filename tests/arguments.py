"""Arguments that a method has."""

from __future__ import annotations

import inspect
from typing import Any


def accepted(method: Any, **options: Any) -> dict[str, Any]:
    """Those of ``options`` that are arguments of ``method``."""
    known = inspect.signature(method).parameters
    return {name: value for name, value in options.items() if name in known}
