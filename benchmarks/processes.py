"""Noisy EK-FAC on the half-width VGG16 in 1, 2 and 4 processes: images a second, numbers sent, memory of each.

    python benchmarks/processes.py [--counts 1,2,4] [--rounds 3] [--show]

Every process has one thread and a batch of 128 random images. Steps of each kind (plain, with statistics, with a new
basis) are timed by the clock and weighed by how often they come in a cycle of 200. Beside it, as what the machine
allows: as many processes that do the same steps and know nothing of each other. What is kept and sent is
counted, and compared with the formulas of cost_model.py. Results are written to benchmarks/results/processes.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cost_model import vgg16
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import eigenoise as en
from eigenoise import storage
from eigenoise.studies.bench.cases import CASES
from eigenoise.studies.bench.measure import warm_up
from eigenoise.studies.bench.steps import default_arguments, training_stepper
from eigenoise.studies.runner import environment

OUT = Path(__file__).parent / "results" / "processes.json"


class Counted:
    """Counts the numbers that this process gives to all-reduces and broadcasts of ours."""

    def __init__(self) -> None:
        self.sent = {"all_reduce": 0, "broadcast": 0}
        for name in self.sent:
            setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name: str, real: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.sent[name] += tensor.numel()
            return real(tensor, *args, **options)

        return call


def kept() -> int:
    """Bytes of all tensors that are alive."""
    with torch._C.DisableTorchFunctionSubclass():  # a parameter that is looked at would be worked out
        storages = [each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def work(rank: int, count: int, together: bool, rounds: int, folder: str) -> None:
    """What each process does; its results are a file in ``folder``."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    torch.manual_seed(0)
    case = CASES["c"]()
    before_all = kept()
    model: nn.Module = case.make()
    layers = vgg16()
    if together and count > 1:
        model = DistributedDataParallel(model)
    counted = Counted()
    settings = {**default_arguments("noisy-ekfac"), **case.options}
    opt = en.NoisyEKFAC(model, num_data=case.num_data, likelihood=en.CategoricalLikelihood(), **settings)
    stepper = training_stepper(opt, model, case.x, case.y)
    warm_up(stepper)
    seconds: dict[str, list[float]] = {}
    sent: dict[str, dict[str, int]] = {}
    for _ in range(rounds):
        for kind, (place, _) in stepper.kinds().items():
            for _ in range(2 if kind == "plain" else 1):
                dist.barrier()
                stepper.seek(place)
                before, start = dict(counted.sent), time.perf_counter()
                stepper.step()
                seconds.setdefault(kind, []).append(time.perf_counter() - start)
                sent[kind] = {name: counted.sent[name] - before[name] for name in before}
    stepper.step()
    numbers = (kept() - before_all) / 4
    shares = {kind: share for kind, (_, share) in stepper.kinds().items()}
    content = {
        "seconds": sum(shares[kind] * statistics.median(seconds[kind]) for kind in shares),
        "kinds": {kind: [shares[kind], statistics.median(seconds[kind])] for kind in shares},
        "sent": {name: sum(shares[k] * sent[k][name] for k in shares) for name in counted.sent},
        "expected": {
            "all_reduce": layers.total(lambda x: x.reduced),
            "broadcast": layers.total(lambda x: x.broadcast),
            "kept": layers.total(lambda x: x.kept),
        },
        "kept": numbers,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "batch": len(case.x),
    }
    Path(folder, f"rank {rank}.json").write_text(json.dumps(content))
    dist.barrier()
    dist.destroy_process_group()


def measured(count: int, together: bool, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (count, together, rounds, folder), nprocs=count)
        ranks = [json.loads(Path(folder, f"rank {rank}.json").read_text()) for rank in range(count)]
    slowest = max(ranks, key=lambda each: each["seconds"])
    images = sum(each["batch"] / each["seconds"] for each in ranks) if not together else 0.0
    return {
        "images_per_second": images or count * slowest["batch"] / slowest["seconds"],
        "seconds": slowest["seconds"],
        "kinds": slowest["kinds"],
        "sent": slowest["sent"],
        "expected": slowest["expected"],
        "kept": slowest["kept"],
        "peak_mb": max(each["peak_mb"] for each in ranks),
    }


def show(results: dict[str, Any]) -> None:
    one = results["together"]["1"]["images_per_second"]
    heads = f"{'processes':>9} {'images/s':>9} {'times one':>10} {'apart':>10} {'MB each':>8}"
    print(f"{heads}  all-reduced, broadcast (millions)")
    for count, own in results["together"].items():
        apart = results["apart"].get(count, {}).get("images_per_second", one)
        sent = ", ".join(f"{own['sent'][name] / 1e6:.1f} of {own['expected'][name] / 1e6:.1f}" for name in own["sent"])
        print(
            f"{count:>9} {own['images_per_second']:9.1f} {own['images_per_second'] / one:10.2f} {apart / one:10.2f} "
            f"{own['peak_mb']:8.0f}  {sent if count != '1' else ''}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    if not args.show:
        counts = [int(word) for word in args.counts.split(",")]
        todo = [(count, together) for count in counts for together in (True, False) if count > 1 or together]
        found: dict[str, Any] = {"together": {}, "apart": {}}
        for count, together in track(todo, "processes"):
            found["together" if together else "apart"][str(count)] = measured(count, together, args.rounds)
            storage.write_json(OUT, {**found, "environment": environment()})
    show(json.loads(OUT.read_text()))


if __name__ == "__main__":
    main()
