"""Whether speed was bought with quality: noisy EK-FAC after the same number of steps, with and without each saving.

Three networks learn a part of CIFAR-10 at the default settings, paired by seed: an MLP on halved images, a convnet with
batch norm, and a small transformer on patches. The reference rotates in float32 and with all eigenvectors, draws noise
at every step and takes statistics from whole batches. Test images are not used.

    python benchmarks/learning_curves.py CIFAR_FOLDER [--steps 250] [--seeds 0 1 2 3] [--network MLP] [--way bfloat16]
        [--json FILE]

CIFAR_FOLDER holds the official binary files, data_batch_1.bin and so on.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

import eigenoise as en
from eigenoise.studies.arena.tasks import convnet
from eigenoise.studies.runner import environment

IMAGES, BATCH, HELD_OUT = 8000, 128, 1000


class Patches(torch.nn.Module):
    """Images as 16 tokens of 8×8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = torch.nn.Linear(192, 64), en.models.TransformerEncoder(width=64, depth=2, heads=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits ``(b, 10)``."""
        tokens = torch.nn.functional.unfold(x, 8, stride=8).mT
        return self.encoder(self.embed(tokens))


NETWORKS = {
    "MLP": lambda: torch.nn.Sequential(torch.nn.AvgPool2d(2), torch.nn.Flatten(), en.models.MLP(768, [400, 400], 10)),
    "convnet": lambda: convnet(batch_norm=True),
    "transformer": Patches,
}
REFERENCE = "float32"
PLAIN = {"precision": "float32", "stats_fraction": 1.0, "reuse_noise": False, "basis_rank": 1.0}
WAYS = {
    REFERENCE: PLAIN,
    "bfloat16": {**PLAIN, "precision": "bfloat16"},
    "noise used twice": {**PLAIN, "reuse_noise": True},
    "a part of the batch": {**PLAIN, "stats_fraction": "auto"},
    "leading eigenvectors": {**PLAIN, "basis_rank": "auto"},
    "all of these": {"precision": "bfloat16"},
}


def images(folder):
    raw = np.fromfile(folder / "data_batch_1.bin", np.uint8).reshape(-1, 3073)
    x = torch.tensor(raw[:, 1:], dtype=torch.float32).reshape(-1, 3, 32, 32) / 255
    y = torch.tensor(raw[:, 0], dtype=torch.long)
    x = (x - x[:IMAGES].mean((0, 2, 3), keepdim=True)) / x[:IMAGES].std((0, 2, 3), keepdim=True)
    return (x[:IMAGES], y[:IMAGES]), (x[IMAGES : IMAGES + HELD_OUT], y[IMAGES : IMAGES + HELD_OUT])


def run(network, options, train, held_out, seed, steps):
    torch.manual_seed(seed)
    model, likelihood = NETWORKS[network](), en.CategoricalLikelihood()
    opt = en.NoisyEKFAC(
        model,
        num_data=IMAGES,
        likelihood=likelihood,
        noise_ramp=100,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    x, y = train
    order = torch.Generator().manual_seed(seed)
    seconds, done, losses = 0.0, 0, []
    while done < steps:
        for rows in torch.randperm(IMAGES, generator=order).split(BATCH)[:-1]:
            began = time.process_time()
            with opt.sampled_params():
                opt.zero_grad()
                loss = likelihood.nll(model(x[rows]), y[rows])
                loss.backward()
            opt.step()
            seconds += time.process_time() - began
            losses.append(loss.item())
            done += 1
            if done == steps:
                break
    batches = x.split(BATCH)  # whose first eight batch norm's averages are recomputed from for each sample
    bound = opt.elbo(x[:2000], y[:2000], samples=8, batch_norm=batches)
    predicted = en.predict(model, opt, held_out[0], samples=10, batch_norm=batches)
    return {
        "elbo": float(bound.per_example),
        "fit": float(bound.log_likelihood) / IMAGES,
        "held_out_ll": float(predicted.log_prob(held_out[1]).mean()),
        "last_losses": float(np.mean(losses[-20:])),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    train, held_out = images(args.folder)
    result: dict = {"environment": environment(), "steps": args.steps, "rows": []}
    if args.json and args.json.exists():  # go on with what was begun
        begun = json.loads(args.json.read_text())
        if (begun["environment"], begun["steps"]) != (result["environment"], args.steps):
            parser.error(f"{args.json} holds results of another environment or number of steps: choose another file")
        result = begun
    done = {(row["network"], row["way"], row["seed"]) for row in result["rows"]}
    for network in args.network:
        for seed in args.seeds:
            for way in args.way:
                if (network, way, seed) in done:
                    continue
                options = WAYS[way]
                row = {"network": network, "way": way, "seed": seed}
                row |= run(network, options, train, held_out, seed, args.steps)
                result["rows"].append(row)
                print(
                    f"{network:6} seed {seed}  {way:22} ELBO {row['elbo']:8.4f}  expected log-likelihood "
                    f"{row['fit']:7.4f}  held out {row['held_out_ll']:7.4f}  last losses {row['last_losses']:.4f}  "
                    f"{row['seconds']:.0f} s",
                    flush=True,
                )
                if args.json:
                    args.json.write_text(json.dumps(result, indent=2) + "\n")
    _differences(result["rows"])


def _differences(rows):
    """Means over seeds, and the paired differences to the reference with standard errors, as a table in Markdown."""
    names = ("elbo", "fit", "held_out_ll")
    print("| network | way | ELBO per example | expected log-likelihood | held-out log-likelihood |")
    print("|---|---|---|---|---|")
    for network in dict.fromkeys(row["network"] for row in rows):
        table = {way: {r["seed"]: r for r in rows if (r["network"], r["way"]) == (network, way)} for way in WAYS}
        for way, own in table.items():
            both = sorted(own.keys() & table[REFERENCE].keys())
            if not both:
                continue
            cells = []
            for name in names:
                gaps = np.array([own[seed][name] - table[REFERENCE][seed][name] for seed in both])
                error = gaps.std(ddof=1) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
                gap = "" if way == REFERENCE else f" ({gaps.mean():+.3f} ± {error:.3f})"
                cells.append(f"{np.mean([own[seed][name] for seed in both]):.3f}{gap}")
            print(f"| {network} | {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
