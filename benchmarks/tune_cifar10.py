"""Choose λ and the step size for each method and setting of the classification study, on held-out training images.

Every candidate trains a network of a quarter of the paper's width on 10,000 images and is tested on 5,000 others of the
training set; the best log-likelihood wins. Test images are not used.

    python benchmarks/tune_cifar10.py [--data FOLDER] [--method noisy-ekfac,sgd] [--setting D+B] [--steps 300]

What was done before is not done again. In the end all candidates are listed, the best of each cell marked.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eigenoise import atomic
from eigenoise.runs import finished
from eigenoise.vision.recipes import SETTINGS, Setting
from eigenoise.vision.study import FORMAT, Run, run_cifar10

OUT = Path(__file__).parent / "results" / "cifar10_tuning"
POINT = [{"lr": lr} for lr in (0.02, 0.05, 0.1)]
NATURAL = [{"lr": lr} for lr in (0.01, 0.03, 0.1)]
NOISY = [{"lr": lr, "kl_weight": weight} for lr, weight in itertools.product((0.03, 0.1), (0.03, 0.1, 0.3))]
CANDIDATES = {"sgd": POINT, "kfac": NATURAL, "noisy-kfac": NOISY, "noisy-ekfac": NOISY}


def label(options: dict) -> str:
    return "-".join(f"{name}={value}" for name, value in options.items())


def run_of(method: str, setting: Setting, options: dict, steps: int) -> Run:
    return Run(method, setting, steps, train_size=10_000, samples=5, width=0.25, validate=True, options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--method", default=",".join(CANDIDATES))
    parser.add_argument("--setting", default=",".join(setting.name for setting in SETTINGS))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = [setting for setting in SETTINGS if setting.name in args.setting.split(",")]
    wanted = [(m, s, c) for m in args.method.split(",") for s in settings for c in CANDIDATES[m]]
    columns = (TextColumn("{task.description:50}"), BarColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        total = progress.add_task("all", total=len(wanted), now="")
        for method, setting, options in wanted:
            task = progress.add_task(f"{method} {setting.name} {label(options)}", total=args.steps, now="")
            folder = atomic.folder(OUT / label(options))

            def advance(training, task=task):
                progress.update(task, completed=len(training.curve), now=f"loss {training.curve[-1][0]:.3f}")

            try:
                run_cifar10(
                    run_of(method, setting, options, args.steps), folder, args.data, resume=True, on_step=advance
                )
            except FloatingPointError as error:
                progress.console.print(f"{method} {setting.name} {label(options)}: {error}")
            progress.remove_task(task)
            progress.advance(total)
    for method, setting in dict.fromkeys((m, s) for m, s, _ in wanted):
        show_candidates(method, setting, args.steps)


def show_candidates(method: str, setting: Setting, steps: int) -> None:
    """Held-out log-likelihoods; the scores are of averaged samples where there are some."""
    found = {}
    for options in CANDIDATES[method]:
        run = run_of(method, setting, options, steps)
        result = finished(OUT / label(options) / f"{run.name}.json", run.settings(), FORMAT)
        if result is not None:
            scores = result["scores"].get("samples", result["scores"]["mean"])
            found[label(options)] = (-scores["nll"], scores["accuracy"])
    best = max(found, default=None, key=lambda name: found[name][0])
    for name, (likelihood, accuracy) in found.items():
        mark = "  <- best" if name == best else ""
        print(f"{method:12} {setting.name:6} {name:28} {likelihood:.4f}  {accuracy:.1%}{mark}")


if __name__ == "__main__":
    main()
