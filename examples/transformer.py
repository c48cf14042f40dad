"""A small transformer in the kind of loop that Hugging Face's Trainer runs: micro-batches, bf16, warm-up, clipping.

Rows of an image of a digit are the tokens. All micro-batches of a step see the same sample of weights.

python examples/transformer.py [--steps 300]
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import eigenoise as en

MICRO, ACCUMULATE, WIDTH = 16, 4, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).reshape(-1, 8, 8) / 16, torch.tensor(y)
    where = functional.one_hot(torch.arange(8), 8).expand(len(x), -1, -1)  # of a row in its image
    x = functional.pad(torch.cat([x, where], -1), (0, WIDTH - 16))
    order = torch.randperm(len(x))
    train, test = order[:1400], order[1400:]

    model = en.models.TransformerEncoder(width=WIDTH, depth=2, heads=4, classes=10)
    likelihood = en.CategoricalLikelihood()
    opt = en.NoisyEKFAC(model, num_data=len(train), likelihood=likelihood)
    warm_up = max(1, args.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda step: min((step + 1) / warm_up, (args.steps - step) / max(1, args.steps - warm_up))
    )
    for _ in range(args.steps):
        batch = train[torch.randint(len(train), (MICRO * ACCUMULATE,))]
        with opt.sampled_params():
            opt.zero_grad()
            for micro in batch.split(MICRO):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    outputs = model(x[micro])
                (likelihood.nll(outputs, y[micro]) / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()

    predicted = en.predict(model, opt, x[test], samples=20)
    right = (predicted.probs.argmax(-1) == y[test]).float().mean()
    print(f"right {right:.1%}, log-likelihood {predicted.log_prob(y[test]).mean():.3f}")


if __name__ == "__main__":
    main()
