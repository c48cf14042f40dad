"""Pruning by signal-to-noise: set to zero what is most unsure of not being zero.

In the eigenbasis the posterior's coordinates are independent, so each has a signal-to-noise ratio of its own,
|Q_SᵀMQ_A|/σ. Compared with the same ratio weight by weight, and with the size of weights alone. What is kept is
counted in coordinates: to store so pruned a layer its bases are needed too, so this is no way to save bytes.

python examples/pruning.py [--steps 2000] [--out pruned.png]
"""

import argparse

import matplotlib
import torch
from sklearn.datasets import load_digits

import eigenoise as en

matplotlib.use("Agg")
from matplotlib import pyplot

KEPT = (1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01)


def coordinates(q: en.EigenMatrixNormal, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What is pruned of a layer, and how much each of it is worth."""
    if way == "signal-to-noise, eigenbasis":
        rotated = q.q_out.mT @ q.mean @ q.q_in
        return rotated, rotated.abs() / q.eigen_variance.sqrt()
    return q.mean, q.mean.abs() / (q.stddev if way == "signal-to-noise, weights" else 1.0)


def pruned(posterior: en.Posterior, way: str, kept: float) -> dict[str, torch.Tensor]:
    """Weights by name, with only a part ``kept`` of the coordinates of all layers."""
    parts = {name: coordinates(q, way) for name, q in posterior.items()}
    worth = torch.cat([each.flatten() for _, each in parts.values()])
    least = worth.sort(descending=True).values[max(0, round(kept * len(worth)) - 1)]
    found = {}
    for name, (values, each) in parts.items():
        values, q = values * (each >= least), posterior[name]
        weights = q.q_out @ values @ q.q_in.mT if way == "signal-to-noise, eigenbasis" else values
        found |= posterior.entries[name].unpack(weights)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", default="pruned.png")
    args = parser.parse_args()

    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    order = torch.randperm(len(x))
    train, test = order[:1200], order[1200:]
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    likelihood = en.CategoricalLikelihood()
    opt = en.NoisyEKFAC(model, num_data=len(train), likelihood=likelihood, refresh_every=50)
    for _ in range(args.steps):
        batch = train[torch.randint(len(train), (64,))]
        with opt.sampled_params():
            opt.zero_grad()
            likelihood.nll(model(x[batch]), y[batch]).backward()
        opt.step()

    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for way in ("signal-to-noise, eigenbasis", "signal-to-noise, weights", "size of weights"):
        right = []
        for kept in KEPT:
            weights = pruned(opt.posterior, way, kept)
            with torch.no_grad():
                guess = torch.func.functional_call(model, weights, (x[test],)).argmax(-1)
            right.append(float((guess == y[test]).float().mean()))
        axes.semilogx(KEPT, right, marker="o", label=way)
        print(f"{way:28}", " ".join(f"{kept:.0%}: {each:.1%} " for kept, each in zip(KEPT, right, strict=True)))
    axes.set(xlabel="part of the coordinates that is kept", ylabel="right")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
