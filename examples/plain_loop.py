"""The three-line change in a plain loop, on scikit-learn's diabetes table.

python examples/plain_loop.py [--steps 3000]
"""

import argparse

import torch
from sklearn.datasets import load_diabetes

import eigenoise as en


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()

    torch.manual_seed(0)
    x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    x, y = x / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(-1)
    rows = torch.randperm(len(x))
    train, test = rows[:350], rows[350:]

    model = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
    likelihood = en.GaussianLikelihood()
    opt = en.NoisyEKFAC(model, num_data=len(train), likelihood=likelihood)  # was torch.optim.Adam(...)
    for _ in range(args.steps):
        batch = train[torch.randint(len(train), (32,))]
        with opt.sampled_params():  # new
            opt.zero_grad()
            likelihood.nll(model(x[batch]), y[batch]).backward()  # was a loss of one's own
        opt.step()

    predicted = en.predict(model, opt, x[test], samples=100)
    low, high = predicted.interval(0.9)
    inside = ((low <= y[test]) & (y[test] <= high)).float().mean()
    print(f"test log-likelihood {predicted.log_prob(y[test]).mean():.3f}, in the 90 % interval {inside:.0%}")
    noise, weights = predicted.noise_stddev.mean(), predicted.weights_stddev.mean()
    print(f"standard deviation: of the noise {noise:.2f}, by the weights {weights:.2f}")


if __name__ == "__main__":
    main()
