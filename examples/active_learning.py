"""Active learning: ask for the labels that would tell the network most, instead of random ones.

Starting with 20 labelled digits, 10 more are bought ten times: those with the largest mutual information between
label and weights (BALD), or random ones.

python examples/active_learning.py [--steps 300] [--seeds 5] [--out active.png]
"""

import argparse

import matplotlib
import torch
from sklearn.datasets import load_digits

import eigenoise as en

matplotlib.use("Agg")
from matplotlib import pyplot

ROUNDS, BOUGHT = 10, 10


def fit(x: torch.Tensor, y: torch.Tensor, steps: int) -> tuple[torch.nn.Module, en.NoisyEKFAC]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    likelihood = en.CategoricalLikelihood()
    opt = en.NoisyEKFAC(model, num_data=len(x), likelihood=likelihood, refresh_every=20)
    for _ in range(steps):
        with opt.sampled_params():
            opt.zero_grad()
            likelihood.nll(model(x), y).backward()
        opt.step()
    return model, opt


def learn(seed: int, steps: int, active: bool) -> list[float]:
    """Accuracy on test images after each round."""
    torch.manual_seed(seed)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    order = torch.randperm(len(x))
    pool, test = order[:1200], order[1200:]
    known, pool = pool[:20], pool[20:]
    right = []
    for _ in range(ROUNDS + 1):
        model, opt = fit(x[known], y[known], steps)
        guess = en.predict(model, opt, x[test], samples=30).probs.argmax(-1)
        right.append(float((guess == y[test]).float().mean()))
        unsure = en.predict(model, opt, x[pool], samples=30).mutual_information() if active else torch.rand(len(pool))
        wanted = unsure.argsort(descending=True)
        known, pool = torch.cat([known, pool[wanted[:BOUGHT]]]), pool[wanted[BOUGHT:]]
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", default="active.png")
    args = parser.parse_args()

    labels = [20 + BOUGHT * i for i in range(ROUNDS + 1)]
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    last = {}
    for name, active in (("most informative", True), ("random", False)):
        each = torch.tensor([learn(seed, args.steps, active) for seed in range(args.seeds)])
        last[name] = each[:, -1]
        axes.plot(labels, each.mean(0), label=name)
    axes.set(xlabel="labels", ylabel="right")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.out, dpi=130)
    gain = last["most informative"] - last["random"]
    error = gain.std() / len(gain) ** 0.5 if len(gain) > 1 else torch.tensor(float("nan"))
    means = ", ".join(f"{name} {value.mean():.1%}" for name, value in last.items())
    print(f"right with {labels[-1]} labels: {means}; difference {gain.mean():+.1%} ± {error:.1%}; picture: {args.out}")


if __name__ == "__main__":
    main()
