"""Every Fisher structure against its own dense matrix, and the dense matrices against autodiff Fishers."""

from __future__ import annotations

import functools
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

from eigenoise import linalg
from eigenoise.fisher import BasisOptions, Diagonal, Eigen, Fisher, Kronecker
from eigenoise.fisher.bases import FullBasis
from eigenoise.fisher.second_moments import gram, squared_gradients
from eigenoise.linalg.moving_average import PendingMean, Product

TOL = {"rtol": 1e-9, "atol": 1e-10}
P, N, B, T = 3, 4, 6, 2
LEADS = [(), (2,), (2, 3)]


def statistics(lead=(), b=B, t=T, v=None):
    a = torch.randn(*lead, b, t, N)
    g = torch.randn(*lead, *(() if v is None else (v,)), b, t, P)
    return a, g


def per_example(a, g):
    """Gradients (..., b, p, n), summed over positions."""
    return g.mT @ a


def fill(fisher: Fisher, lead=(), updates=3, damping_of_start=0.3):
    """A structure that has seen data, with a decomposed basis."""
    for _ in range(updates):
        fisher.update(*statistics(lead))
        fisher.commit(damping_of_start, damping_of_start)
        assert fisher.refresh()
    return fisher


class FisherConformance:
    """What every structure must do; a subclass supplies ``make``."""

    make: ClassVar

    @pytest.fixture(params=LEADS, ids=str)
    def fisher(self, request):
        return fill(type(self).make((*request.param, P, N)), request.param)

    @pytest.mark.parametrize("damping", [1e-3, 0.7])
    def test_solve_inverts_dense(self, fisher, damping):
        V = torch.randn(fisher.shape)
        solved = fisher.solve(V, damping)
        back = fisher.dense(damping) @ solved.flatten(-2).unsqueeze(-1)
        torch.testing.assert_close(back.squeeze(-1), V.flatten(-2), **TOL)

    @pytest.mark.parametrize("damping", [1e-3, 0.7])
    def test_root_is_a_root_of_the_inverse(self, fisher, damping):
        size = P * N
        eye = torch.eye(size).reshape(size, *(1,) * (len(fisher.shape) - 2), P, N)
        L = fisher.root(eye, damping).flatten(-2).movedim(0, -1)
        torch.testing.assert_close(L @ L.mT, torch.linalg.inv(fisher.dense(damping)), **TOL)

    def test_logdet_and_trace(self, fisher):
        dense = fisher.dense(0.2)
        torch.testing.assert_close(fisher.logdet(0.2), torch.logdet(dense), **TOL)
        trace = torch.linalg.inv(dense).diagonal(dim1=-2, dim2=-1).sum(-1)
        torch.testing.assert_close(fisher.inv_trace(0.2), trace, **TOL)

    def test_dense_is_symmetric_positive_definite(self, fisher):
        dense = fisher.dense(1e-3)
        torch.testing.assert_close(dense, dense.mT, **TOL)
        assert torch.linalg.eigvalsh(dense).min() > 0

    def test_posterior_is_the_scaled_inverse(self, fisher):
        loc, scale, damping = torch.randn(fisher.shape), 0.05, 0.3
        q = fisher.posterior(loc, scale, damping)
        dense = MultivariateNormal(loc.flatten(-2), scale * torch.linalg.inv(fisher.dense(damping)))
        W = torch.randn(5, *fisher.shape)
        torch.testing.assert_close(q.log_prob(W), dense.log_prob(W.flatten(-2)), **TOL)
        torch.testing.assert_close(q.variance.flatten(-2), dense.variance, **TOL)

    def test_starts_as_a_multiple_of_the_identity(self):
        for lead in LEADS:
            dense = type(self).make((*lead, P, N), init=2.5).dense(0.0)
            torch.testing.assert_close(dense, 2.5 * torch.eye(P * N).expand_as(dense), **TOL)

    def test_leading_dimensions_are_independent(self):
        a, g = statistics((2, 3))
        together = type(self).make((2, 3, P, N))
        together.update(a, g)
        together.commit(0.5, 0.4)
        assert together.refresh()
        for i in range(2):
            for j in range(3):
                alone = type(self).make((P, N))
                alone.update(a[i, j], g[i, j])
                alone.commit(0.5, 0.4)
                assert alone.refresh()
                torch.testing.assert_close(together.dense(0.1)[i, j], alone.dense(0.1), **TOL)

    def test_passes_of_one_step_are_averaged(self):
        a, g = statistics(b=8)
        whole, halves = type(self).make((P, N)), type(self).make((P, N))
        whole.update(a, g)
        for part in (slice(0, 4), slice(4, 8)):
            halves.update(a[part], g[part])
        for fisher in (whole, halves):
            fisher.commit(0.5, 0.5)
            assert fisher.refresh()
        torch.testing.assert_close(whole.dense(0.1), halves.dense(0.1), **TOL)

    def test_discard_forgets(self):
        fisher = fill(type(self).make((P, N)))
        before = fisher.dense(0.1)
        fisher.update(*statistics())
        assert fisher.pending()
        fisher.discard()
        assert not fisher.pending()
        fisher.commit(0.9, 0.9)
        torch.testing.assert_close(fisher.dense(0.1), before, rtol=0, atol=0)

    def test_a_new_spectrum_is_seen_at_once(self):
        fisher = fill(type(self).make((P, N)))
        V = torch.randn(P, N)
        before = fisher.solve(V, 0.1)
        fisher.update(*statistics())
        fisher.commit(0.9, 0.9)
        assert fisher.refresh()
        assert not torch.allclose(fisher.solve(V, 0.1), before)

    def test_float32_state(self):
        fisher = type(self).make((P, N), dtype=torch.float32)
        fisher.update(*(x.to(torch.bfloat16) for x in statistics()))
        fisher.commit(0.5, 0.5)
        assert fisher.refresh()
        assert {t.dtype for t in fisher.state().values() if t.is_floating_point()} == {torch.float32}
        assert torch.isfinite(fisher.solve(torch.randn(P, N, dtype=torch.float32), 0.1)).all()

    def test_a_direction_never_seen_is_finite_without_damping(self):
        fisher = type(self).make((P, N))
        for _ in range(2):
            a, g = statistics()
            fisher.update(a * torch.tensor([1.0, 1.0, 1.0, 0.0]), g)
            fisher.commit(1.0, 1.0)
            assert fisher.refresh()
        assert torch.isfinite(fisher.solve(torch.randn(P, N), 0.0)).all()
        assert torch.isfinite(fisher.root(torch.randn(P, N), 0.0)).all()


class TestDiagonal(FisherConformance):
    make = Diagonal


class TestKroneckerExact(FisherConformance):
    @staticmethod
    def make(shape, **options):
        return Kronecker(shape, damping_form="exact", **options)


class TestKroneckerFactored(FisherConformance):
    @staticmethod
    def make(shape, **options):
        return Kronecker(shape, damping_form="factored", **options)


class TestEigen(FisherConformance):
    make = Eigen


class TestEigenFromTheIdentity(FisherConformance):
    make = functools.partial(Eigen, init=1.0)

    def test_starts_as_a_multiple_of_the_identity(self):
        dense = Eigen((P, N), init=2.5).dense(0.0)
        torch.testing.assert_close(dense, 2.5 * torch.eye(P * N), **TOL)


class TestEigenWithLeadingVectors(FisherConformance):
    make = functools.partial(Eigen, basis=BasisOptions(rank=0.25))


class TestKroneckerWithLeadingVectors(FisherConformance):
    make = functools.partial(Kronecker, basis=BasisOptions(rank=0.25))


class TestEigenWithSidesTooLarge(FisherConformance):
    make = functools.partial(Eigen, basis=BasisOptions(max_side=N - 1))

    def test_only_the_large_side_keeps_the_identity(self, fisher):
        assert torch.equal(fisher.factors.q_in, torch.eye(N).expand_as(fisher.factors.q_in))
        assert not torch.equal(fisher.factors.q_out, torch.eye(P).expand_as(fisher.factors.q_out))


class TestKroneckerWithSidesTooLarge(FisherConformance):
    make = functools.partial(Kronecker, basis=BasisOptions(max_side=1))

    def test_it_is_the_outer_product_of_the_diagonals(self, fisher):
        out, inputs = fisher.factors.out.values, fisher.factors.inputs.values
        torch.testing.assert_close(fisher.dense(0.0).diagonal(dim1=-2, dim2=-1), linalg.outer(out, inputs).flatten(-2))


# What the statistics are.


def value(total):
    return total.value() if isinstance(total, Product) else total


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_a_product_blends_as_its_value_does(rows, lead):
    product = Product(torch.randn(*lead, rows, P), torch.randn(*lead, rows, N))
    average = torch.randn(*lead, P, N)
    expected = 0.7 * average + 0.3 * (product.value() + 1.0) / 5
    mean = PendingMean()
    mean.add(product, 3)
    assert bool(mean.products) == (rows == 1 and len(lead) < 2)
    mean.add(torch.ones(*lead, P, N), 2)
    assert all(torch.isfinite(number).all() for number in mean.pending())
    assert mean.blend_into(average, 0.3)
    torch.testing.assert_close(average, expected)
    assert not mean.pending()
    assert not mean.blend_into(average, 0.3)


def test_large_moments_are_multiplied_out_up_to_the_diagonal_only(monkeypatch):
    monkeypatch.setattr("eigenoise.linalg.moving_average.HALVED", N)
    side, x = FullBasis((), N, 1.0, {}), torch.randn(3, 1, N)
    for _ in range(2):  # what is above is brought up to date whenever someone looks, so both halves go on
        side.update(x, 3)
        side.update(torch.ones(50, 1, N), 50)  # so many that they are multiplied out
        before = side.moments.clone()
        side.commit(0.3, first=False)
        assert not torch.equal(side._gram._average.value, side._gram._average.value.mT)
        wanted = 0.7 * before + 0.3 * (x[:, 0].mT @ x[:, 0] + 50) / 53
        torch.testing.assert_close(side.moments, wanted)
        side.commit(0.5, first=False)
        torch.testing.assert_close(side.moments, wanted)


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("parts", ["nothing", "total", "products", "both"])
def test_a_gathered_sum_is_written_whatever_the_memory_held(monkeypatch, halved, parts):
    monkeypatch.setattr("eigenoise.linalg.moving_average.HALVED", N if halved else 512)
    mean, wanted = PendingMean(), torch.zeros(N, N)
    if parts in ("total", "both"):
        mean.add(torch.full((N, N), 2.0), 1)
        wanted += 2
    if parts in ("products", "both"):
        for _ in range(2):
            x = torch.randn(1, N)
            mean.add(Product(x, x), 1)
            wanted += x.mT @ x
    out = torch.full((N, N), torch.nan)
    mean.write_to(out)
    torch.testing.assert_close(out, wanted)


def test_a_product_that_overflows_is_noticed():
    product = Product(torch.full((1, P), 1e200), torch.full((1, N), 1e200))
    assert not torch.isfinite(product.bound())


def rotated_side(size, lead=()):
    """A side with some basis."""
    side = FullBasis(lead, size, 1.0, {})
    side.q.copy_(torch.linalg.qr(torch.randn(*lead, size, size))[0])
    return side


@pytest.mark.parametrize("t", [1, 2, 9])
@pytest.mark.parametrize("v", [None, 3])
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_squared_gradients_are_of_sums_over_positions(t, v, lead):
    a, g = statistics(lead, t=t, v=v)
    out, inputs = rotated_side(P, lead), rotated_side(N, lead)
    q_out, q_in = out.q, inputs.q
    each = per_example(a if v is None else a.unsqueeze(-4), g)
    for basis in ((None, None), (out, inputs)):
        turned = each
        if basis[0] is not None:
            extra = each.ndim - q_out.ndim
            reshape = lambda q, extra=extra: q.reshape(*lead, *(1,) * extra, *q.shape[-2:])  # noqa: E731
            turned = linalg.rotate(reshape(q_out), each, reshape(q_in))
        expected = turned.square().sum(tuple(range(len(lead), each.ndim - 2)))
        vectors = g if v is not None else g.unsqueeze(-4)
        torch.testing.assert_close(value(squared_gradients(a, vectors, *basis)), expected, **TOL)


def test_squared_gradients_in_chunks(monkeypatch):
    a, g = statistics(b=7, t=9, v=1)
    out, inputs = rotated_side(P), rotated_side(N)
    whole = value(squared_gradients(a, g, out, inputs))
    monkeypatch.setattr("eigenoise.fisher.second_moments.MAX_NUMBERS_PER_CHUNK", 2 * P * N)
    torch.testing.assert_close(value(squared_gradients(a, g, out, inputs)), whole, **TOL)


def test_the_square_of_the_mean_gradient_would_be_wrong():
    a, g = statistics(t=1)
    of_mean = per_example(a, g).mean(0).square()
    assert not torch.allclose(value(squared_gradients(a, g.unsqueeze(0))) / B, of_mean, rtol=0.1)


def test_gram():
    a, _ = statistics((2,))
    torch.testing.assert_close(gram(a).value(), torch.einsum("sbti,sbtj->sij", a, a), **TOL)


def test_moving_averages_follow_eq_12():
    beta, omega = 0.2, 0.3
    fisher = Eigen((P, N), init=1.0)
    a, g = statistics()
    A, S, R = fisher.factors.inputs.moments.clone(), fisher.factors.out.moments.clone(), fisher.R.clone()
    fisher.update(a, g)
    fisher.commit(beta, omega)
    flat_a, flat_g = a.flatten(0, 1), g.flatten(0, 1)
    torch.testing.assert_close(
        fisher.factors.inputs.moments, (1 - beta) * A + beta * flat_a.mT @ flat_a / (B * T), **TOL
    )
    torch.testing.assert_close(fisher.factors.out.moments, (1 - beta) * S + beta * flat_g.mT @ flat_g / B, **TOL)
    torch.testing.assert_close(fisher.R, (1 - omega) * R + omega * per_example(a, g).square().mean(0), **TOL)


def test_terms_rescale_the_gradient_statistics_only():
    a, g = statistics()
    one, many = Eigen((P, N), init=1.0), Eigen((P, N), init=1.0)
    one.update(a, g)
    many.update(a, g, terms=B * T)
    for fisher in (one, many):
        fisher.commit(1.0, 1.0)
    torch.testing.assert_close(many.factors.inputs.moments, one.factors.inputs.moments, **TOL)
    torch.testing.assert_close(many.factors.out.moments * T, one.factors.out.moments, **TOL)
    torch.testing.assert_close(many.R * T, one.R, **TOL)


def test_factors_and_scale_can_be_asked_for_apart():
    a, g = statistics()
    fisher = Eigen((P, N), init=1.0)
    fisher.update(a, g, factors=False)
    fisher.commit(1.0, 1.0)
    torch.testing.assert_close(fisher.factors.inputs.moments, torch.eye(N), **TOL)
    assert not torch.allclose(fisher.R, torch.ones(P, N))
    fisher.update(a, g, scale=False)
    R = fisher.R.clone()
    fisher.commit(1.0, 1.0)
    torch.testing.assert_close(fisher.R, R, rtol=0, atol=0)
    assert not torch.allclose(fisher.factors.inputs.moments, torch.eye(N))


# How the structures relate to each other and to the truth.


def test_exact_damping_adds_to_products_and_factored_damping_does_not():
    exact = fill(Kronecker((P, N), damping_form="exact"))
    factored = Kronecker((P, N), damping_form="factored")
    for name, tensor in factored.state().items():
        tensor.copy_(exact.state()[name])
    damping, S, A = 0.3, exact.factors.out.moments, exact.factors.inputs.moments
    torch.testing.assert_close(exact.dense(damping), torch.kron(S, A) + damping * torch.eye(P * N), **TOL)
    pi = ((A.trace() / N) / (S.trace() / P)).sqrt()
    split = torch.kron(S + damping**0.5 / pi * torch.eye(P), A + damping**0.5 * pi * torch.eye(N))
    torch.testing.assert_close(factored.dense(damping), split, **TOL)
    # The cross terms make the factored form more certain in every direction.
    assert torch.linalg.eigvalsh(factored.dense(damping) - exact.dense(damping)).min() > 0


@pytest.mark.parametrize("form", ["exact", "factored"])
def test_eigen_with_kfac_eigenvalues_is_kfac(form):
    kronecker, eigen = Kronecker((P, N), damping_form=form), Eigen((P, N), damping_form=form)
    a, g = statistics()
    for fisher in (kronecker, eigen):
        fisher.update(a, g)
        fisher.commit(0.5, 0.5)
        assert fisher.refresh()
    eigen.reinitialise(0.1)
    torch.testing.assert_close(eigen.dense(0.1), kronecker.dense(0.1), **TOL)
    V = torch.randn(P, N)
    torch.testing.assert_close(eigen.solve(V, 0.1), kronecker.solve(V, 0.1), **TOL)


@pytest.mark.parametrize("rank", [1.0, 0.25])
def test_r_starts_as_the_kfac_eigenvalues_of_the_first_basis(rank):
    basis = BasisOptions(rank=rank)
    kronecker, eigen = Kronecker((P, N), basis=basis), Eigen((P, N), basis=basis)
    for k in range(2):
        a, g = statistics()
        for fisher in (kronecker, eigen):
            fisher.update(a, g)
            fisher.commit(0.5, 0.5)
            assert fisher.refresh()
        if k == 0:
            torch.testing.assert_close(eigen.dense(0.1), kronecker.dense(0.1), **TOL)
            again = Eigen((P, N), basis=basis)
            for name, tensor in again.state().items():
                tensor.copy_(eigen.state()[name])
            again.forget_cache()
            a, g = statistics()
            for fisher in (eigen, again):
                fisher.update(a, g)
                fisher.commit(0.1, 0.1)
                assert fisher.refresh()
            assert torch.equal(again.R, eigen.R)
    assert not torch.allclose(eigen.dense(0.1), kronecker.dense(0.1))


def test_a_change_of_basis_keeps_the_diagonal_of_the_same_matrix():
    fisher = fill(Eigen((P, N)), updates=2)
    before = fisher.dense(0.0)
    fisher.update(*statistics(), scale=False)
    fisher.commit(0.8, 0.8)
    assert fisher.refresh()
    Q = torch.kron(fisher.factors.q_out, fisher.factors.q_in)
    torch.testing.assert_close(fisher.R.flatten(), (Q.mT @ before @ Q).diagonal(), **TOL)
    torch.testing.assert_close(fisher.R.sum(), before.trace(), **TOL)


def test_a_failed_decomposition_keeps_the_old_one(monkeypatch):
    for fisher in (fill(Eigen((P, N))), fill(Kronecker((P, N)))):
        before = {name: t.clone() for name, t in fisher.state().items()}
        monkeypatch.setattr(linalg, "eigh_psd", lambda matrix: None)
        assert not fisher.refresh()
        monkeypatch.undo()
        for name, tensor in fisher.state().items():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_ekfac_is_never_farther_from_the_truth_than_kfac(seed):
    torch.manual_seed(seed)
    a = torch.randn(B, T, N).exp() - 1  # correlated with g, so that the Kronecker assumption fails
    g = torch.randn(B, T, P) * a[..., :1]
    each = per_example(a, g).flatten(1)
    truth = each.mT @ each / B
    kronecker, eigen = Kronecker((P, N), init=1.0), Eigen((P, N), init=1.0)
    for fisher in (kronecker, eigen):
        fisher.update(a, g)
        fisher.commit(1.0, 1.0)
        assert fisher.refresh()
    eigen.update(a, g)  # R in the new basis
    eigen.commit(1.0, 1.0)
    distance = {type(f).__name__: torch.linalg.norm(f.dense(0.0) - truth) for f in (kronecker, eigen)}
    assert distance["Eigen"] <= distance["Kronecker"] * (1 + 1e-12)
    assert distance["Eigen"] < 0.999 * distance["Kronecker"]


def test_kfac_is_exact_for_a_deep_linear_network():
    """With white inputs' second moment arbitrary and one output's squared loss, g does not depend on a."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    x = torch.randn(7, 5)
    weights = [layer.weight.detach() for layer in model]
    inputs = [x, x @ weights[0].mT, x @ weights[0].mT @ weights[1].mT]
    tails = [weights[2] @ weights[1], weights[2], torch.eye(2)]
    for i, layer in enumerate(model):
        jacobian = torch.func.jacrev(lambda w, i=i: torch.func.functional_call(model, {f"{i}.weight": w}, (x,)))(
            layer.weight.detach()
        ).flatten(2)  # (b, outputs, pn)
        truth = torch.einsum("boi,boj->ij", jacobian, jacobian) / len(x)
        fisher = Kronecker(tuple(layer.weight.shape), init=1.0)
        g = tails[i].unsqueeze(1).unsqueeze(1).expand(2, len(x), 1, -1)  # one vector for each output
        fisher.update(inputs[i].unsqueeze(1), g)
        fisher.commit(1.0, 1.0)
        assert fisher.refresh()
        torch.testing.assert_close(fisher.dense(0.0), truth, **TOL)


@pytest.mark.parametrize("structure", [Diagonal, Eigen])
def test_update_from_sum_is_unbiased_for_independent_scores(structure):
    torch.manual_seed(2)
    jacobian = torch.randn(20, P, N)
    fisher = structure((P, N), init=1.0)
    draws = 4000
    for _ in range(draws):
        fisher.update_from_sum((torch.randn(20, 1, 1) * jacobian).sum(0, keepdim=True), terms=20)
    fisher.commit(1.0, 1.0)
    expected = jacobian.square().mean(0)
    # A squared normal has a relative standard deviation of √2.
    spectrum = fisher.spectrum(0.0)
    assert ((spectrum - expected).abs() < 5 * 2**0.5 * expected / draws**0.5).all()


@pytest.mark.parametrize("bad", ["other", None, 1])
def test_damping_form_is_checked(bad):
    with pytest.raises(ValueError, match="damping_form must be one of 'exact', 'factored'"):
        Kronecker((P, N), damping_form=bad)


@pytest.mark.parametrize("structure", [Diagonal, Kronecker, Eigen])
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_without_init_it_starts_from_the_first_statistics(structure, lead):
    fisher = structure((*lead, P, N))
    assert fisher.is_empty
    torch.testing.assert_close(fisher.dense(0.3), 0.3 * torch.eye(P * N).expand(*lead, -1, -1))
    means, size = [], 1e-6
    for k in range(4):
        a, g = (size * x for x in statistics(lead))
        fisher.update(a, g)
        fisher.commit(0.001, 0.001)  # far less than the 1/(k + 2) that the first updates have
        assert fisher.refresh()
        means.append(per_example(a, g).square().mean((-3, -2, -1)))
        if structure is Diagonal:  # the start is the first mean over all directions, and counts as one batch
            torch.testing.assert_close(fisher.r.mean((-2, -1)), (means[0] + sum(means)) / (k + 2))
    assert not fisher.is_empty
    assert fisher.updates.max() == 4
    trace = fisher.dense(0.0).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert (trace < 100 * size**4).all()  # as small as the data says, not an identity


def test_directions_that_the_first_batch_did_not_show_are_not_flat():
    fisher = Eigen((P, N))
    a, g = statistics(b=1, t=1)
    fisher.update(a, g)
    fisher.commit(0.1, 0.1)
    assert fisher.refresh()
    assert fisher.R.min() > 0.2 * fisher.R.mean()
    torch.testing.assert_close(fisher.R.sum(), (a.square().sum() * g.square().sum()), **TOL)


def test_init_is_checked():
    with pytest.raises(ValueError, match="init must be a finite number greater than 0"):
        Eigen((P, N), init=0.0)
