"""Continual learning: the posterior of the tasks so far is the prior of the next.

Each task is the digits with their pixels in another order; no task's images are seen again. Without the prior the
network forgets.

python examples/continual_learning.py [--steps 800] [--tasks 5] [--out continual.png]
"""

import argparse

import matplotlib
import torch
from sklearn.datasets import load_digits

import eigenoise as en

matplotlib.use("Agg")
from matplotlib import pyplot


def learn(
    x: torch.Tensor, y: torch.Tensor, orders: list[torch.Tensor], steps: int, remember: bool
) -> list[list[float]]:
    """After each task, the part of test images that is right in all tasks so far."""
    torch.manual_seed(0)
    rows = torch.randperm(len(x))
    train, test = rows[:1200], rows[1200:]
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    posterior, right = None, []
    for task, order in enumerate(orders):
        likelihood = en.CategoricalLikelihood()
        opt = en.NoisyEKFAC(
            model,
            num_data=len(train),
            likelihood=likelihood,
            kl_weight=0.3,
            prior_var=1.0,  # wide, to leave room for later tasks
            prior=posterior if remember else None,
        )
        for _ in range(steps):
            batch = train[torch.randint(len(train), (64,))]
            with opt.sampled_params():
                opt.zero_grad()
                likelihood.nll(model(x[batch][:, order]), y[batch]).backward()
            opt.step()
        posterior = opt.posterior
        seen = [en.predict(model, opt, x[test][:, before], samples=20) for before in orders[: task + 1]]
        right.append([float((p.probs.argmax(-1) == y[test]).float().mean()) for p in seen])
        opt.close()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--out", default="continual.png")
    args = parser.parse_args()

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    orders = [torch.randperm(64, generator=torch.Generator().manual_seed(task)) for task in range(args.tasks)]
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for name, remember in (("old posterior as prior", True), ("the same prior each time", False)):
        right = learn(x, y, orders, args.steps, remember)
        means = [sum(row) / len(row) for row in right]
        axes.plot(range(1, len(means) + 1), means, marker="o", label=name)
        print(f"{name}: right in all tasks so far", " ".join(f"{mean:.1%}" for mean in means))
    axes.set(xlabel="tasks so far", ylabel="right, mean over them")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
