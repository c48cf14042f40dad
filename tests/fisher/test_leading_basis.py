"""The leading eigenvectors of a side, completed to an orthogonal basis by reflections."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eigenoise as en
from dense import categorical_fisher, diagonal_in_basis, fisher_block
from eigenoise.fisher import BasisOptions, Eigen
from eigenoise.fisher.bases import FullBasis, IdentityBasis
from eigenoise.fisher.kronecker_factors import KroneckerFactors
from eigenoise.fisher.leading_basis import LeadingBasis

SIZE, RANK = 12, 4
TOL = {"rtol": 1e-9, "atol": 1e-10}


def learned(lead=(), refreshes=60):
    """A basis of moments with eigenvalues 1, 1/4, 1/9, ..."""
    basis = LeadingBasis(lead, SIZE, RANK, None, {"dtype": torch.float64})
    q = torch.linalg.qr(torch.randn(*lead, SIZE, SIZE))[0]
    rows = torch.diag_embed(1.0 / torch.arange(1, SIZE + 1).expand(*lead, SIZE)) @ q.mT
    basis.update(rows.unsqueeze(-2), 1)
    basis.commit(1.0, first=False)
    for _ in range(refreshes):
        basis.set_basis(basis.decompose())
    return basis


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_it_is_orthogonal_and_begins_with_the_leading_eigenvectors(lead):
    basis = learned(lead)
    Q = basis.matrix()
    torch.testing.assert_close(Q.mT @ Q, torch.eye(SIZE).expand_as(Q), **TOL)
    values, vectors = torch.linalg.eigh(basis.moments)
    leading = vectors[..., -RANK:]
    torch.testing.assert_close((leading.mT @ Q[..., :RANK]).abs(), torch.eye(RANK).expand(*lead, RANK, RANK), **TOL)
    torch.testing.assert_close(basis.values[..., :RANK], values[..., -RANK:], **TOL)
    torch.testing.assert_close(basis.values, (Q.mT @ basis.moments @ Q).diagonal(dim1=-2, dim2=-1), **TOL)


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_rotations_are_products_with_its_matrix(lead):
    basis = learned(lead, refreshes=1)
    Q, x = basis.matrix(), torch.randn(*lead, 5, SIZE)
    columns = x.mT.contiguous()
    torch.testing.assert_close(basis.rotate(x), x @ Q, **TOL)
    torch.testing.assert_close(basis.unrotate(x), x @ Q.mT, **TOL)
    torch.testing.assert_close(basis.rotate_columns(columns), Q.mT @ columns, **TOL)
    torch.testing.assert_close(basis.unrotate_columns(columns), Q @ columns, **TOL)
    batch = torch.randn(*lead, 3, SIZE, 5)
    torch.testing.assert_close(basis.rotate_columns(batch), Q.unsqueeze(-3).mT @ batch, **TOL)


@pytest.mark.parametrize("name", ["unrotate", "rotate_columns", "unrotate_columns"])
def test_memory_is_reused_only_when_that_is_allowed(name):
    rotate = getattr(learned((), refreshes=1), name)
    x = torch.randn(SIZE, SIZE)
    before = x.clone()
    expected = rotate(x)
    torch.testing.assert_close(x, before, atol=0, rtol=0)
    result = rotate(x, overwrite=True)
    assert result.data_ptr() == x.data_ptr()
    torch.testing.assert_close(result, expected, **TOL)


def test_a_change_of_basis_is_that_of_its_matrices():
    basis = learned(refreshes=1)
    old = basis.matrix()
    change = basis.set_basis(basis.decompose())
    P = basis.matrix().mT @ old
    x = torch.rand(3, SIZE)
    assert not torch.allclose(P, torch.eye(SIZE))
    torch.testing.assert_close(change.rotate(x), x @ P.mT, **TOL)
    torch.testing.assert_close(change.rotate_variances(x), x @ P.square().mT, **TOL)


def test_vectors_along_the_axes_need_no_reflection():
    basis = LeadingBasis((), SIZE, RANK, None, {"dtype": torch.float64})
    basis.set_basis([torch.eye(SIZE, RANK)])
    Q = basis.matrix()
    torch.testing.assert_close(Q.abs(), torch.eye(SIZE), **TOL)


def test_moments_of_less_rank_than_the_basis():
    basis = LeadingBasis((), SIZE, RANK, None, {"dtype": torch.float64})
    basis.update(torch.randn(2, 1, SIZE), 2)
    basis.commit(1.0, first=False)
    basis.set_basis(basis.decompose())
    Q = basis.matrix()
    torch.testing.assert_close(Q.mT @ Q, torch.eye(SIZE), **TOL)
    torch.testing.assert_close(basis.values.sum(), basis.moments.trace(), **TOL)


def test_moments_that_are_not_finite_leave_the_basis_as_it_is():
    fisher = Eigen((3, SIZE), basis=BasisOptions(rank=0.25))
    fisher.update(torch.randn(5, 1, SIZE), torch.randn(5, 1, 3))
    fisher.commit(0.5, 0.5)
    assert fisher.refresh()
    before = fisher.factors.q_in
    fisher.factors.inputs.moments[0, 0] = float("nan")
    assert not fisher.refresh()
    assert torch.equal(fisher.factors.q_in, before)


def test_which_basis_a_side_gets():
    auto = BasisOptions(rank="auto", max_side=3000)
    assert isinstance(auto.make((), 255, None, {}), FullBasis)
    assert isinstance(auto.make((), 3001, None, {}), IdentityBasis)
    for size, rank in ((256, 32), (785, 49), (2305, 144)):
        basis = auto.make((), size, None, {})
        assert isinstance(basis, LeadingBasis)
        assert basis.rank == rank
    assert isinstance(BasisOptions(rank=0.5).make((), 300, None, {}), FullBasis)  # it would be no cheaper
    assert BasisOptions(rank=0.01).make((), 12, None, {}).rank == 1


def test_it_is_cheaper_than_the_full_one():
    full, leading = (KroneckerFactors((256, 2305), 1.0, {}, BasisOptions(rank=rank)) for rank in (1.0, "auto"))
    assert leading.inputs.rotation_cost * 7 < full.inputs.rotation_cost
    assert leading.decomposition_cost * 5 < full.decomposition_cost


@pytest.mark.parametrize("rank", [0, -0.1, 1.5, float("nan"), "half", None])
def test_a_rank_that_is_no_share_is_refused(rank):
    with pytest.raises((ValueError, TypeError), match="basis_rank"):
        en.NoisyEKFAC(network(), num_data=90, likelihood="classification", basis_rank=rank)


# In training.


def network():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 10), nn.Linear(10, 3)
    )


def build(method=en.EKFAC, **options):
    torch.manual_seed(2)
    model = network()
    x, y = torch.randn(30, 2, 4, 5), torch.randint(3, (30,))
    options = {"lr": 0.02, "stats_every": 2, "generator": torch.Generator().manual_seed(4), **options}
    return method(model, num_data=90, likelihood="classification", basis_rank=0.25, **options), x, y


def train(opt, x, y, steps=1):
    for _ in range(steps):
        with opt.sampled_params():
            opt.zero_grad()
            opt.likelihood.nll(opt.model(x), y).backward()
        opt.step()


def test_the_scale_is_the_exact_fishers_in_that_basis():
    averages = {"ema_factors": 1.0, "ema_scale": 1.0, "stats_fraction": 1.0, "stats_every": 1, "lr": 0.0}
    opt, x, y = build(fisher="exact", **averages)
    train(opt, x, y, steps=2)
    for slot in opt.slots:
        factors = slot.fisher.factors
        assert isinstance(factors.inputs, LeadingBasis)
        block = fisher_block(opt.model, slot.name, x, categorical_fisher)
        torch.testing.assert_close(slot.fisher.R, diagonal_in_basis(block, factors.q_out, factors.q_in))


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped():
    whole, x, y = build(en.NoisyEKFAC, refresh_every=3)
    train(whole, x, y, steps=10)
    first, _, _ = build(en.NoisyEKFAC, refresh_every=3)
    train(first, x, y, steps=5)
    second, _, _ = build(en.NoisyEKFAC, refresh_every=3)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    train(second, x, y, steps=5)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a.detach(), b.detach())


def test_a_checkpoint_of_another_basis_is_refused():
    leading, x, y = build(en.NoisyEKFAC)
    train(leading, x, y)
    full = en.NoisyEKFAC(network(), num_data=90, likelihood="classification")
    with pytest.raises(ValueError, match="q_in"):
        full.load_state_dict(leading.state_dict())


def test_print_says_which_sides_have_it():
    opt, _, _ = build()
    assert "5 leading eigenvectors for 19 inputs" in next(line for line in str(opt).splitlines() if "0.weight" in line)
