"""A curve seen in two places only: the band that widens where there was no data.

python examples/one_dimension.py [--steps 4000] [--out band.png]
"""

import argparse

import matplotlib
import torch

import eigenoise as en

matplotlib.use("Agg")
from matplotlib import pyplot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--out", default="band.png")
    args = parser.parse_args()

    torch.manual_seed(0)
    x = torch.cat([torch.rand(60, 1) * 1.5 - 2.5, torch.rand(60, 1) * 1.5 + 0.8])
    y = torch.sin(2.5 * x) + 0.1 * torch.randn_like(x)

    likelihood = en.GaussianLikelihood()
    model = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    opt = en.NoisyEKFAC(model, num_data=len(x), likelihood=likelihood, prior_var=2.0)  # wide, as the curve is steep
    for step in range(args.steps):
        # Full noise from the start would drown the curve before it is found: let it grow over the first 60 %.
        opt.param_groups[0]["kl_weight"] = min(1.0, 0.1 + step / (0.6 * args.steps))
        with opt.sampled_params():
            opt.zero_grad()
            likelihood.nll(model(x), y).backward()
        opt.step()

    grid = torch.linspace(-4, 4, 400).unsqueeze(-1)
    predicted = en.predict(model, opt, grid, samples=200)
    line, mean = grid.flatten(), predicted.mean.flatten()
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    for parts, color, label in (
        (predicted.stddev, "#f0c9c4", "noise and weights"),
        (predicted.weights_stddev, "#d98b82", "weights alone"),
    ):
        spread = 1.96 * parts.flatten()
        axes.fill_between(line, mean - spread, mean + spread, color=color, label=f"95 %: {label}", linewidth=0)
    axes.plot(line, mean, color="#8e2a1e", linewidth=1.5, label="mean")
    axes.plot(x, y, ".", color="#222222", markersize=4, label="data")
    axes.set(xlim=(-4, 4), ylim=(-3.5, 3.5), xlabel="x", ylabel="y")
    axes.legend(frameon=False, ncol=4, loc="upper center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.out, dpi=130)
    print(f"ELBO per example {opt.elbo(x, y).per_example:.3f}; picture: {args.out}")


if __name__ == "__main__":
    main()
