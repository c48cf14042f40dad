"""Out-of-distribution detection: a network that saw the digits 0 to 7 is shown 8 and 9.

How well each measure of doubt tells unknown digits from known ones is said as an AUROC: 50 % is chance.

python examples/out_of_distribution.py [--steps 1500] [--seeds 5]
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import eigenoise as en


def run(seed: int, steps: int) -> dict[str, float]:
    torch.manual_seed(seed)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    known = (y < 8).nonzero().flatten()
    known = known[torch.randperm(len(known))]
    train, test, strange = known[:1000], known[1000:], (y >= 8).nonzero().flatten()
    shown = torch.cat([test, strange])
    truth = torch.cat([torch.zeros(len(test)), torch.ones(len(strange))])

    found = {}
    for name in ("Adam", "noisy EK-FAC"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 8))
        likelihood = en.CategoricalLikelihood()
        noisy = name == "noisy EK-FAC"
        if noisy:
            opt = en.NoisyEKFAC(model, num_data=len(train), likelihood=likelihood, refresh_every=20)
        else:
            opt = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in range(steps):
            batch = train[torch.randint(len(train), (64,))]

            def closure(batch=batch, model=model, likelihood=likelihood, opt=opt):
                opt.zero_grad()
                loss = likelihood.nll(model(x[batch]), y[batch])
                loss.backward()
                return loss

            opt.step(closure)
        if noisy:
            predicted = en.predict(model, opt, x[shown], samples=50)
            found[f"{name}, mutual information"] = roc_auc_score(truth, predicted.mutual_information())
            probs = predicted.probs
        else:
            with torch.no_grad():
                probs = model(x[shown]).softmax(-1)
        found[f"{name}, entropy"] = roc_auc_score(truth, torch.special.entr(probs).sum(-1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    each = [run(seed, args.steps) for seed in range(args.seeds)]
    for name in each[0]:
        values = torch.tensor([one[name] for one in each])
        error = f" ± {values.std() / len(values) ** 0.5:.1%}" if len(values) > 1 else ""
        print(f"{name:34} AUROC {values.mean():.1%}{error}")


if __name__ == "__main__":
    main()
