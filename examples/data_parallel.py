"""One model in several processes: what torch's own loop for DistributedDataParallel needs beside the three-line change.

torchrun --standalone --nproc-per-node 2 examples/data_parallel.py [--steps 400]

Every process draws weights of its own, so two of them mean two samples in each step. Started without torchrun it is an
ordinary loop.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import eigenoise as en


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    torch.manual_seed(0)
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = x.float() / 8 - 1
    train, test = TensorDataset(x[:1400], y[:1400]), (x[1400:], y[1400:])

    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    wrapped = DistributedDataParallel(model) if several else model
    likelihood = en.CategoricalLikelihood()
    opt = en.NoisyEKFAC(wrapped, num_data=len(train), likelihood=likelihood)  # the wrapped one
    sampler = DistributedSampler(train, size, rank, seed=0)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)
    while opt.steps < args.steps:
        sampler.set_epoch(opt.steps)
        for inputs, labels in loader:
            with opt.sampled_params():
                opt.zero_grad()
                likelihood.nll(wrapped(inputs), labels).backward()
            opt.step()

    if rank == 0:  # means, Fishers and so the posterior are the same everywhere: one process can predict and save
        predicted = en.predict(model, opt, test[0], samples=50)
        right = (predicted.probs.argmax(-1) == test[1]).float().mean()
        print(
            f"{size} process{'es' if size > 1 else ''}, {opt.steps} steps: test log-likelihood "
            f"{predicted.log_prob(test[1]).mean():.3f}, {right:.1%} right"
        )
    if several:
        dist.barrier()  # the first one is still testing: all leave together
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
