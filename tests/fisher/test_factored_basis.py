"""The factored basis of convolutions: an orthogonal matrix like any other, statistics that are exact in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eigenoise as en
from dense import categorical_fisher, diagonal_in_basis, fisher_block
from eigenoise.fisher.factored_basis import FactoredBasis
from eigenoise.fisher.kronecker_factors import BasisOptions, KroneckerFactors

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
TAPS, C = 4, 3
SIZES = {"with bias": TAPS * C + 1, "without": TAPS * C}
every_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
LEADS = pytest.mark.parametrize("lead", [(), (2,)], ids=str)


def patches(lead, size, rows=40):
    x = torch.randn(*lead, rows, size, size) @ torch.randn(*lead, 1, size, size)
    x[..., TAPS * C :] = 1.0
    return x


def side(lead, size, updates=1):
    """One that has seen data and has a basis from it."""
    made = FactoredBasis(lead, size, (C, TAPS), 1.0, {})
    for _ in range(updates):
        learn(made, patches(lead, size))
    return made


def learn(made, x, ema=0.5):
    made.update(x, x.shape[-3] * x.shape[-2])
    made.commit(ema, first=False)
    return made.set_basis(made.decompose())


@LEADS
@every_size
def test_the_basis_is_an_orthogonal_matrix(lead, size):
    made = side(lead, size)
    Q = made.matrix()
    assert Q.shape == (*lead, size, size)
    torch.testing.assert_close(Q @ Q.mT, torch.eye(size).expand_as(Q), **CLOSE)
    assert not torch.allclose(Q, torch.eye(size))
    x = torch.randn(*lead, 7, size)
    torch.testing.assert_close(made.rotate(x), x @ Q, **CLOSE)
    torch.testing.assert_close(made.unrotate(x), x @ Q.mT, **CLOSE)
    torch.testing.assert_close(made.rotate_columns(x.mT), Q.mT @ x.mT, **CLOSE)
    torch.testing.assert_close(made.unrotate_columns(x.mT), Q @ x.mT, **CLOSE)


@LEADS
@every_size
def test_a_change_of_basis_is_that_of_the_matrices(lead, size):
    made = side(lead, size)
    old = made.matrix()
    change = learn(made, patches(lead, size))
    P = made.matrix().mT @ old
    assert not torch.allclose(P.abs(), torch.eye(size), atol=0.1)
    x = torch.randn(*lead, 5, size)
    torch.testing.assert_close(change.rotate(x), x @ P.mT, **CLOSE)
    torch.testing.assert_close(change.rotate_variances(x), x @ P.square().mT, **CLOSE)


@every_size
def test_moments_are_those_of_the_modes(size):
    made = side((), size)
    x = patches((), size)
    Q, U = made.matrix(), made.q.taps
    made.update(x, x.shape[0] * x.shape[1])
    made.commit(1.0, first=False)
    A = (x.mT @ x).mean(0) / x.shape[1]
    torch.testing.assert_close(made.diagonal(), (Q.mT @ A @ Q).diagonal(), **CLOSE)
    body = A[: TAPS * C, : TAPS * C].reshape(C, TAPS, C, TAPS)
    torch.testing.assert_close(made.tap_moments, torch.einsum("isit->st", body), **CLOSE)
    torch.testing.assert_close(made.moments, torch.einsum("isjt,sm,tm->mij", body, U, U), **CLOSE)


@every_size
def test_moments_that_factorise_are_diagonal_in_the_basis(size):
    roots = [torch.linalg.cholesky(torch.cov(torch.randn(k, 3 * k))) for k in (C, TAPS)]
    body = torch.linalg.cholesky(torch.kron(*(root @ root.mT for root in roots)))
    x = torch.zeros(TAPS * C, 1, size)  # whose moments are just that product
    x[:, 0, : TAPS * C] = body.mT * (TAPS * C) ** 0.5
    x[..., TAPS * C :] = 0.0
    made = FactoredBasis((), size, (C, TAPS), 1.0, {})
    for _ in range(2):  # first the taps, then the channels of their modes
        learn(made, x, ema=1.0)
    inside = made.matrix().mT @ (x[:, 0].mT @ x[:, 0] / (TAPS * C)) @ made.matrix()
    torch.testing.assert_close(inside, torch.diag_embed(made.values), rtol=1e-8, atol=1e-8)


def test_it_is_cheaper_than_the_full_one():
    full, factored = (
        KroneckerFactors((256, 2305), 1.0, {}, BasisOptions(kernel=kernel)) for kernel in (None, (256, 9))
    )
    assert factored.inputs.rotation_cost * 8 < full.inputs.rotation_cost
    assert factored.decomposition_cost * 50 < full.decomposition_cost
    full_size, factored_size = (sum(t.numel() for t in f.inputs.state("A", "in").values()) for f in (full, factored))
    assert factored_size * 8 < full_size


# In training.


def network():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, (1, 2), groups=2, bias=False),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def build(method=en.EKFAC, **options):
    torch.manual_seed(2)
    model = network()
    x, y = torch.randn(30, 2, 4, 5), torch.randint(3, (30,))
    options = {"lr": 0.02, "stats_every": 2, "generator": torch.Generator().manual_seed(4), **options}
    opt = method(model, num_data=90, likelihood=en.CategoricalLikelihood(), conv_basis="factored", **options)
    return opt, x, y


def train(opt, x, y, steps=1):
    for _ in range(steps):
        with opt.sampled_params():
            opt.zero_grad()
            opt.likelihood.nll(opt.model(x), y).backward()
        opt.step()


def test_the_scale_is_the_exact_fishers_in_that_basis():
    averages = {
        "ema_factors": 1.0,
        "ema_scale": 1.0,
        "stats_fraction": 1.0,
        "stats_every": 1,
        "refresh_every": 100,
        "lr": 0.0,
    }
    opt, x, y = build(fisher="exact", **averages)
    train(opt, x, y, steps=2)
    for slot in opt.slots:
        factors = slot.fisher.factors
        assert isinstance(factors.inputs, FactoredBasis) == (slot.name in "02")
        block = fisher_block(opt.model, slot.name, x, categorical_fisher)
        wanted = diagonal_in_basis(block, factors.q_out, factors.q_in)
        torch.testing.assert_close(slot.fisher.R, wanted, **CLOSE)


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped():
    whole, x, y = build(en.NoisyEKFAC, refresh_every=3)
    train(whole, x, y, steps=10)
    first, _, _ = build(en.NoisyEKFAC, refresh_every=3)
    train(first, x, y, steps=5)
    kept = first.model.state_dict(), first.state_dict()
    second, _, _ = build(en.NoisyEKFAC, refresh_every=3)
    second.model.load_state_dict(kept[0])
    second.load_state_dict(kept[1])
    train(second, x, y, steps=5)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a.detach(), b.detach())


def test_a_checkpoint_of_the_other_basis_is_refused():
    factored, x, y = build(en.NoisyEKFAC)
    train(factored, x, y)
    full = en.NoisyEKFAC(network(), num_data=90, likelihood=en.CategoricalLikelihood())
    with pytest.raises(ValueError, match=r"A|0"):
        full.load_state_dict(factored.state_dict())


def test_a_convolution_of_one_tap_keeps_its_bias_apart():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 2))
    opt = en.EKFAC(model, num_data=90, likelihood=en.CategoricalLikelihood(), conv_basis="factored", stats_every=1)
    train(opt, torch.randn(9, 3, 2, 2), torch.randint(2, (9,)), steps=2)
    Q = opt.slots[0].fisher.factors.q_in
    assert torch.equal(Q[-1], torch.tensor([0.0, 0.0, 0.0, 1.0]))
    assert not torch.allclose(Q, torch.eye(4))


def test_the_name_of_a_basis_is_checked():
    with pytest.raises(ValueError, match="conv_basis must be one of 'full', 'factored', got 'taps'"):
        en.NoisyEKFAC(network(), num_data=90, likelihood=en.CategoricalLikelihood(), conv_basis="taps")
    with pytest.raises(TypeError, match="conv_basis"):
        en.NoisyAdam(network(), num_data=90, likelihood=en.CategoricalLikelihood(), conv_basis="factored")
