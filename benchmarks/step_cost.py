"""What one step costs, as a ratio to SGD with momentum on the same model in the same run.

MLP 13-50-1, batch 10, one weight sample, one thread. Methods take turns, a full amortisation cycle at a time, so that a
noisy machine slows all alike; CPU time is counted, and the median over rounds is shown with its quartiles.

    python benchmarks/step_cost.py [--rounds 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

import eigenoise as en

CYCLE = 200
METHODS: dict[str, Callable] = {
    "NoisyEKFAC": en.NoisyEKFAC,
    "NoisyKFAC": en.NoisyKFAC,
    "NoisyAdam": en.NoisyAdam,
    "BayesByBackprop": en.BayesByBackprop,
    "EKFAC": en.EKFAC,
    "KFAC": en.KFAC,
    "NoisyEKFAC, statistics every step, basis every 5": lambda *a, **k: en.NoisyEKFAC(
        *a, stats_every=1, eig_every=5, **k
    ),
}


def sgd_step(x, y):
    model = en.models.MLP(13, [50], 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step():
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def our_step(method, x, y):
    likelihood = en.GaussianLikelihood()
    model = en.models.MLP(13, [50], 1)
    optimizer = method(model, num_data=455, likelihood=likelihood)

    def step():
        with optimizer.sampled_params():
            optimizer.zero_grad()
            likelihood.nll(model(x), y).backward()
        optimizer.step()

    return step


def cycle_time(step) -> float:
    start = time.process_time()
    for _ in range(CYCLE):
        step()
    return (time.process_time() - start) / CYCLE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(10, 13), torch.randn(10, 1)
    steps = {"SGD": sgd_step(x, y), **{name: our_step(method, x, y) for name, method in METHODS.items()}}
    for step in steps.values():
        cycle_time(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            times[name].append(cycle_time(step))
    base = times["SGD"]
    environment = {
        "eigenoise": en.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": 1,
    }
    result: dict = {"environment": environment, "cycle": CYCLE, "rounds": args.rounds, "methods": {}}
    print(f"SGD: {1e6 * statistics.median(base):.0f} µs a step; ratios to it, median [quartiles], {args.rounds} rounds")
    for name, values in times.items():
        ratios = [value / sgd for value, sgd in zip(values, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result["methods"][name] = {
            "microseconds": 1e6 * statistics.median(values),
            "ratio": middle,
            "quartiles": [low, high],
        }
        print(f"  {name:50} {middle:5.2f}  [{low:.2f}, {high:.2f}]")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
