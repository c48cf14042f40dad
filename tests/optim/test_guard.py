"""The guard: gradients that a Fisher does not expect raise it before the step."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import eigenoise as en
from arguments import accepted
from eigenoise.fisher import BasisOptions, Diagonal, Eigen, Kronecker
from eigenoise.optim.step_control import raise_fishers

METHODS = ["NoisyEKFAC", "EKFAC", "NoisyAdam", "NoisyKFAC", "KFAC"]


def regression(method, **options):
    """Two inputs, the second of which is zero in the data at hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    likelihood = en.GaussianLikelihood(precision=1.0)
    generator = torch.Generator().manual_seed(1)
    method = getattr(en, method)
    options = accepted(method, noise_ramp=0, generator=generator, **options)
    opt = method(model, num_data=100, likelihood=likelihood, **options)
    return model, opt


def step(model, opt, x, y):
    opt.zero_grad()
    with opt.sampled_params():
        opt.likelihood.nll(model(x), y).backward()
    opt.step()


def calm(rows=20):
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(2))
    x[:, 1] = 0.0
    return x, x[:, :1].sin()


@pytest.mark.parametrize("method", METHODS)
def test_a_calm_run_is_the_same_bit_for_bit(method):
    runs = []
    for on in (False, True):
        model, opt = regression(method, guard=on)
        for _ in range(60):
            step(model, opt, *calm())
        runs.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*runs)


def surprised(method, *, guard, quiet=400):
    """How far one batch with a large second input moves its weights, which were flat until then, and their noise."""
    model, opt = regression(method, guard=guard, lr=0.05, kl_weight=0.01, ema_scale=0.2, max_move=None, init=1.0)
    for _ in range(quiet):
        step(model, opt, *calm())
    x, y = calm()
    x[:, 1] = 1.0
    before = model[0].weight.detach().clone()
    step(model, opt, x, y + 30)
    samples = torch.stack([opt.posterior.sample(torch.Generator().manual_seed(i))["0.weight"] for i in range(50)])
    return (model[0].weight - before)[:, 1].abs().max(), samples[..., 1].std(0).mean()


@pytest.mark.parametrize("method", METHODS)
def test_what_was_flat_and_suddenly_matters_moves_little(method):
    loose, wide = surprised(method, guard=False)
    firm, narrow = surprised(method, guard=True)
    assert firm < 0.5 * loose
    assert narrow < 0.8 * wide


def strain(fisher, G, damping):
    """How many times the square of a gradient is what F + γI allows for."""
    return float((G**2 * fisher.inverse(damping)).max())


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("structure", [Eigen, Diagonal])
def test_the_spectrum_becomes_what_an_update_from_this_gradient_would_leave_at_least(structure, lead):
    fisher = structure((*lead, 3, 4), init=0.1)
    G = torch.randn(*lead, 3, 4)
    G[..., 0, 0] = 10.0
    assert strain(fisher, G, 0.5) == pytest.approx(100 / 0.6)  # the inverse is kept, and must be forgotten
    fisher.raise_to(G, 0.03, 0.5)
    torch.testing.assert_close(fisher.spectrum(0.0), (0.03 * G**2).clamp_min(0.1))
    assert strain(fisher, G, 0.5) < 1 / 0.03


def kronecker(lead=(), rank=1.0):
    """With factors of random data and a basis of them."""
    fisher = Kronecker((*lead, 3, 4), basis=BasisOptions(rank=rank), init=1.0)
    fisher.update(torch.randn(*lead, 50, 1, 4), torch.randn(*lead, 50, 1, 3))
    fisher.commit(1.0, 1.0)
    assert fisher.refresh()
    return fisher


@pytest.mark.parametrize("entries", ["all", "one"])
def test_kfacs_factors_take_in_what_a_matrix_normal_gradient_says_of_them(entries):
    fisher = kronecker()
    A, S = fisher.factors.inputs.moments.clone(), fisher.factors.out.moments.clone()
    coordinates = torch.zeros(3, 4)
    if entries == "all":  # equally large beside what is expected of them
        coordinates = 100 * torch.outer(
            (fisher.factors.out.values + 0.2).sqrt(), (fisher.factors.inputs.values + 0.2).sqrt()
        )
    else:
        coordinates[1, 2] = 100.0
    G = fisher.unrotate(coordinates)
    n, p = (4, 3) if entries == "all" else (1, 1)
    fisher.raise_to(coordinates, 0.03, 0.04)
    wanted_S = S + 0.03 / n * G @ torch.linalg.inv(A + 0.2 * torch.eye(4)) @ G.mT
    q = fisher.factors.q_out
    values = (q.mT @ wanted_S @ q).diagonal()
    torch.testing.assert_close(fisher.factors.out.moments, wanted_S)
    torch.testing.assert_close(fisher.factors.out.values, values)
    wanted_A = A + 0.03 / p * G.mT @ (q / (values + 0.2) @ q.mT) @ G
    torch.testing.assert_close(fisher.factors.inputs.moments, wanted_A)


@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
@pytest.mark.parametrize("entries", ["all", "one", "row", "column"])
def test_kfac_is_raised_to_about_what_ekfac_is(entries, size):
    fisher = Kronecker((8, 5))
    part = {"all": (slice(None), slice(None)), "one": (1, 2), "row": (1, slice(None)), "column": (slice(None), 2)}
    G = torch.zeros(8, 5)
    G[part[entries]] = size
    fisher.raise_to(G, 0.03, 0.04)
    raised = fisher.spectrum(0.04)[part[entries]].max() / (0.03 * size**2)
    assert 1 - 1e-9 <= raised < 3


@pytest.mark.parametrize("rank", [1.0, 0.25])
def test_kfac_is_surprised_less_from_then_on_and_in_its_next_basis(rank):
    fisher = kronecker(rank=rank)
    G = 100 * torch.randn(3, 4)
    before = strain(fisher, fisher.rotate(G), 0.04)
    fisher.raise_to(fisher.rotate(G), 0.03, 0.04)
    assert strain(fisher, fisher.rotate(G), 0.04) < 0.1 * before
    assert fisher.refresh()
    assert strain(fisher, fisher.rotate(G), 0.04) < 0.1 * before


def guarded(fisher, gradient, damping=0.04, extra=0.0, prior=False):
    """``fisher`` after the guard has seen ``gradient``."""
    slot = SimpleNamespace(fisher=fisher, coordinates=gradient)
    raise_fishers([slot], [(0.0 if prior else damping) + extra], 0.03, torch.tensor(1.0))
    return {name: value.clone() for name, value in fisher.state().items()}


def before(fisher):
    return {name: value.clone() for name, value in fisher.state().items()}


@pytest.mark.parametrize("structure", [Eigen, Diagonal, Kronecker])
def test_of_several_models_only_the_surprised_one_changes(structure):
    fisher = structure((2, 3, 4), init=1e-6)
    was = before(fisher)
    G = torch.full((2, 3, 4), 0.01)  # more than R allows for, but not than R + γ
    G[1] *= 1000
    now = guarded(fisher, G)
    names = [name for name in now if not torch.equal(now[name], was[name])]
    assert names
    for name in names:
        assert torch.equal(now[name][0], was[name][0])


def test_extrinsic_damping_counts_beside_an_earlier_posterior_too():
    for prior in (False, True):
        fisher = Eigen((3, 4), init=1.0)
        was = before(fisher)
        assert torch.equal(guarded(fisher, torch.full((3, 4), 10.0), extra=3.0, prior=prior)["R"], was["R"])
    assert not torch.equal(guarded(fisher, torch.full((3, 4), 10.0), prior=True)["R"], was["R"])


@pytest.mark.parametrize("structure", [Eigen, Diagonal, Kronecker])
@pytest.mark.parametrize("size", [1e8, 1e15, 1e19])
def test_no_gradient_is_too_large_to_be_written_down(structure, size):
    fisher = structure((3, 4), dtype=torch.float32, init=1.0)
    for _ in range(4):
        guarded(fisher, torch.full((3, 4), size, dtype=torch.float32))
    assert all(torch.isfinite(value).all() for value in fisher.state().values())
    assert torch.isfinite(fisher.spectrum(0.04)).all()


@pytest.mark.parametrize("method", ["NoisyEKFAC", "NoisyAdam", "NoisyKFAC"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_after_one_absurd_batch_training_goes_on(method, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x, y = torch.randn(60, 4, dtype=dtype), torch.randint(3, (60,))
    make = getattr(en, method)
    generator = torch.Generator().manual_seed(0)
    options = {"lr": 0.05, "kl_weight": 0.1, "not_finite": "skip", "generator": generator}
    opt = make(model, num_data=60, likelihood=en.CategoricalLikelihood(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for k in range(300):
            step(model, opt, x * (1e20 if k == 15 else 1), y)
    for slot in opt.slots:
        assert all(torch.isfinite(value).all() for value in slot.fisher.state().values())
    with torch.no_grad():
        assert opt.likelihood.nll(model(x), y) < 1.0  # of guesses 1.1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nothing_is_raised_for_a_step_that_cannot_be_made(bad):
    model, opt = regression("NoisyEKFAC", stats_every=50)
    for _ in range(3):
        step(model, opt, *calm())
    before = [slot.fisher.R.clone() for slot in opt.slots]
    x, y = calm()
    with pytest.raises(FloatingPointError):
        step(model, opt, 1e6 * x, y * bad)
    assert all(torch.equal(slot.fisher.R, was) for slot, was in zip(opt.slots, before, strict=True))


@pytest.mark.parametrize("method", ["EKFAC", "KFAC"])
def test_without_noise_extrinsic_damping_is_protection_enough(method, monkeypatch):
    """With λ = 0 directions without any curvature would surprise at every step."""
    raised = []
    for structure in (Eigen, Kronecker):
        monkeypatch.setattr(structure, "raise_to", lambda self, G, rate, damping: raised.append(1))
    model, opt = regression(method, kl_weight=0.0, damping=1.0, ema_scale=0.2)
    for _ in range(100):
        step(model, opt, *calm())
    x, y = calm()
    step(model, opt, x + 0.1, y)  # the second input is no longer zero
    assert not raised
