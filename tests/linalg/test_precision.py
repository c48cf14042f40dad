"""Rotations in bfloat16: within stated bounds of the dense oracle, and statistics as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eigenoise as en
from eigenoise.fisher import BasisOptions, Eigen, Kronecker
from eigenoise.linalg import precision
from eigenoise.linalg.precision import has_fast_bfloat16, mixed_matmul, product_dtype

BOUND = 2.0**-7  # relative to norms: two products with inputs and results rounded to eight bits


def structure(kind, size, **options):
    torch.manual_seed(0)
    fisher = kind((size, size + 3), dtype=torch.float32, basis=BasisOptions(**options))
    for _ in range(3):
        a, g = torch.randn(50, 2, size + 3), torch.randn(50, 2, size)
        fisher.update(a, g)
        fisher.commit(0.3, 0.3)
        assert fisher.refresh()
    return fisher


@pytest.mark.parametrize("kind", [Eigen, Kronecker])
@pytest.mark.parametrize("what", ["rotate", "unrotate", "solve", "root"])
def test_bfloat16_is_within_its_bound_of_the_dense_oracle(kind, what):
    low, high = (structure(kind, 20, precision=name) for name in ("bfloat16", "float32"))
    for name, tensor in low.state().items():
        tensor.copy_(high.state()[name])  # the same factors, basis and spectrum
    low.forget_cache()
    V = torch.randn(20, 23, dtype=torch.float32)
    more = () if what in ("rotate", "unrotate") else (0.1,)
    ours = getattr(low, what)(V, *more)
    Q = torch.kron(high.factors.q_out.double(), high.factors.q_in.double())
    spectrum = high.spectrum(0.1).double().flatten()
    dense = {
        "rotate": Q.mT, "unrotate": Q, "solve": Q @ torch.diag(1 / spectrum) @ Q.mT,
        "root": Q @ torch.diag(spectrum.rsqrt()),
    }[what]  # fmt: skip
    wanted = (dense @ V.double().flatten()).reshape(20, 23)
    assert ours.dtype == torch.float32
    assert float((ours.double() - wanted).norm() / wanted.norm()) < 2 * BOUND
    torch.testing.assert_close(getattr(high, what)(V, *more).double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rank", [1.0, 0.2])
def test_statistics_are_not_lowered(rank):
    low, high = (structure(Eigen, 20, precision=name, rank=rank) for name in ("bfloat16", "float32"))
    torch.testing.assert_close(low.R, high.R)
    torch.testing.assert_close(low.factors.inputs.moments, high.factors.inputs.moments)


@pytest.mark.parametrize("fast", [False, True])
def test_auto_asks_the_hardware(monkeypatch, fast):
    monkeypatch.setattr(precision, "has_fast_bfloat16", lambda device: fast)
    expected = torch.bfloat16 if fast else torch.float32
    assert product_dtype("auto", 1000, torch.float32, "cpu") == expected
    assert product_dtype("auto", 100, torch.float32, "cpu") == torch.float32  # too small to gain
    assert product_dtype("auto", 1000, torch.float64, "cpu") == torch.float64
    assert product_dtype("float32", 1000, torch.float32, "cpu") == torch.float32
    assert product_dtype("bfloat16", 10, torch.float64, "cpu") == torch.bfloat16
    with pytest.raises(ValueError, match="precision must be one of 'auto', 'float32', 'bfloat16', got 'half'"):
        product_dtype("half", 10, torch.float32, "cpu")


def test_the_hardware_is_known():
    assert isinstance(has_fast_bfloat16("cpu"), bool)
    assert not has_fast_bfloat16("meta")


def test_products_come_back_in_the_dtype_that_is_asked_for():
    left, right = torch.randn(3, 4), torch.randn(4, 5)
    assert mixed_matmul(left, right.bfloat16(), left.dtype).dtype == left.dtype
    assert mixed_matmul(left.bfloat16(), right, right.dtype).dtype == right.dtype
    torch.testing.assert_close(mixed_matmul(left, right, left.dtype), left @ right)


@pytest.mark.parametrize("method", [en.NoisyEKFAC, en.NoisyKFAC, en.EKFAC, en.KFAC])
def test_training_in_bfloat16_goes_as_in_float32(method):
    losses = {}
    for name in ("float32", "bfloat16"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 1)).float()
        x = torch.randn(200, 6, dtype=torch.float32)
        y = (x[:, :1] * x[:, 1:2]).tanh() + 0.1 * torch.randn(200, 1, dtype=torch.float32)
        generator = torch.Generator().manual_seed(1)
        likelihood = en.GaussianLikelihood(precision=50.0)
        opt = method(model, num_data=200, likelihood=likelihood, precision=name, generator=generator)
        for _ in range(300):
            with opt.sampled_params():
                opt.zero_grad()
                likelihood.nll(model(x), y).backward()
            opt.step()
        losses[name] = float((model(x) - y).detach().square().mean())
    assert losses["float32"] < 0.08
    assert abs(losses["bfloat16"] / losses["float32"] - 1) < 0.25
