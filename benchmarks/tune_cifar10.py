"""Choose λ and the step size for each method and setting of the classification study, on held-out training images.

Every candidate trains a network of a quarter of VGG16's width on 5,000 images and is tested on 5,000 others of the
training set; the best log-likelihood wins. Where settings did not carry over to the study's network, which is twice as
wide, they are chosen again there, and rivals are offered the same. Test images are not used.

    python benchmarks/tune_cifar10.py [--data FOLDER] [--method noisy-ekfac,sgd] [--setting D+B]

What was done before is not done again. In the end all candidates are listed, the best of each cell marked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eigenoise import storage
from eigenoise.studies.classification.study import Run, run_cifar10
from eigenoise.studies.recipes import SETTINGS, Setting

STEPS = 400
WIDTH, STUDY_WIDTH = 0.25, 0.5
METHODS = ("sgd", "kfac", "noisy-kfac", "noisy-ekfac")
OUT = Path(__file__).parent / "results" / "cifar10_tuning"
TRIED = {  # step size, λ and η
    "sgd": {
        "plain": [(0.005, 0.3, 0.1), (0.01, 0.3, 0.01), (0.01, 0.3, 0.1), (0.02, 0.3, 0.1), (0.05, 0.3, 0.1)],
        "D": [(0.005, 0.1, 0.1), (0.01, 0.1, 0.1), (0.02, 0.1, 0.01), (0.02, 0.1, 0.1), (0.05, 0.1, 0.1)],
        "B": [(0.01, 0.3, 1.0), (0.02, 0.3, 1.0), (0.05, 0.3, 0.1), (0.05, 0.3, 1.0), (0.1, 0.3, 1.0)],
        "D+B": [(0.01, 0.1, 1.0), (0.02, 0.1, 0.1), (0.02, 0.1, 1.0), (0.05, 0.1, 1.0), (0.1, 0.1, 1.0)],
    },
    "kfac": {
        "plain": [(0.01, 0.3, 0.1), (0.03, 0.3, 0.001), (0.03, 0.3, 0.01), (0.03, 0.3, 0.1), (0.1, 0.3, 0.1)],
        "D": [(0.01, 0.1, 0.1), (0.03, 0.1, 0.01), (0.03, 0.1, 0.1), (0.1, 0.1, 0.1)],
        "B": [(0.01, 0.3, 1.0), (0.03, 0.3, 0.1), (0.03, 0.3, 1.0), (0.1, 0.3, 1.0), (0.3, 0.3, 1.0), (1.0, 0.3, 1.0)],
        "D+B": [
            (0.01, 0.1, 1.0),
            (0.03, 0.1, 0.1),
            (0.03, 0.1, 1.0),
            (0.1, 0.1, 1.0),
            (0.3, 0.1, 1.0),
            (1.0, 0.1, 1.0),
        ],
    },
    "noisy-kfac": {
        "plain": [(0.03, 0.0003, 0.1), (0.03, 0.001, 0.1), (0.03, 0.003, 0.01), (0.03, 0.003, 0.1), (0.03, 0.01, 0.1)],
        "D": [(0.03, 0.0001, 0.1), (0.03, 0.0003, 0.01), (0.03, 0.0003, 0.1), (0.03, 0.001, 0.1), (0.03, 0.003, 0.1)],
        "B": [
            (0.03, 0.01, 1.0),
            (0.03, 0.03, 1.0),
            (0.1, 0.03, 1.0),
            (0.3, 0.03, 1.0),
            (0.3, 0.1, 1.0),
            (1.0, 0.1, 1.0),
        ],
        "D+B": [
            (0.03, 0.001, 1.0),
            (0.03, 0.003, 1.0),
            (0.03, 0.01, 1.0),
            (0.1, 0.003, 1.0),
            (0.3, 0.003, 1.0),
            (0.3, 0.01, 1.0),
            (1.0, 0.003, 1.0),
        ],
    },
    "noisy-ekfac": {
        "plain": [(0.03, 0.001, 0.1), (0.03, 0.03, 0.1), (0.03, 0.1, 0.01), (0.03, 0.1, 0.1), (0.03, 0.3, 0.1)],
        "D": [
            (0.01, 0.001, 0.1),
            (0.03, 0.003, 0.1),
            (0.03, 0.01, 0.01),
            (0.03, 0.01, 0.1),
            (0.03, 0.03, 0.1),
            (0.1, 0.01, 0.1),
        ],
        "B": [(0.03, 0.1, 1.0), (0.03, 0.3, 1.0), (0.1, 0.3, 1.0), (0.3, 0.3, 1.0), (0.3, 1.0, 1.0), (1.0, 0.3, 1.0)],
        "D+B": [
            (0.03, 0.01, 1.0),
            (0.03, 0.03, 1.0),
            (0.03, 0.1, 1.0),
            (0.1, 0.03, 1.0),
            (0.3, 0.03, 1.0),
            (0.3, 0.1, 1.0),
            (1.0, 0.03, 1.0),
        ],
    },
}
WIDE = {  # the same for networks of the study's width: where there are any, the best of these is chosen
    "sgd": {
        "B": [(0.01, 0.3, 1.0), (0.02, 0.3, 0.1), (0.02, 0.3, 1.0), (0.05, 0.3, 1.0)],
        "D+B": [(0.01, 0.1, 0.1), (0.02, 0.1, 0.1)],
    },
    "kfac": {"plain": [(0.03, 0.1, 0.001), (0.03, 0.3, 0.01)], "D": [(0.03, 0.03, 0.001), (0.03, 0.1, 0.01)]},
    "noisy-kfac": {
        "plain": [
            (0.03, 0.001, 0.001),
            (0.03, 0.003, 0.001),
            (0.03, 0.003, 0.01),
            (0.03, 0.01, 0.001),
            (0.03, 0.03, 0.001),
            (0.03, 0.1, 0.001),
        ],
        "D": [(0.03, 0.001, 0.001), (0.03, 0.003, 0.001), (0.03, 0.01, 0.001), (0.03, 0.03, 0.001)],
    },
    "noisy-ekfac": {
        "plain": [(0.03, 0.03, 0.001), (0.03, 0.03, 0.003), (0.03, 0.03, 0.01), (0.03, 0.1, 0.001), (0.03, 0.1, 0.01)],
        "D": [(0.03, 0.01, 0.001), (0.03, 0.01, 0.01)],
    },
}
FLAT = {  # λ and η of noisy EK-FAC with R started as the identity: tried first, and not to be chosen
    "plain": tuple((weight, 0.1) for weight in (0.003, 0.01, 0.03, 0.1, 0.3)),
    "D": tuple((weight, 0.1) for weight in (0.003, 0.01, 0.03, 0.1)),
    "B": tuple((weight, 1.0) for weight in (0.01, 0.03, 0.1, 0.3, 1.0)),
    "D+B": tuple((weight, 1.0) for weight in (0.01, 0.03, 0.1)),
}


def candidates(method: str, setting: Setting) -> list[dict]:
    """What is tried. For methods without noise λ/η is a weight decay; noisy K-FAC needs a smaller λ than noisy EK-FAC.

    Where both sides of a layer are flat, K-FAC's Fisher is a product of two small numbers.
    """
    names = ("lr", "kl_weight", "prior_var")
    found: list[dict] = [dict(zip(names, each, strict=True)) for each in TRIED[method][setting.name]]
    if method == "noisy-ekfac":
        found += [dict(zip(names, (0.03, *each), strict=True)) | {"start": "init"} for each in FLAT[setting.name]]
    wide = WIDE.get(method, {}).get(setting.name, [])
    return found + [dict(zip(names, each, strict=True)) | {"width": STUDY_WIDTH} for each in wide]


def label(options: dict) -> str:
    return "-".join(f"{name}={value}" for name, value in options.items())


def run_of(method: str, setting: Setting, options: dict) -> Run:
    own = {name: value for name, value in options.items() if name != "width"}
    width = options.get("width", WIDTH)
    return Run(method, setting, STEPS, train_size=5_000, samples=5, width=width, validate=True, options=own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--method", default=",".join(METHODS))
    parser.add_argument("--setting", default=",".join(setting.name for setting in SETTINGS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = [setting for setting in SETTINGS if setting.name in args.setting.split(",")]
    wanted = [(m, s, c) for m in args.method.split(",") for s in settings for c in candidates(m, s)]
    columns = (TextColumn("{task.description:50}"), BarColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        total = progress.add_task("all", total=len(wanted), now="")
        for method, setting, options in wanted:
            task = progress.add_task(f"{method} {setting.name} {label(options)}", total=STEPS, now="")
            folder = storage.folder(OUT / label(options))

            def advance(training, task=task):
                progress.update(task, completed=len(training.curve), now=f"loss {training.curve[-1][0]:.3f}")

            try:
                run_cifar10(run_of(method, setting, options), folder, args.data, resume=True, on_step=advance)
            except FloatingPointError as error:
                progress.console.print(f"{method} {setting.name} {label(options)}: {error}")
            progress.remove_task(task)
            progress.advance(total)
    for method, setting in dict.fromkeys((m, s) for m, s, _ in wanted):
        show_candidates(method, setting)


def scored(method: str, setting: Setting) -> list[tuple[dict, float, float]]:
    """Candidates that were run, with log-likelihood and accuracy on held-out images, of averaged samples if noisy."""
    found = []
    for options in candidates(method, setting):
        path = OUT / label(options) / f"{run_of(method, setting, options).name}.json"
        if path.exists():  # of whatever version
            result = json.loads(path.read_text())
            scores = result["scores"].get("samples", result["scores"]["mean"])
            found.append((options, -scores["nll"], scores["accuracy"]))
    return found


def chosen(method: str, setting: Setting) -> dict:
    """The candidate with the highest log-likelihood, R started as by default, of the study's width if there are any."""
    found = [each for each in scored(method, setting) if "start" not in each[0]]
    wide = [each for each in found if "width" in each[0]]
    return max(wide or found, key=lambda each: each[1])[0]


def show_candidates(method: str, setting: Setting) -> None:
    best = chosen(method, setting)
    for options, likelihood, accuracy in scored(method, setting):
        mark = "  <- best" if options == best else ""
        print(f"{method:12} {setting.name:6} {label(options):40} {likelihood:.4f}  {accuracy:.1%}{mark}")


if __name__ == "__main__":
    main()
