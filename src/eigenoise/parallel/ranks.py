"""Several processes that train one model, each on its own part of the data and with its own weight noise.

Gradients are averaged by torch's ``DistributedDataParallel``. What else must be the same everywhere is averaged here in
few flat all-reduces, and what is expensive and the same everywhere is done by one process and sent to the others.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eigenoise.linalg.moving_average import Averaged

LOST = ("Connection closed", "Connection reset", "Timed out", "timed out", "timeout")  # in what gloo says
BUCKET = 1 << 23  # numbers that one all-reduce carries, so that the next can be gathered while it runs


class Ranks:
    """The processes of a group; every method but ``seed`` must be called by all of them, in the same order.

    Args:
        group: torch's process group.

    Attributes:
        size: how many there are.
        rank: which of them this one is.
    """

    def __init__(self, group: dist.ProcessGroup):
        # A group is freed, and its threads end, with the last model that refers to it. If that is left to the end of
        # Python, a thread of gloo's that frees its last tensor then aborts the process, as in plain torch.
        atexit.unregister(gc.collect)
        atexit.register(gc.collect)
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over ranks."""
        running = [(part, *self._add(torch._utils._flatten_dense_tensors(part))) for part in _buckets(tensors)]
        for part, work, flat in running:
            work.wait()
            flat.div_(self.size)
            torch._foreach_copy_(part, [*torch._utils._unflatten_dense_tensors(flat, part)])

    def add_up(self, averages: Sequence[Averaged]) -> None:
        """Have gathered, on every rank, what all ranks have gathered for moving averages."""
        if not averages:
            return
        device = averages[0][1].device
        own = torch.tensor([mean.count for mean, _ in averages], dtype=torch.float64, device=device)
        work, counts = self._add(own)
        means = {id(average): mean for mean, average in averages}
        running = []
        for part in _buckets([average for _, average in averages]):
            flat = part[0].new_empty(sum(average.numel() for average in part))
            sums = torch._utils._unflatten_dense_tensors(flat, part)
            for average, total in zip(part, sums, strict=True):
                means[id(average)].write_to(total)
            running.append((part, sums, self._add(flat)[0]))
        work.wait()
        count = dict(zip(means, map(round, counts.tolist()), strict=True))
        for part, sums, work in running:
            work.wait()
            for average, total in zip(part, sums, strict=True):
                means[id(average)].replace(total, count[id(average)])

    def divide(
        self,
        costs: Sequence[float],
        work: Callable[[int], list[Tensor] | None],
        like: Callable[[int], list[Tensor]],
    ) -> list[list[Tensor] | None]:
        """Have each piece of work done by one rank, and its result on all.

        Args:
            costs: of the pieces.
            work: does the piece of an index; None if it fails.
            like: tensors like its results.

        Returns:
            The results of all pieces.
        """
        owners = divided(costs, self.size)
        found: list[list[Tensor] | None] = [None] * len(costs)
        together: dict[Any, list[int]] = {}  # pieces that are sent at once
        for i, owner in enumerate(owners):
            kind = like(i)[0]
            together.setdefault((owner, kind.dtype, kind.device), []).append(i)
        running = []
        for (owner, *_), pieces in together.items():
            shapes = [like(i) for i in pieces]
            if owner == self.rank:
                done = [work(i) for i in pieces]
                parts = [_marked(each, shape) for each, shape in zip(done, shapes, strict=True)]
                flat = torch.cat([part for each in parts for part in each])
            else:
                flat = shapes[0][0].new_empty(sum(1 + sum(t.numel() for t in each) for each in shapes))
            running.append((pieces, shapes, flat))
        for pieces, shapes, flat in running:  # after all work is done, as a rank may be the source of one alone
            source = dist.get_global_rank(self.group, owners[pieces[0]])
            dist.broadcast(flat, source, self.group)
            start = 0
            for i, each in zip(pieces, shapes, strict=True):
                stop = start + 1 + sum(t.numel() for t in each)
                good, rest = bool(flat[start]), flat[start + 1 : stop]
                found[i] = [*torch._utils._unflatten_dense_tensors(rest, each)] if good else None
                start = stop
        return found

    def refuse_different(self, tensors: Iterable[Tensor], what: str) -> None:
        """Raise RuntimeError, on all ranks, unless sums of ``tensors`` are equal on all of them."""
        sums = [tensor.sum(dtype=torch.float64) for tensor in tensors]
        own = torch.stack(sums) if sums else torch.zeros(1, dtype=torch.float64, device=self.device)
        least, most = own.clone(), own.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, self.group)
        dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        if bool((least < most).any()):
            raise RuntimeError(what)

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on one of the ranks."""
        found = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        return bool(found)

    @property
    def device(self) -> torch.device:
        """Where small tensors must be for the group's own way to talk."""
        on_gpu = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def of_first(self, number: int) -> int:
        """What ``number`` is on the first rank."""
        found = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.broadcast(found, dist.get_global_rank(self.group, 0), self.group)
        return int(found)

    def seed(self, start: int, step: int, what: str = "noise") -> int:
        """Of this rank's noise at ``step``: from ``start`` and the two numbers alone, so that it need not be kept."""
        words = f"{what} {start} {step} {self.rank}".encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 1

    def _add(self, flat: Tensor) -> tuple[dist.Work, Tensor]:
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None
        return work, flat


@contextmanager
def started_together(device: str, timeout: float) -> Iterator[Ranks | None]:
    """Within the block, the processes that torchrun has started; None if there is only this one.

    An error of torch's that says that another process is gone or too slow becomes a ``ConnectionError``.

    Args:
        device: that they train on, such as ``"cpu"`` or ``"cuda"``: each takes a card of its own.
        timeout: seconds that they wait for each other.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or "RANK" not in os.environ:
        yield None
        return
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout))
    try:
        assert dist.group.WORLD is not None
        yield Ranks(dist.group.WORLD)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(word in str(error) for word in LOST):
            reason = str(error).splitlines()[0]
            raise ConnectionError(f"another process is gone or did not answer for {timeout:g} s ({reason})") from error
        raise
    finally:
        dist.destroy_process_group()


def divided(costs: Sequence[float], ranks: int) -> list[int]:
    """Which rank does which piece: the dearest first, each by the rank that has least to do."""
    spent, owners = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = min(range(ranks), key=spent.__getitem__)
        spent[owners[i]] += costs[i]
    return owners


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device each, about ``BUCKET`` numbers at a time."""
    kinds: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        part: list[Tensor] = []
        for tensor in same:
            if part and sum(t.numel() for t in part) + tensor.numel() > BUCKET:
                yield part
                part = []
            part.append(tensor)
        yield part


def _marked(found: list[Tensor] | None, like: list[Tensor]) -> list[Tensor]:
    """Results as flat tensors behind a one, or anything of their sizes behind a zero."""
    mark = like[0].new_full((1,), float(found is not None))
    return [mark, *(t.reshape(-1) for t in (like if found is None else found))]
