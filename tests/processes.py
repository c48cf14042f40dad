"""Runs a function in several processes that know of each other, and gathers what they return."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def run(count: int, work: Callable[..., Any], *args: Any, seconds: float = 120.0, may_die: bool = False) -> list[Any]:
    """Results of ``work(*args)`` on each of ``count`` forked ranks; if one fails or ends early, that is raised here.

    Where a rank ``may_die``, its result is None then.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        children = [_start(rank, count, folder, work, args, seconds) for rank in range(count)]
        for child in children:
            os.waitpid(child, 0)
        found = []
        for rank in range(count):
            path = os.path.join(folder, f"result {rank}")
            if not os.path.exists(path):
                if not may_die:
                    raise AssertionError(f"rank {rank} died")
                found.append(None)
                continue
            kind, value = torch.load(path, weights_only=False)  # our own, from a moment ago
            if kind == "error":
                raise AssertionError(f"rank {rank}: {value}")
            found.append(value)
        return found


def _start(rank: int, count: int, folder: str, work: Callable[..., Any], args: Any, seconds: float) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        try:
            store = dist.FileStore(os.path.join(folder, "store"), count)
            timeout = timedelta(seconds=seconds)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
            result = ("value", work(*args))
            status = 0
        except BaseException:
            result = ("error", traceback.format_exc())
        temporary = os.path.join(folder, f"part {rank}")
        torch.save(result, temporary)
        os.rename(temporary, os.path.join(folder, f"result {rank}"))
    finally:
        os._exit(status)
