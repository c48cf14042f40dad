"""How much weight noise a gradient carries: one sample for the batch, a mirrored pair, or noise for every example.

A network 13-50-1 is trained on Boston housing by noisy EK-FAC; then its posterior is held and the gradient of one batch
is computed over and over. Shown is the variance over weight noise, summed over all weights, relative to one shared
sample, and the same times what a step costs, as equal cost demands: a method with half the variance at twice the
cost gains nothing.

    python benchmarks/gradient_noise.py [--draws 400] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import eigenoise as en
from eigenoise.studies import data
from eigenoise.studies.runner import environment

EPOCHS = (1, 20, 100)
BATCHES = (10, 100, 455)
WAYS = {
    "shared": {"noise": "shared"},
    "mirrored pair": {"noise": "shared", "samples": 2, "antithetic": True},
    "per-example": {"noise": "per-example"},
}


def trained(x, y, epochs):
    torch.manual_seed(0)
    model, likelihood = en.models.MLP(13, [50], 1), en.GaussianLikelihood()
    opt = en.NoisyEKFAC(model, num_data=len(x), likelihood=likelihood, lr=0.01, start="init")
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(10):
            step(opt, x[rows], y[rows])
    return opt


def step(opt, x, y):
    opt.zero_grad()
    for _ in range(opt.blocks_per_step):
        with opt.sampled_params():
            opt.likelihood.nll(opt.model(x), y).backward()
    opt.step()


def like(opt, **options):
    """An optimiser of the same posterior that never takes statistics again."""
    model = en.models.MLP(13, [50], 1)
    model.load_state_dict(opt.model.state_dict())
    twin = en.NoisyEKFAC(
        model,
        num_data=opt.param_groups[0]["num_data"],
        likelihood=en.GaussianLikelihood(),
        lr=0.0,
        stats_every=10**9,
        refresh_every=10**9,
        start="init",
        **options,
    )
    for slot, old in zip(twin.slots, opt.slots, strict=True):
        for name, tensor in slot.fisher.state().items():
            tensor.copy_(old.fisher.state()[name])
        slot.fisher.forget_cache()
    twin.likelihood.load_state_dict(opt.likelihood.state_dict())
    twin.steps = 1
    return twin


def gradient(opt, x, y):
    """The mean over the samples of a step, in the Fisher's basis or not, which leaves the variance as it is."""
    opt.zero_grad()
    for _ in range(opt.blocks_per_step):
        with opt.sampled_params():
            opt.likelihood.nll(opt.model(x), y).backward()
    found = torch.cat([p.grad.flatten() for p in opt.params]) / opt.blocks_per_step
    opt._forget()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = data.boston()
    x, y = (torch.tensor(part, dtype=torch.float32) for part in (table.x, table.y[:, None]))
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    result: dict = {"environment": environment(), "draws": args.draws, "rows": []}
    print("epochs  batch  way             variance  cost  variance × cost")
    for epochs in EPOCHS:
        opt = trained(x[:455], y[:455], epochs)
        for batch in BATCHES:
            twins = {name: like(opt, **options) for name, options in WAYS.items()}
            found: dict = {name: [] for name in WAYS}
            seconds: dict = {name: [] for name in WAYS}
            for _ in range(args.draws):
                for name, twin in twins.items():
                    began = time.process_time()
                    found[name].append(gradient(twin, x[:batch], y[:batch]))
                    seconds[name].append(time.process_time() - began)
            base = torch.stack(found["shared"]).var(0).sum()
            for name in WAYS:
                variance = float(torch.stack(found[name]).var(0).sum() / base)
                cost = statistics.median(seconds[name]) / statistics.median(seconds["shared"])
                row = {"epochs": epochs, "batch": batch, "way": name, "variance": variance, "cost": cost}
                result["rows"].append(row)
                print(f"{epochs:6}  {batch:5}  {name:14}  {variance:8.3f}  {cost:4.2f}  {variance * cost:8.3f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
