"""The guard: gradients that a Fisher does not expect raise it before the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eigenoise as en
from eigenoise.fisher import Diagonal, Eigen, Kronecker

METHODS = ["NoisyEKFAC", "EKFAC", "NoisyAdam", "NoisyKFAC", "KFAC"]


def regression(method, **options):
    """Two inputs, the second of which is zero in the data at hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    likelihood = en.GaussianLikelihood(precision=1.0)
    generator = torch.Generator().manual_seed(1)
    opt = getattr(en, method)(model, num_data=100, likelihood=likelihood, generator=generator, **options)
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
    for guard in (False, True):
        model, opt = regression(method, guard=guard)
        for _ in range(60):
            step(model, opt, *calm())
        runs.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*runs)


def surprised(method, *, guard, quiet=400):
    """How far one batch with a large second input moves its weights, which were flat until then, and their noise."""
    model, opt = regression(method, guard=guard, lr=0.05, kl_weight=0.01, ema_scale=0.2, layer_clip=None)
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
    fisher.expect(G, 0.03, 0.5)
    torch.testing.assert_close(fisher.spectrum(0.0), (0.03 * G**2).clamp_min(0.1))
    assert strain(fisher, G, 0.5) < 1 / 0.03


def kronecker(lead=(), kernel=None):
    """With factors of random data and a basis of them."""
    fisher = Kronecker((*lead, 3, 4), kernel=kernel)
    fisher.update(torch.randn(*lead, 50, 1, 4), torch.randn(*lead, 50, 1, 3))
    fisher.commit(1.0, 1.0)
    assert fisher.refresh()
    return fisher


def test_kfacs_factors_take_in_what_a_matrix_normal_gradient_says_of_them():
    fisher = kronecker()
    A, S = fisher.factors.inputs.moments.clone(), fisher.factors.out.moments.clone()
    G = 100 * torch.randn(3, 4)
    eye = torch.eye(4), torch.eye(3)
    fisher.expect(fisher.rotate(G), 0.03, 0.04)
    wanted_S = S + 0.03 / 4 * G @ torch.linalg.inv(A + 0.2 * eye[0]) @ G.mT
    wanted_A = A + 0.03 / 3 * G.mT @ torch.linalg.inv(S + 0.2 * eye[1]) @ G
    torch.testing.assert_close(fisher.factors.out.moments, wanted_S)
    torch.testing.assert_close(fisher.factors.inputs.moments, wanted_A)
    basis = fisher.factors.q_out
    torch.testing.assert_close(fisher.factors.out.values, (basis.mT @ wanted_S @ basis).diagonal())


@pytest.mark.parametrize("kernel", [None, (2, 2)])
def test_kfac_is_surprised_less_from_then_on_and_in_its_next_basis(kernel):
    fisher = kronecker(kernel=kernel)
    G = 100 * torch.randn(3, 4)
    before = strain(fisher, fisher.rotate(G), 0.04)
    fisher.expect(fisher.rotate(G), 0.03, 0.04)
    assert strain(fisher, fisher.rotate(G), 0.04) < 0.1 * before
    assert fisher.refresh()
    assert strain(fisher, fisher.rotate(G), 0.04) < 0.1 * before


def test_of_several_models_only_the_surprised_one_changes():
    fisher = kronecker((2,))
    before = {name: value.clone() for name, value in fisher.state().items()}
    G = torch.randn(2, 3, 4)
    G[1] *= 100
    fisher.expect(G, 0.03, 0.04)
    for name, value in fisher.state().items():
        assert torch.equal(value[0], before[name][0])
    assert not torch.equal(fisher.state()["S"][1], before["S"][1])


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
        monkeypatch.setattr(structure, "expect", lambda self, G, rate, damping: raised.append(1))
    model, opt = regression(method, kl_weight=0.0, damping=1.0, ema_scale=0.2)
    for _ in range(100):
        step(model, opt, *calm())
    x, y = calm()
    step(model, opt, x + 0.1, y)  # the second input is no longer zero
    assert not raised
