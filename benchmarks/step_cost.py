"""What one step costs, as a ratio to SGD with momentum on the same model in the same run.

MLP 13-50-1, batch 10, one thread: one model with one weight sample a step, and ten models at once as the regression
study trains them, for which the cost is that of one of the ten. Methods take turns, a full amortisation cycle at a
time, so that a noisy machine slows all alike; CPU time is counted, and the median over rounds is shown with its
quartiles.

    python benchmarks/step_cost.py [--rounds 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

import eigenoise as en
from eigenoise import figures
from eigenoise.data import Splits
from eigenoise.experiments import environment
from eigenoise.presets import PRESETS
from eigenoise.trial import Trial

CYCLE = 200
SPLITS = 10
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


def study_step(preset, method):
    """Ten splits of Boston's size at once, by the regression study's own recipe."""
    recipe = PRESETS[preset].recipe("boston", method)
    data = torch.randn(SPLITS, 10, 13), torch.randn(SPLITS, 10, 1)
    splits = Splits(*data, *data, torch.zeros(SPLITS, 1, 1), torch.ones(SPLITS, 1, 1))
    trial = Trial(recipe, method, splits, hidden=50, batch_size=10)
    trial.optimizer.param_groups[0]["num_data"] = 455
    x, y = data

    def step():
        trial.optimizer.zero_grad()
        with trial.optimizer.sampled_params():
            trial.optimizer.likelihood.nll(trial.model(x), y).backward()
        trial.optimizer.step()

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
    study = {
        f"{figures.LABELS[method]}, preset {preset}, one of {SPLITS} splits": study_step(preset, method)
        for preset in ("paper", "best")
        for method in figures.LABELS
    }
    steps |= study
    for step in steps.values():
        cycle_time(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            times[name].append(cycle_time(step) / (SPLITS if name in study else 1))
    base = times["SGD"]
    result: dict = {"environment": environment(), "cycle": CYCLE, "rounds": args.rounds, "methods": {}}
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
