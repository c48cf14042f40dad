"""Choose the settings of the preset ``best``, looking at training parts alone.

Of every split's training part 20 % of the rows are held out; each candidate trains on the rest, all splits at once, and
is scored by its log-likelihood on the held-out rows, mean over splits. For each candidate the factor on the noise's
standard deviation that suits the held-out rows best is noted as well. Test rows are never read. A set's results are
written as they come, and what is there already is not run again.

    python benchmarks/tune_uci.py [SETS...] [--method noisy-ekfac,...]
    python benchmarks/tune_uci.py --show   # the choice, as studies/settings/regression.json has it
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eigenoise import checks, storage
from eigenoise.inference import metrics
from eigenoise.optim.methods import BAYESIAN
from eigenoise.studies import data
from eigenoise.studies.data import uci
from eigenoise.studies.recipes import Recipe, best_recipe
from eigenoise.studies.regression.study import study_table
from eigenoise.studies.regression.training import Training
from eigenoise.studies.runner import environment

OUT = Path(__file__).parent / "results" / "uci_tuning"
SPLITS = {"kin8nm": 2, "naval": 2, "power": 2, "protein": 1, "year": 1}  # 4 of the small sets
RUNAWAYS = ("energy", "yacht")  # models may run away with natural gradients: 10 splits show it
AS_PAPER = (
    "boston",
)  # where the paper's own settings, slower, are tried as well; on 10 splits, its test parts are small
SCALES = tuple(round(0.4 * 1.06**i, 3) for i in range(-24, 50))
HELD_OUT = 0.2
KL_WEIGHTS = (0.25, 0.5, 1.0)
SMALLER = (0.1,)  # tried where the smallest of those is the best
RATES = {"noisy-adam": (0.003, 0.01), "bbb": (0.001, 0.01)}
LARGER = 0.03  # tried with the best λ where the larger of those is the best


def candidates(name: str, method: str, kl_weights: Sequence[float]) -> list[dict]:
    """Every method gets the same choice of λ, and of two more settings: a form of damping or a learning rate."""
    further = {
        "noisy-ekfac": [{"damping_form": "exact"}, {"damping_form": "factored"}],
        "noisy-kfac": [{"damping_form": "exact"}, {"damping_form": "factored"}],
    }
    further |= {name: [{"lr": rate} for rate in reversed(rates)] for name, rates in RATES.items()}
    choices = further[method] + ([{"as_paper": True}] if name in AS_PAPER else [])
    return [{"kl_weight": kl_weight, **choice} for kl_weight in kl_weights for choice in choices]


def inner_splits(name: str, method: str) -> data.Splits:
    """Training parts only, each with a fifth of its rows held out."""
    if name == "year":
        official, _ = uci.year_splits()
        x, y = official.x_train[0].double().numpy(), official.y_train[0, :, 0].double().numpy()
        table, parts = data.Table("year", x, y), [np.arange(len(y))]
    else:
        table = study_table(name)
        ten = name in AS_PAPER or (name in RUNAWAYS and method != "bbb")
        count = 10 if ten else SPLITS.get(name, 4)
        parts = [train for train, _ in uci.canonical_rows(name, range(count))]
    rows = []
    for number, train in enumerate(parts):
        order = np.random.default_rng(number).permutation(train)
        held_out = round(HELD_OUT * len(order))
        rows.append((order[held_out:], order[:held_out]))
    return data.standardised(table, rows)


def score(recipe: Recipe, method: str, splits: data.Splits, about: uci.Info, on_epoch) -> dict:
    """Log-likelihood of held-out rows in the units of ``splits``, with the noise as fitted and with the best factor."""
    began = time.process_time()
    training = Training(recipe, method, splits, hidden=about.hidden, batch_size=about.batch_size)
    try:
        for _ in training.steps():
            on_epoch()
    except checks.NotFiniteError as error:
        return {"failed": str(error)}
    predicted, scale = training.predictive(), splits.y_std.flatten()
    by_scale = {
        factor: (metrics.log_likelihood(predicted.with_noise_scaled(factor), splits.y_test) - scale.log()).tolist()
        for factor in (1.0, *SCALES)
    }
    best = max(by_scale, key=lambda factor: np.mean(by_scale[factor]))
    return {
        "ll": by_scale[1.0],
        "noise_scale": best,
        "ll_scaled": by_scale[best],
        "rmse": (metrics.rmse(predicted.mean, splits.y_test) * scale).tolist(),
        "seconds": time.process_time() - began,
    }


def results(name: str, method: str) -> list[dict]:
    """The candidates tried so far with the recipes of today."""
    path = OUT / f"{name}-{method}.json"
    entries = json.loads(path.read_text())["candidates"] if path.exists() else []
    return [entry for entry in entries if entry["recipe"] == _as_json(best_recipe(name, method, **entry["choice"]))]


def missing(entries: Sequence[dict], name: str, method: str) -> list[dict]:
    """Candidates still to be tried."""
    tried = [entry["choice"] for entry in entries]
    wanted = candidates(name, method, KL_WEIGHTS)
    if all(choice in tried for choice in wanted) and _best(entries)["choice"]["kl_weight"] <= min(KL_WEIGHTS):
        wanted += candidates(name, method, SMALLER)
    if method in RATES and all(choice in tried for choice in wanted):
        best = max((e for e in entries if e["choice"].get("lr") != LARGER), key=_score)["choice"]
        if best.get("lr") == max(RATES[method]):
            wanted.append({**best, "lr": LARGER})
    return [choice for choice in wanted if choice not in tried]


def chosen(name: str, method: str) -> dict:
    """The candidate with the highest log-likelihood of held-out rows, and its factor on the noise.

    Raises:
        ValueError: if candidates are still to be tried.
    """
    entries = results(name, method)
    left = missing(entries, name, method)
    if left:
        raise ValueError(f"{name} {method}: not tried yet: {left}")
    best = _best(entries)
    return {**best["choice"], "noise_scale": best["noise_scale"]}


def _best(entries: Sequence[dict]) -> dict:
    return max(entries, key=_score)


def _score(entry: dict) -> float:
    return -math.inf if "failed" in entry else float(np.mean(entry["ll_scaled"]))


def _as_json(recipe: Recipe) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(recipe)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=list(uci.SETS))
    parser.add_argument("--method", default=",".join(BAYESIAN))
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    if args.show:
        for name in args.sets:
            choices = {method: chosen(name, method) for method in args.method.split(",")}
            print(f"{json.dumps(name)}: {json.dumps(choices, indent=2)},")
        return
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description:60}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        for name in args.sets:
            for method in args.method.split(","):
                _tune(name, method, progress)


def _tune(name: str, method: str, progress: Progress) -> None:
    about, splits, entries = uci.info(name), inner_splits(name, method), results(name, method)
    while left := missing(entries, name, method):
        recipe = best_recipe(name, method, **left[0])
        task = progress.add_task(f"{name} {method} {left[0]}", total=recipe.epochs)
        entry = score(recipe, method, splits, about, lambda task=task: progress.advance(task))
        progress.remove_task(task)
        entries.append({"choice": left[0], **entry, "recipe": _as_json(recipe)})
        content = {"splits": splits.x_train.shape[0], "environment": environment(), "candidates": entries}
        storage.write_json(OUT / f"{name}-{method}.json", content)
        progress.console.print(
            f"{name} {method} {left[0]}: {np.mean(entry.get('ll_scaled', math.nan)):.3f}, noise × "
            f"{entry.get('noise_scale')}, as fitted {np.mean(entry.get('ll', math.nan)):.3f}, "
            f"{entry.get('seconds', 0):.0f} s"
        )


if __name__ == "__main__":
    main()
