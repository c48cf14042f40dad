"""The regressor with its defaults on real tables, beside ridge and gradient boosting with Gaussian noise.

For each table, random divisions into 80 % to learn from and 20 % to test on; nothing is tuned.

    python benchmarks/tables.py [--tables boston,wine] [--divisions 5] [--show]

Results are written to benchmarks/results/tables.json as they come; what is there is not done again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from sklearn import datasets
from sklearn.model_selection import train_test_split

from eigenoise import storage
from eigenoise.studies.data import uci
from eigenoise.studies.runner import environment
from eigenoise.tabular import BayesianMLPRegressor
from eigenoise.tabular.baselines import REGRESSORS, GaussianAround
from eigenoise.tabular.learning import regression_scores

OUT = Path(__file__).parent / "results" / "tables.json"
UCI = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "wine", "yacht")
ROWS = 5_000  # of larger tables, so many are drawn


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    if name == "diabetes":
        return datasets.load_diabetes(return_X_y=True)
    table = uci.load(name)
    return table.x, table.y


def run(name: str, division: int) -> dict:
    x, y = load(name)
    if len(y) > ROWS:
        some = np.random.default_rng(division).choice(len(y), ROWS, replace=False)
        x, y = x[some], y[some]
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=division)
    began = time.perf_counter()
    own = BayesianMLPRegressor(random_state=division).fit(x, y)
    seconds = time.perf_counter() - began
    models = {"eigenoise": own, **{kind: GaussianAround.fit(make(), x, y) for kind, make in REGRESSORS.items()}}
    return {
        "rows": len(y),
        "seconds": seconds,
        "kl_weight": own.kl_weight_,
        "epochs": own.n_iter_,
        "scores": {kind: regression_scores(model, x_test, y_test) for kind, model in models.items()},
    }


def cells(results: dict) -> list[list[str]]:
    """A row for each table: rows learned from, part in the 90 % interval, log-likelihood, less the others', and errors.

    Errors are root mean squares of our network and of boosting, each divided by ridge's.
    """
    found = []
    for name, divisions in results["tables"].items():
        each = list(divisions.values())
        by = {kind: np.array([d["scores"][kind]["ll"] for d in each]) for kind in each[0]["scores"]}
        inside = np.mean([d["scores"]["eigenoise"]["in90"] for d in each])
        row = [name, f"{each[0]['rows']:,}", f"{inside:.1%}".replace("%", " %"), f"{by['eigenoise'].mean():.3f}"]
        for kind in REGRESSORS:
            less = by["eigenoise"] - by[kind]
            row.append(f"{less.mean():+.3f} ± {less.std(ddof=1) / len(less) ** 0.5:.3f}" if len(less) > 1 else "")
        errors = {kind: np.array([d["scores"][kind]["rmse"] for d in each]) for kind in by}
        row += [f"{(errors[kind] / errors['ridge']).mean():.2f}" for kind in ("eigenoise", "gradient boosting")]
        found.append([cell.replace("-", "−") for cell in row])
    return found


def show(results: dict) -> None:
    heads = [
        "table",
        "rows",
        "in 90 %",
        "log-likelihood",
        "less ridge's",
        "less boosting's",
        "RMSE/ridge's",
        "boosting's",
    ]
    for row in [heads, *cells(results)]:
        print(f"{row[0]:10} {row[1]:>6} {row[2]:>8} {row[3]:>15}  {row[4]:16} {row[5]:16} {row[6]:>12} {row[7]:>10}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(("diabetes", *UCI)))
    parser.add_argument("--divisions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = json.loads(args.out.read_text()) if args.out.exists() else {"tables": {}}
    if not args.show:
        todo = [(name, str(i)) for name in args.tables.split(",") for i in range(args.divisions)]
        for name, division in track([one for one in todo if one[1] not in results["tables"].get(one[0], {})], "tables"):
            results["tables"].setdefault(name, {})[division] = run(name, int(division))
            storage.write_json(args.out, {**results, "environment": environment()})
    show(results)


if __name__ == "__main__":
    main()
