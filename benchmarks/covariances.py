"""What the three posteriors look like on one real network: the numbers behind Figures 1 and 2.

A network 13-50-1 is trained by noisy EK-FAC on a split of Boston housing. At its mean weights the Fisher of the first
layer is taken over all training rows, once as the full matrix and once as each structure approximates it; a posterior
covariance is (λ/N)·(F + γI)⁻¹. Kept are the spectra in the Kronecker basis and the covariances of a few pairs of
weights: those that the full Gaussian correlates most.

    python benchmarks/covariances.py [--json FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import eigenoise as en
from eigenoise import storage
from eigenoise.fisher import Diagonal, Eigen, Kronecker
from eigenoise.optim import training
from eigenoise.studies import data
from eigenoise.studies.runner import environment

LAYER = "0"
OUT = Path(__file__).parent / "results" / "covariances.json"
PLANES = 3


def trained() -> tuple[en.NoisyEKFAC, torch.Tensor, torch.Tensor]:
    """A network and its training rows."""
    torch.manual_seed(0)
    splits = data.split(data.boston(), [1], dtype=torch.float64)
    x, y = splits.x_train[0], splits.y_train[0]
    model = en.models.MLP(x.shape[1], [50], 1)
    optimizer = en.NoisyEKFAC(
        model, num_data=len(x), likelihood=en.GaussianLikelihood(), fisher="exact", init=1.0, noise_ramp=0
    )
    for _ in training.epochs(optimizer, x, y, count=200, batch_size=10):
        pass
    return optimizer, x, y


def layer_gradients(model: torch.nn.Module, x: torch.Tensor, root: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of the first layer with a column of ones, and √τ·∂f/∂s at its output, example by example."""
    s = model[0](x).detach().requires_grad_()
    (g,) = torch.autograd.grad(torch.nn.Sequential(*list(model)[1:])(s).sum(), s)
    return torch.cat([x, torch.ones(len(x), 1)], 1), root * g


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    optimizer, x, _ = trained()
    a, g = layer_gradients(optimizer.model, x, float(optimizer.likelihood.tau) ** 0.5)
    shape = (g.shape[1], a.shape[1])
    structures = {"FFG": Diagonal(shape), "MVG": Kronecker(shape), "EMVG": Eigen(shape)}
    for fisher in structures.values():
        for _ in range(2):  # R is gathered in the basis of the first pass
            fisher.update(a[:, None], g[:, None])
            fisher.commit(1.0, 1.0)
            fisher.refresh()
    scale, damping = optimizer.posterior_scale, optimizer.intrinsic_damping
    rows = (g[:, :, None] * a[:, None, :]).flatten(1)
    full = rows.mT @ rows / len(rows) + damping * torch.eye(rows.shape[1])
    dense = {"full": full} | {name: fisher.dense(damping) for name, fisher in structures.items()}
    covariances = {name: scale * torch.linalg.inv(matrix) for name, matrix in dense.items()}
    kfac, ekfac = (structures[name].spectrum(0.0) for name in ("MVG", "EMVG"))
    result = {
        "environment": environment(),
        "divergence": {name: _divergence(covariances[name], covariances["full"]) for name in structures},
        "planes": _planes(covariances, shape),
        "layer": {"name": LAYER, "kfac": kfac.tolist(), "ekfac": ekfac.tolist()},
    }
    storage.write_json(args.json, result)
    print("KL of each posterior of the first layer to the full Gaussian, nats:")
    for name, value in result["divergence"].items():
        print(f"  {name:5} {value:8.1f}")


def _divergence(covariance: torch.Tensor, other: torch.Tensor) -> float:
    """KL(N(0, covariance) ‖ N(0, other))."""
    zero = torch.zeros(len(covariance))
    normal = torch.distributions.MultivariateNormal
    return float(torch.distributions.kl_divergence(normal(zero, covariance), normal(zero, other)))


def _planes(covariances: dict[str, torch.Tensor], shape: tuple[int, int]) -> list[dict]:
    """The pairs of weights that the full Gaussian correlates most, no unit twice."""
    full = covariances["full"]
    std = full.diagonal().sqrt()
    correlation = (full / std / std[:, None]).abs().triu(1)
    planes, used = [], set()
    for index in correlation.flatten().argsort(descending=True).tolist():
        pair = divmod(index, len(full))
        places = [divmod(i, shape[1]) for i in pair]
        units = {unit for unit, _ in places}
        if used & units:
            continue
        used |= units
        pick = torch.tensor(pair)
        planes.append(
            {
                "weights": [f"unit {u}, {'bias' if n == shape[1] - 1 else f'input {n}'}" for u, n in places],
                "covariance": {name: matrix[pick][:, pick].tolist() for name, matrix in covariances.items()},
            }
        )
        if len(planes) == PLANES:
            break
    return planes


if __name__ == "__main__":
    main()
