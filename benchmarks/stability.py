"""Train small networks for 20,000 steps on data that break optimisers, and say how each run ended.

    python benchmarks/stability.py [--steps 20000] [--method noisy-ekfac,bbb] [--trouble "constant inputs"] [--no-guard]
    python benchmarks/stability.py --show

Every method, λ in 1, 0.1, 0.01 and step sizes of 0.1, 0.01, 0.001, otherwise at its defaults, in float32, on five kinds
of trouble: dead ReLUs, constant inputs, collinear inputs, duplicate examples, and all at once with classes and an input
that is always 1,000. The means, and a sample of the posterior at the end, are looked at for NaN. A run ends in one of
these ways:

- learned: its last 1,000 losses are below the best constant guess's;
- no better than a guess: they are not; of these, "warned" says how many were told so by a warning;
- stopped: an error said that the settings are hopeless;
- NaN: one got into the means. There must be none.

Runs that are done are not done again; results are kept in benchmarks/results/stability.json.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import eigenoise as en
from eigenoise import checks, storage
from eigenoise.reporting.progress import watching
from eigenoise.studies.runner import environment

OUT = Path(__file__).parent / "results" / "stability.json"
METHODS: dict[str, Any] = {
    "noisy-ekfac": en.NoisyEKFAC,
    "noisy-kfac": en.NoisyKFAC,
    "noisy-adam": en.NoisyAdam,
    "bbb": en.BayesByBackprop,
    "ekfac": en.EKFAC,
    "kfac": en.KFAC,
}
WITHOUT_NOISE = ("ekfac", "kfac")  # run on all troubles at once only
ALL = "all at once, classes"
TROUBLES = ("dead ReLUs", "constant inputs", "collinear inputs", "duplicate examples", ALL)
WEIGHTS = (1.0, 0.1, 0.01)
RATES = (0.001, 0.01, 0.1)
N, INPUTS, HIDDEN, CLASSES, BATCH = 256, 8, 32, 3, 32
LOOK = 100  # steps between looks at the means
LAST = 1000


def data(trouble: str) -> tuple[Tensor, Tensor, float]:
    """Inputs, targets, and the loss of the best constant guess."""
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(N, INPUTS, generator=chance)
    if trouble in ("collinear inputs", ALL):
        x[:, 4:6] = x[:, :2] - 2 * x[:, 2:4]
    if trouble in ("constant inputs", ALL):
        x[:, 6], x[:, 7] = 0.0, 1000.0 if trouble == ALL else 1.0
    signal = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]
    y = signal + 0.1 * torch.randn(N, generator=chance)
    if trouble in ("duplicate examples", ALL):
        x, y = x[:BATCH].repeat(N // BATCH, 1), y[:BATCH].repeat(N // BATCH)
    if trouble == ALL:
        labels = torch.bucketize(y, torch.tensor([-0.5, 0.5]))
        shares = torch.bincount(labels, minlength=CLASSES) / N
        return x, labels, -float((shares * shares.log()).sum())
    y = (y - y.mean()) / y.std()
    return x, y[:, None], 0.5 * (1 + math.log(2 * math.pi))


def network(trouble: str) -> nn.Module:
    """With half of the hidden units dead, if that is the trouble."""
    torch.manual_seed(0)
    outputs = CLASSES if trouble == ALL else 1
    first, second = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(HIDDEN, outputs))
    if trouble in ("dead ReLUs", ALL):
        with torch.no_grad():
            for layer in (first, second):
                layer.bias[: HIDDEN // 2] = -1e5 if trouble == ALL else -100.0
    return model


def healthy(model: nn.Module, opt: Any, x: Tensor) -> bool:
    """Whether weights and what a sampled network says of ``x`` are numbers."""
    if not checks.all_finite(model.parameters()):
        return False
    with torch.no_grad(), opt.posterior.sampled_params(model, torch.Generator().manual_seed(0)):
        return checks.all_finite([*model.parameters(), model(x)])


def train(method: str, trouble: str, kl_weight: float, lr: float, steps: int, guard: bool = True) -> dict[str, Any]:
    """One run and how it ended."""
    x, y, guess = data(trouble)
    model = network(trouble)
    likelihood = en.CategoricalLikelihood() if trouble == ALL else en.GaussianLikelihood()
    generator = torch.Generator().manual_seed(1)
    options = {"lr": lr, "kl_weight": kl_weight, "generator": generator}
    if not guard:
        options["guard"] = False
    opt = METHODS[method](model, num_data=N, likelihood=likelihood, **options)
    order = torch.Generator().manual_seed(2)
    losses: list[float] = []
    result: dict[str, Any] = {"guess": guess}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for step in range(steps):
                rows = torch.randint(N, (BATCH,), generator=order)
                with opt.sampled_params():
                    opt.zero_grad()
                    loss = likelihood.nll(model(x[rows]), y[rows])
                    loss.backward()
                opt.step()
                losses.append(loss.item())
                if step % LOOK == LOOK - 1 and not checks.all_finite(model.parameters()):
                    return result | {"end": "NaN", "step": step}
            if not healthy(model, opt, x):
                return result | {"end": "NaN", "step": steps}
        except FloatingPointError as error:
            kept = checks.all_finite(model.parameters())
            return result | {"end": "stopped" if kept else "NaN", "step": opt.steps, "error": str(error)}
        finally:
            result["warnings"] = sorted({str(each.message) for each in said})
    last = sum(losses[-LAST:]) / len(losses[-LAST:])
    return result | {"end": "learned" if last < guess else "no better than a guess", "loss": last, "worst": max(losses)}


def wanted(methods: list[str], troubles: list[str]) -> Iterator[tuple[str, str, float, float]]:
    for trouble in troubles:
        for method in methods:
            if method not in WITHOUT_NOISE or trouble == ALL:
                yield from ((method, trouble, kl_weight, lr) for kl_weight in WEIGHTS for lr in RATES)


def ends(runs: dict[str, Any], method: str) -> list[tuple[int, int]]:
    """For each kind of trouble how many runs of a method learned, and how many there are; empty if there are none."""
    found = [
        [run["end"] for key, run in runs.items() if json.loads(key)[:2] == [trouble, method]] for trouble in TROUBLES
    ]
    return [(each.count("learned"), len(each)) for each in found] if any(found) else []


def show(runs: dict[str, Any]) -> None:
    """How runs ended, by method and trouble."""
    ends = ("learned", "no better than a guess", "warned", "stopped", "NaN")
    print(f"{'trouble':22} {'method':12} " + " ".join(f"{end:>12.12}" for end in ends))
    groups: dict[tuple[str, str], Counter] = {}
    for key, run in runs.items():
        trouble, method, *_ = json.loads(key)
        groups.setdefault((trouble, method), Counter()).update([run["end"], *["warned"] * bool(run["warnings"])])
    for (trouble, method), counts in groups.items():
        print(f"{trouble:22} {method:12} " + " ".join(f"{counts[end]:12}" for end in ends))
    total = sum(groups.values(), Counter())
    print(f"{'together':35} " + " ".join(f"{total[end]:12}" for end in ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--method", default=",".join(METHODS))
    parser.add_argument("--trouble", default=";".join(TROUBLES), help="separated by semicolons")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--no-guard", action="store_true", help="natural gradients as the paper has them")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    kept: dict[str, Any] = {"steps": args.steps, "runs": {}, "unguarded": {}, "environment": environment()}
    if args.out.exists():
        kept = json.loads(args.out.read_text())
    if not args.show:
        if kept["steps"] != args.steps:
            parser.error(f"{args.out} has runs of {kept['steps']} steps: give another --out")
        torch.set_num_threads(1)
        methods = [name for name in args.method.split(",") if not (args.no_guard and name == "bbb")]  # which has none
        todo = list(wanted(methods, args.trouble.split(";")))
        found = kept["unguarded" if args.no_guard else "runs"]
        with watching() as watch:
            task = watch.task("runs", len(todo))
            for done, (method, trouble, kl_weight, lr) in enumerate(todo):
                key = json.dumps([trouble, method, kl_weight, lr])
                if key not in found:
                    found[key] = train(method, trouble, kl_weight, lr, args.steps, not args.no_guard)
                    storage.write_json(args.out, kept)
                task.to(done + 1, f"{key}: {found[key]['end']}")
            task.end()
    show(kept["runs"])
    if kept["unguarded"]:
        print("\nwithout the guard")
        show(kept["unguarded"])


if __name__ == "__main__":
    main()
