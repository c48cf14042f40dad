"""One thread at a time holds a model's weights, so that no other takes a sample for the mean."""

from __future__ import annotations

import threading
from collections import deque
from weakref import WeakKeyDictionary

from torch import nn

PATIENCE = 10.0  # seconds that a prediction waits for a training block of another thread


class _Turns:
    """A lock that one thread may take several times, and that waiting threads get in the order in which they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0

    def take(self, patience: float | None) -> bool:
        me = threading.get_ident()
        with self._changed:
            if self._owner != me and (self._owner is not None or self._queue):
                ticket = object()
                self._queue.append(ticket)
                free = self._changed.wait_for(lambda: self._owner is None and self._queue[0] is ticket, patience)
                self._queue.remove(ticket)
                if not free:
                    self._changed.notify_all()
                    return False
            self._owner, self._depth = me, self._depth + 1
            return True

    def give_back(self) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                if self._queue:
                    self._changed.notify_all()


_turns: WeakKeyDictionary[nn.Module, _Turns] = WeakKeyDictionary()


class exclusive:  # noqa: N801
    """Within the block no other thread can put weights into ``model`` or read its means.

    Args:
        model: the model itself, not what wraps it.
        patience: seconds to wait for another thread, or None for as long as it takes.

    Raises:
        RuntimeError: if the other thread takes longer.
    """

    def __init__(self, model: nn.Module, patience: float | None = None):
        self._turns = _turns.get(model) or _turns.setdefault(model, _Turns())
        self._patience = patience

    def __enter__(self) -> None:
        if not self._turns.take(self._patience):
            raise RuntimeError(
                f"another thread has had sampled weights in this model for {self._patience:g} seconds: leave its "
                "sampled_params() block, or predict with a copy of the model"
            )

    def __exit__(self, *error: object) -> None:
        self._turns.give_back()
