"""Kronecker algebra against torch.kron, and the eigendecomposition that cannot fail, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eigenoise import linalg

CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64 against a dense reference
CLOSE32 = {"rtol": 1e-5, "atol": 1e-5}  # float32 against float64, entries of order 1
P, N = 3, 4
BATCHES: list[tuple[int, ...]] = [(), (2,), (2, 3)]

real_eigh = torch.linalg.eigh


def close(got: Tensor, wanted: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got, wanted, **(tolerance or CLOSE))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def psd(*batch: int, size: int = N, rank: int = N, seed: int = 0) -> Tensor:
    root = randn(*batch, size, rank, seed=seed)
    return root @ root.mT


def assembled(values: Tensor, vectors: Tensor) -> Tensor:
    return vectors @ torch.diag_embed(values) @ vectors.mT


# eigh_psd


@pytest.mark.parametrize("batch", BATCHES)
def test_eigh_is_torchs(batch: tuple[int, ...]) -> None:
    matrix = psd(*batch)
    found = linalg.eigh_psd(matrix)
    assert found is not None
    for got, wanted in zip(found, torch.linalg.eigh(matrix), strict=True):
        assert torch.equal(got, wanted)
    close(assembled(*found), matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_negative_eigenvalues_are_clamped_and_nothing_else_changes(dtype: torch.dtype) -> None:
    basis = torch.linalg.qr(randn(N, N))[0]
    spectrum = torch.tensor([-1e-3, 0.0, 0.5, 2.0], dtype=torch.float64)
    found = linalg.eigh_psd(assembled(spectrum, basis).to(dtype))
    assert found is not None
    assert found[0].dtype == found[1].dtype == dtype
    tolerance = CLOSE32 if dtype == torch.float32 else CLOSE
    assert bool((found[0] >= 0).all())
    assert float(found[0][0]) == 0.0
    close(found[0].double(), spectrum.clamp_min(0), **tolerance)
    close(assembled(*found).double(), assembled(spectrum.clamp_min(0), basis), **tolerance)


def test_a_singular_matrix_has_no_negative_eigenvalue() -> None:
    found = linalg.eigh_psd(psd(2, rank=2))
    assert found is not None
    assert bool((found[0] >= 0).all())
    close(found[0][..., :2], torch.zeros(2, 2, dtype=torch.float64))


def test_zero_and_one_by_one() -> None:
    values, vectors = linalg.eigh_psd(torch.zeros(2, N, N)) or pytest.fail("no decomposition")
    assert torch.equal(values, torch.zeros(2, N))
    close(vectors @ vectors.mT, torch.eye(N).expand(2, N, N))
    values, vectors = linalg.eigh_psd(torch.tensor([[3.0]])) or pytest.fail("no decomposition")
    assert values.item() == 3.0
    assert abs(vectors.item()) == 1.0


class Faulty:
    """An eigh that misbehaves in its first ``failures`` calls and keeps what it was given."""

    def __init__(self, fault: Callable[[Tensor], tuple[Tensor, Tensor]], failures: float):
        self.fault, self.failures = fault, failures
        self.given: list[Tensor] = []

    def __call__(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        self.given.append(matrix.clone())
        return self.fault(matrix) if len(self.given) <= self.failures else tuple(real_eigh(matrix))


def raises(matrix: Tensor) -> tuple[Tensor, Tensor]:
    raise torch.linalg.LinAlgError("no convergence")


def nan_values(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = real_eigh(matrix)
    values[..., -1] = torch.nan
    return values, vectors


def nan_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = real_eigh(matrix)
    vectors[..., 0, 0] = torch.nan
    return values, vectors


def infinite_values(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = real_eigh(matrix)
    values[..., 0] = torch.inf
    return values, vectors


FAULTS = [raises, nan_values, nan_vectors, infinite_values]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_failure_in_float32_is_tried_again_in_float64(
    monkeypatch: pytest.MonkeyPatch, fault: Callable, batch: tuple[int, ...]
) -> None:
    matrix = psd(*batch).float()
    eigh = Faulty(fault, failures=1)
    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    found = linalg.eigh_psd(matrix)
    assert found is not None
    assert [given.dtype for given in eigh.given] == [torch.float32, torch.float64]
    assert torch.equal(eigh.given[1], matrix.double())  # as it is, before anything is added
    assert found[0].dtype == found[1].dtype == torch.float32
    wanted = real_eigh(matrix.double())
    assert torch.equal(found[0], wanted[0].float())
    assert torch.equal(found[1], wanted[1].float())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("failures", [2, 3])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_what_is_added_to_the_diagonal_is_taken_off_again(
    monkeypatch: pytest.MonkeyPatch, fault: Callable, failures: int, batch: tuple[int, ...]
) -> None:
    scale = 1e6 * (1 + torch.arange(torch.Size(batch).numel(), dtype=torch.float64)).reshape(*batch, 1, 1)
    matrix = scale * psd(*batch)
    eigh = Faulty(fault, failures)
    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    found = linalg.eigh_psd(matrix)
    assert found is not None
    added = eigh.given[-1] - matrix
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None]
    assert bool((added.diagonal(dim1=-2, dim2=-1) > 0).all())
    assert bool((added.diagonal(dim1=-2, dim2=-1) <= 1e-5 * size).all())
    close(assembled(*found) / scale, matrix / scale, rtol=1e-8, atol=1e-8)


def test_the_jitter_leaves_no_negative_eigenvalue(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = psd(rank=1)
    monkeypatch.setattr(torch.linalg, "eigh", Faulty(raises, failures=3))
    found = linalg.eigh_psd(matrix)
    assert found is not None
    assert bool((found[0] >= 0).all())
    close(found[0][:-1], torch.zeros(N - 1, dtype=torch.float64))


@pytest.mark.parametrize("fault", FAULTS)
def test_when_every_attempt_fails_there_is_none(monkeypatch: pytest.MonkeyPatch, fault: Callable) -> None:
    eigh = Faulty(fault, failures=float("inf"))
    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    assert linalg.eigh_psd(psd()) is None
    assert 2 <= len(eigh.given) <= 10


def test_another_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(matrix: Tensor) -> tuple[Tensor, Tensor]:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.linalg, "eigh", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        linalg.eigh_psd(psd())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_matrix_that_is_not_finite_has_none(bad: float, batch: tuple[int, ...]) -> None:
    matrix = psd(*batch)
    matrix[..., 1, 1] = bad
    assert linalg.eigh_psd(matrix) is None


def test_large_entries_survive_in_float32() -> None:
    """The check for NaN must not take an overflow of its own sum for one."""
    found = linalg.eigh_psd(3e38 * torch.eye(N, dtype=torch.float32))
    assert found is not None
    close(found[0], torch.full((N,), 3e38, dtype=torch.float32))


# Kronecker products


@pytest.mark.parametrize("batch", BATCHES)
def test_kron_is_torchs(batch: tuple[int, ...]) -> None:
    left, right = randn(*batch, P, P), randn(*batch, N, N, seed=1)
    got = linalg.kron(left, right)
    assert got.shape == (*batch, P * N, P * N)
    pairs = zip(left.reshape(-1, P, P), right.reshape(-1, N, N), strict=True)
    close(got.reshape(-1, P * N, P * N), torch.stack([torch.kron(a, b) for a, b in pairs]))


def test_kron_broadcasts_leading_dimensions() -> None:
    left, right = randn(2, 1, P, P), randn(5, N, N, seed=1)
    got = linalg.kron(left, right)
    assert got.shape == (2, 5, P * N, P * N)
    close(got[1, 3], torch.kron(left[1, 0], right[3]))


@pytest.mark.parametrize("batch", BATCHES)
def test_rotations_are_kronecker_products_on_the_flattened_matrix(batch: tuple[int, ...]) -> None:
    q_out, matrix, q_in = randn(*batch, P, P), randn(*batch, P, N, seed=1), randn(*batch, N, N, seed=2)
    column = matrix.flatten(-2).unsqueeze(-1)
    into = linalg.kron(q_out, q_in).mT @ column
    back = linalg.kron(q_out, q_in) @ column
    close(linalg.rotate(q_out, matrix, q_in).flatten(-2), into.squeeze(-1))
    close(linalg.unrotate(q_out, matrix, q_in).flatten(-2), back.squeeze(-1))


def test_unrotate_undoes_rotate_in_an_orthogonal_basis() -> None:
    q_out, q_in = torch.linalg.qr(randn(2, P, P))[0], torch.linalg.qr(randn(2, N, N, seed=1))[0]
    matrix = randn(2, P, N, seed=2)
    rotated = linalg.rotate(q_out, matrix, q_in)
    assert not torch.allclose(rotated, matrix)
    close(linalg.unrotate(q_out, rotated, q_in), matrix)


@pytest.mark.parametrize("batch", BATCHES)
def test_outer_is_the_kronecker_product_of_vectors(batch: tuple[int, ...]) -> None:
    column, row = randn(*batch, P), randn(*batch, N, seed=1)
    got = linalg.outer(column, row)
    assert got.shape == (*batch, P, N)
    pairs = zip(column.reshape(-1, P), row.reshape(-1, N), strict=True)
    close(got.reshape(-1, P, N), torch.stack([torch.outer(c, r) for c, r in pairs]))
    close(got.reshape(-1, P * N)[-1], torch.kron(column.reshape(-1, P)[-1], row.reshape(-1, N)[-1]))


def test_eigenvalues_of_a_kronecker_product_are_the_outer_product() -> None:
    S, A = psd(size=P, rank=P), psd(seed=1)
    (values_out, q_out), (values_in, q_in) = linalg.eigh_psd(S) or (), linalg.eigh_psd(A) or ()
    spectrum = linalg.outer(values_out, values_in).flatten()
    close(assembled(spectrum, linalg.kron(q_out, q_in)), torch.kron(S, A))


# pi_split


@pytest.mark.parametrize("batch", BATCHES)
def test_pi_is_the_root_of_the_ratio_of_normalised_traces(batch: tuple[int, ...]) -> None:
    S, A = psd(*batch, size=P, rank=P), psd(*batch, seed=1)
    traces = [m.diagonal(dim1=-2, dim2=-1).sum(-1) / m.shape[-1] for m in (A, S)]
    got = linalg.pi_split(torch.linalg.eigvalsh(S), torch.linalg.eigvalsh(A))
    assert got.shape == batch
    close(got, (traces[0] / traces[1]).sqrt())


def test_pi_balances_scales() -> None:
    """S ⊗ A = (cS) ⊗ (A/c): the damped factors must be the same matrices up to that c."""
    values_out, values_in, gamma, c = torch.tensor([1.0, 3.0]), torch.tensor([0.5, 2.0, 4.0]), 0.1, 100.0

    def damped(out: Tensor, into: Tensor) -> Tensor:
        pi = linalg.pi_split(out, into)
        return linalg.outer(out + gamma**0.5 / pi, into + gamma**0.5 * pi)

    close(damped(values_out, values_in), damped(c * values_out, values_in / c), **CLOSE32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pi_is_finite_and_positive_when_a_factor_vanishes(dtype: torch.dtype) -> None:
    zero, one = torch.zeros(2, N, dtype=dtype), torch.ones(2, N, dtype=dtype)
    for out, into in ((zero, one), (one, zero), (zero, zero)):
        got = linalg.pi_split(out, into)
        assert bool(torch.isfinite(got).all())
        assert bool((got > 0).all())
    close(linalg.pi_split(zero, zero), torch.ones(2, dtype=dtype))
