"""What noisy EK-FAC keeps, sends and decomposes, by layer and process, for networks that are too large for one machine.

    python benchmarks/cost_model.py [--measure]

The formulas need only a layer's numbers of outputs p and inputs n. They are checked against the half-width VGG16, which
benchmarks/processes.py has run in 1, 2 and 4 processes: numbers kept and sent are compared with those counted there,
and the time of every kind of step in several processes is foretold from that in one. For that, --measure times
decompositions and all-reduces on idle cores and writes benchmarks/results/cost_model.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from eigenoise import linalg, storage
from eigenoise.models import VGG16
from eigenoise.optim.decomposition_schedule import turns
from eigenoise.parallel.ranks import divided
from eigenoise.studies.runner import environment

RESULTS = Path(__file__).parent / "results"
OUT = RESULTS / "cost_model.json"
STATS_EVERY, EIG_EVERY = 10, 200
SIZES = (256, 512, 1024, 2048)  # of matrices that are decomposed
CORES = 2


@dataclass(frozen=True)
class Layer:
    """``count`` layers of ``p`` outputs and ``n`` inputs, bias included; ``diagonal`` if they have no basis."""

    name: str
    p: int
    n: int
    count: int = 1
    diagonal: bool = False

    @property
    def weights(self) -> int:
        """Numbers in the layer's matrix."""
        return self.p * self.n

    @property
    def squares(self) -> int:
        """Numbers in A and S, or in their bases."""
        return 0 if self.diagonal else self.p**2 + self.n**2

    @property
    def kept(self) -> int:
        """Numbers: weight, its gradient, mean, sample, gradient, momentum, R, its inverse and root; A, S, bases."""
        return 9 * self.weights + 2 * self.squares

    @property
    def reduced(self) -> float:
        """Numbers all-reduced in a step, beside the gradient: the sample, and every so often the statistics."""
        return self.weights + (self.weights + self.squares) / STATS_EVERY

    @property
    def broadcast(self) -> float:
        """Numbers broadcast in a step: every so often bases and eigenvalues."""
        return 0.0 if self.diagonal else (self.squares + self.p + self.n) / EIG_EVERY

    @property
    def cubes(self) -> float:
        """What its decompositions cost."""
        return 0.0 if self.diagonal else float(self.p) ** 3 + float(self.n) ** 3


@dataclass(frozen=True)
class Network:
    """Layers by name."""

    name: str
    layers: tuple[Layer, ...]

    def total(self, of: Callable[[Layer], float]) -> float:
        """The sum over all layers."""
        return sum(layer.count * of(layer) for layer in self.layers)

    def each(self) -> list[Layer]:
        """One entry for each layer."""
        return [layer for layer in self.layers for _ in range(layer.count)]


def vgg16() -> Network:
    """As the model itself has it."""
    modules = [(name, m) for name, m in VGG16(width=0.5).named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    layers = [Layer(name, m.weight.shape[0], m.weight[0].numel() + (m.bias is not None)) for name, m in modules]
    return Network("half-width VGG16", tuple(layers))


def resnet50() -> Network:
    """Convolutions without biases; batch norm's scales and shifts are too few to matter."""
    layers = [Layer("stem 7×7", 64, 3 * 49)]
    inputs = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        layers += [
            Layer(f"stage {stage}: 1×1, first", width, inputs),
            Layer(f"stage {stage}: 1×1, others", width, 4 * width, blocks - 1),
            Layer(f"stage {stage}: 3×3", width, 9 * width, blocks),
            Layer(f"stage {stage}: 1×1, out", 4 * width, width, blocks),
            Layer(f"stage {stage}: 1×1, beside", 4 * width, inputs),
        ]
        inputs = 4 * width
    return Network("ResNet-50", (*layers, Layer("classes", 1000, 2049)))


def transformer(name: str, width: int, depth: int, *more: Layer) -> Network:
    layers = (
        Layer("query, key, value", 3 * width, width + 1, depth),
        Layer("attention out", width, width + 1, depth),
        Layer("wide in", 4 * width, width + 1, depth),
        Layer("wide out", width, 4 * width + 1, depth),
    )
    return Network(name, (*layers, *more))


VIT = transformer("ViT-B/16", 768, 12, Layer("patches 16×16", 768, 769), Layer("classes", 1000, 769))
BILLION = transformer(
    "transformer of 1.0 billion",
    2048,
    16,
    Layer("embedding, diagonal", 50304, 2048, diagonal=True),
    Layer("words out, diagonal", 50304, 2048, diagonal=True),
)


def busiest(layers: Sequence[Layer], ranks: int) -> tuple[float, float]:
    """n³ of all decompositions of a cycle along the busiest process of each turn, and of the longest turn."""
    costs = [layer.cubes for layer in layers]
    spent = []
    for places in turns(costs, EIG_EVERY, (STATS_EVERY,), ranks).values():
        own = [costs[i] for i in places]
        owners = divided(own, ranks)
        spent.append(
            max((sum(c for c, o in zip(own, owners, strict=True) if o == r) for r in range(ranks)), default=0.0)
        )
    return sum(spent), max(spent)


# Measuring.


def _reduce(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", count), rank=rank, world_size=count)
    found = {}
    numbers = torch.ones(1 << 22)
    for name, call in (("all_reduce", dist.all_reduce), ("broadcast", lambda x: dist.broadcast(x, 0))):
        times = []
        for _ in range(12):
            dist.barrier()
            start = time.perf_counter()
            call(numbers)
            times.append((time.perf_counter() - start) / numbers.numel())
        found[name] = statistics.median(times[2:])
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure() -> dict:
    """Seconds for each k³ of a decomposition by size, and for each number of an all-reduce or a broadcast."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    by_size = {}
    for size in SIZES:
        rows = torch.randn(2 * size, size) * torch.logspace(0, -3, size)
        moments = rows.mT @ rows / len(rows)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            linalg.eigh_psd(moments)
            times.append(time.perf_counter() - start)
        by_size[size] = min(times) / size**3
    sent = {}
    for count in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_reduce, (count, folder), nprocs=count)
            sent[count] = json.loads(Path(folder, "found").read_text())
    return {"per_cube": by_size, "per_number": sent, "environment": environment()}


def seconds_of(cubes: float, measured: dict) -> float:
    """For decompositions on one core, at the rate of the largest that was measured."""
    return cubes * measured["per_cube"][str(SIZES[-1])]


# Showing.


def show_check(measured: dict) -> None:
    """Foretold against counted and timed."""
    network, found = vgg16(), json.loads((RESULTS / "processes.json").read_text())
    two = found["together"]["2"]
    counted = {**two["sent"], "kept": found["together"]["1"]["kept"]}
    print(f"{network.name}: millions of numbers, foretold and counted")
    for what, words in (
        ("all_reduce", "all-reduced in a step"),
        ("broadcast", "broadcast in a step"),
        ("kept", "kept"),
    ):
        print(f"  {words:22} {two['expected'][what] / 1e6:8.2f} {counted[what] / 1e6:8.2f}")
    print("\nseconds of a step, foretold from one process and timed")
    one = found["together"]["1"]["kinds"]
    for count, own in found["together"].items():
        if count == "1":
            continue
        print(f"  {count} processes on {CORES} cores")
        for kind, guess in foretold(network, one, int(count), measured).items():
            print(f"    {kind:22} {guess:6.2f} {_timed(own['kinds'], kind):6.2f}")


def _timed(kinds: dict, kind: str) -> float:
    """Mean of a cycle, or of the steps of a kind; bases are those alone, all together."""
    if kind == "mean of a cycle":
        return sum(share * seconds for share, seconds in kinds.values())
    if kind == "all bases of a cycle":
        plain, with_statistics = kinds["plain"][1], kinds["statistics"][1]
        return sum(s - (with_statistics if "statistics" in k else plain) for k, (_, s) in kinds.items() if "basis" in k)
    return kinds[kind][1]


def foretold(network: Network, one: dict, ranks: int, measured: dict) -> dict[str, float]:
    """Seconds by kind of step, from those in one process: cores are shared, decompositions divided, numbers sent."""
    rates = measured["per_number"][str(ranks)]
    crowd = max(1.0, ranks / CORES)
    weights = network.total(lambda x: x.weights)
    plain = one["plain"][1] * crowd + 2 * weights * rates["all_reduce"]
    sums = network.total(lambda x: x.weights + x.squares)
    statistics_ = one["statistics"][1] * crowd + (2 * weights + sums) * rates["all_reduce"]
    alone, divided_ = busiest(network.each(), 1)[0], busiest(network.each(), ranks)[0]
    sent = network.total(lambda x: EIG_EVERY * x.broadcast) * rates["broadcast"]
    bases = _timed(one, "all bases of a cycle") * crowd * divided_ / alone + sent
    share = 1 / STATS_EVERY
    mean = (1 - share) * plain + share * statistics_ + bases / EIG_EVERY
    return {"plain": plain, "statistics": statistics_, "all bases of a cycle": bases, "mean of a cycle": mean}


def show(network: Network, measured: dict) -> None:
    """By layer, and together; decompositions by processes."""
    print(f"\n{network.name}: {network.total(lambda x: x.weights) / 1e6:,.0f} million weights")
    print(f"  {'layer':24} {'count':>5} {'p':>6} {'n':>6} {'kept MB':>9} {'sent MB/step':>12} {'decomposed s':>12}")
    for layer in network.layers:
        sent = 4e-6 * (layer.weights + layer.reduced + layer.broadcast)
        print(
            f"  {layer.name:24} {layer.count:5} {layer.p:6} {layer.n:6} {4e-6 * layer.kept:9,.1f} "
            f"{sent:12,.1f} {seconds_of(layer.cubes, measured):12,.2f}"
        )
    kept = 4e-9 * network.total(lambda x: x.kept)
    gradient = 4e-9 * network.total(lambda x: x.weights)
    sent = 4e-9 * network.total(lambda x: x.weights + x.reduced + x.broadcast)
    print(
        f"  together: {kept:.2f} GB kept by each process; {sent:.2f} GB sent in a step, {gradient:.2f} of them gradient"
    )
    for ranks in (1, 2, 4, 8, 64):
        whole, longest = busiest(network.each(), ranks)
        whole, longest = seconds_of(whole, measured), seconds_of(longest, measured)
        print(
            f"  {ranks:3} processes: decomposing takes {whole:9,.1f} s in a cycle, {whole / EIG_EVERY:7.2f} s a step; "
            f"the longest turn {longest:7.1f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        storage.write_json(OUT, measure())
    measured = json.loads(OUT.read_text())
    show_check(measured)
    for network in (resnet50(), VIT, BILLION):
        show(network, measured)


if __name__ == "__main__":
    main()
