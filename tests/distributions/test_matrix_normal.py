"""The two matrix Gaussians against dense ones of torch, in float64 unless a test says otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Laplace, MultivariateNormal, Normal, kl_divergence

from eigenoise.distributions.matrix_normal import EigenMatrixNormal, MatrixNormal, isotropic, orthogonal
from eigenoise.linalg.kronecker import outer

CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64 against a dense reference, well-conditioned matrices
CLOSE32 = {"rtol": 1e-4, "atol": 1e-4}  # float32 against float64
STANDARD_ERRORS = 5.0  # a sample moment may be this many of its own standard errors off
P, N = 3, 4
KINDS = [MatrixNormal, EigenMatrixNormal]
BATCHES: list[tuple[int, ...]] = [(), (2,), (2, 3)]


def close(got: Tensor, wanted: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got, wanted, **(tolerance or CLOSE))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def covariance(*batch: int, size: int, seed: int) -> Tensor:
    root = randn(*batch, size, size, seed=seed)
    return root @ root.mT + 0.5 * torch.eye(size, dtype=torch.float64)


def basis(*batch: int, size: int, seed: int) -> Tensor:
    return torch.linalg.qr(randn(*batch, size, size, seed=seed))[0]


def arguments(kind: type, batch: tuple[int, ...] = (), seed: int = 0) -> dict[str, Tensor]:
    seed *= 10
    loc = randn(*batch, P, N, seed=seed)
    if kind is MatrixNormal:
        out, in_ = covariance(*batch, size=P, seed=seed + 1), covariance(*batch, size=N, seed=seed + 2)
        return {"loc": loc, "cov_out": out, "cov_in": in_}
    out, in_ = basis(*batch, size=P, seed=seed + 1), basis(*batch, size=N, seed=seed + 2)
    return {"loc": loc, "q_out": out, "q_in": in_, "variance": randn(*batch, P, N, seed=seed + 3).exp()}


def make(kind: type, batch: tuple[int, ...] = (), seed: int = 0) -> Any:
    return kind(**arguments(kind, batch, seed), validate_args=True)


def reference(kind: type, loc: Tensor, out: Tensor, in_: Tensor, variance: Tensor | None = None) -> MultivariateNormal:
    """The dense Gaussian over loc.flatten(), one batch element at a time with torch.kron."""
    given = (loc, out, in_) if variance is None else (loc, out, in_, variance)
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in given))
    loc, out, in_, *rest = (t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in given)
    dense = torch.stack([torch.kron(o, i) for o, i in zip(out, in_, strict=True)])
    if kind is EigenMatrixNormal:
        dense = dense @ torch.diag_embed(rest[0].flatten(1)) @ dense.mT
    dense = 0.5 * (dense + dense.mT)
    return MultivariateNormal(loc.flatten(1).reshape(*batch, -1), dense.reshape(*batch, P * N, P * N))


def dense(kind: type, batch: tuple[int, ...] = (), seed: int = 0) -> MultivariateNormal:
    return reference(kind, *arguments(kind, batch, seed).values())


def flat(matrix: Tensor) -> Tensor:
    return matrix.flatten(-2)


# Moments, density and entropy


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_dense_gaussian(kind: type, batch: tuple[int, ...]) -> None:
    ours, theirs = make(kind, batch), dense(kind, batch)
    assert ours.batch_shape == batch
    assert ours.event_shape == (P, N)
    assert ours.has_rsample
    close(flat(ours.mean), theirs.mean)
    close(flat(ours.mode), theirs.mode)
    close(ours.covariance_matrix, theirs.covariance_matrix)
    close(flat(ours.variance), theirs.variance)
    close(flat(ours.stddev), theirs.stddev)
    close(ours.entropy(), theirs.entropy())
    value = randn(5, *batch, P, N, seed=99)
    close(ours.log_prob(value), theirs.log_prob(flat(value)))


@pytest.mark.parametrize("kind", KINDS)
def test_leading_dimensions_broadcast(kind: type) -> None:
    given = arguments(kind, (2, 3))
    given["loc"] = given["loc"][0, 0]  # none
    first, *rest = list(given)[1:]
    given[first] = given[first][:, :1]  # (2, 1)
    for name in rest:
        given[name] = given[name][0]  # (3,)
    ours, theirs = kind(**given), reference(kind, *given.values())
    value = randn(2, 3, P, N, seed=99)
    assert ours.batch_shape == (2, 3)
    assert ours.mean.shape == ours.variance.shape == ours.sample().shape == (2, 3, P, N)
    close(flat(ours.variance), theirs.variance)
    close(ours.covariance_matrix, theirs.covariance_matrix)
    close(ours.entropy(), theirs.entropy())
    close(ours.log_prob(value), theirs.log_prob(flat(value)))


@pytest.mark.parametrize("kind", KINDS)
def test_batch_of_loc_alone_reaches_every_result(kind: type) -> None:
    given = arguments(kind)
    given["loc"] = randn(5, P, N, seed=7)
    ours = kind(**given)
    assert ours.batch_shape == ours.entropy().shape == ours.log_prob(ours.mean).shape == (5,)
    assert ours.variance.shape == (5, P, N)
    assert ours.covariance_matrix.shape == (5, P * N, P * N)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_follows_float64(kind: type) -> None:
    narrow = kind(**{k: v.float() for k, v in arguments(kind).items()}, validate_args=True)
    wide, eps = make(kind), randn(P, N, seed=99)
    pairs = [
        (narrow.variance, wide.variance),
        (narrow.covariance_matrix, wide.covariance_matrix),
        (narrow.entropy(), wide.entropy()),
        (narrow.from_standard(eps.float()), wide.from_standard(eps)),
        (narrow.log_prob(eps.float()), wide.log_prob(eps)),
        (
            kl_divergence(narrow, isotropic((P, N), 2.0, torch.float32)),
            kl_divergence(wide, isotropic((P, N), 2.0, torch.float64)),
        ),
    ]
    assert narrow.sample().dtype == torch.float32
    for got, wanted in pairs:
        close(got, wanted.float(), **CLOSE32)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_made_on_the_device_of_the_parameters(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", False)  # a meta tensor has no values to check
    given = {k: v.to("meta") for k, v in arguments(kind, (2,)).items()}
    ours, prior = kind(**given), isotropic((P, N), 1.0, torch.float64, "meta")
    sample = ours.rsample((3,))
    results = [sample, ours.log_prob(sample), ours.entropy(), ours.variance, ours.covariance_matrix]
    results += [kl_divergence(ours, ours), kl_divergence(ours, prior)]
    assert all(r.device.type == "meta" and r.dtype == torch.float64 for r in results)
    assert orthogonal.check(given["loc"].mT @ given["loc"]).device.type == "meta"


def test_outer_product_of_eigenvalues_is_the_matrix_normal() -> None:
    given = arguments(MatrixNormal, (2,))
    (values_out, q_out), (values_in, q_in) = torch.linalg.eigh(given["cov_out"]), torch.linalg.eigh(given["cov_in"])
    full = MatrixNormal(**given)
    eigen = EigenMatrixNormal(given["loc"], q_out, q_in, outer(values_out, values_in))
    value, prior = randn(5, 2, P, N, seed=99), isotropic((P, N), 0.3, torch.float64)
    close(eigen.mean, full.mean)
    close(eigen.variance, full.variance)
    close(eigen.stddev, full.stddev)
    close(eigen.covariance_matrix, full.covariance_matrix)
    close(eigen.entropy(), full.entropy())
    close(eigen.log_prob(value), full.log_prob(value))
    close(kl_divergence(eigen, prior), kl_divergence(full, prior))
    # The same law from another root of the covariance: squared lengths of whitened samples must agree.
    close(full.log_prob(eigen.from_standard(value)), eigen.log_prob(eigen.from_standard(value)))
    other_full = make(MatrixNormal, (2,), seed=4)
    (values_out, q_out), (values_in, q_in) = torch.linalg.eigh(other_full.cov_out), torch.linalg.eigh(other_full.cov_in)
    other_eigen = EigenMatrixNormal(other_full.loc, q_out, q_in, outer(values_out, values_in))
    close(kl_divergence(eigen, other_eigen), kl_divergence(full, other_full))


# Samples


@pytest.mark.parametrize("kind", KINDS)
def test_sample_moments(kind: type) -> None:
    count = 40_000
    torch.manual_seed(0)
    ours, theirs = make(kind), dense(kind)
    samples = flat(ours.sample((count,)))
    variance = theirs.variance
    mean_error = (variance / count).sqrt()
    assert ((samples.mean(0) - theirs.mean).abs() < STANDARD_ERRORS * mean_error).all()
    cov_error = ((outer(variance, variance) + theirs.covariance_matrix.square()) / count).sqrt()
    assert ((samples.T.cov() - theirs.covariance_matrix).abs() < STANDARD_ERRORS * cov_error).all()


@pytest.mark.parametrize("kind", KINDS)
def test_from_standard_has_the_covariance_exactly(kind: type) -> None:
    ours = make(kind)
    units = torch.eye(P * N, dtype=torch.float64).view(P * N, P, N)
    root = flat(ours.from_standard(units) - ours.mean)  # row k is L e_k
    close(root.T @ root, dense(kind).covariance_matrix)
    assert torch.equal(ours.from_standard(torch.zeros(P, N, dtype=torch.float64)), ours.mean)


@pytest.mark.parametrize("kind", KINDS)
def test_from_standard_repeats_with_a_generator_and_is_what_rsample_does(kind: type) -> None:
    ours = make(kind, (2,))
    draws = [ours.from_standard(randn(5, 2, P, N, seed=s)) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.isclose(draws[0], draws[2]).any()
    torch.manual_seed(1)
    sample = ours.rsample((5,))
    assert sample.shape == (5, 2, P, N)
    close(sample, draws[0])
    torch.manual_seed(1)
    close(ours.sample((5,)), draws[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rsample_gradients(kind: type) -> None:
    given = arguments(kind, (2,))
    if kind is MatrixNormal:
        inputs = (given["loc"], randn(2, P, P, seed=5), randn(2, N, N, seed=6))

        def build(loc: Tensor, out: Tensor, in_: Tensor) -> Any:
            eyes = torch.eye(P, dtype=torch.float64), torch.eye(N, dtype=torch.float64)
            return MatrixNormal(loc, out @ out.mT + eyes[0], in_ @ in_.mT + eyes[1])
    else:
        inputs = (given["loc"], given["variance"])

        def build(loc: Tensor, variance: Tensor) -> Any:
            return EigenMatrixNormal(loc, given["q_out"], given["q_in"], variance)

    def sample(*values: Tensor) -> Tensor:
        torch.manual_seed(0)
        return build(*values).rsample((3,))

    def scores(*values: Tensor) -> tuple[Tensor, ...]:
        ours = build(*values)
        return ours.log_prob(given["loc"] + 1.0), ours.entropy(), kl_divergence(ours, isotropic((P, N), 2.0))

    inputs = tuple(i.clone().requires_grad_() for i in inputs)
    assert torch.autograd.gradcheck(sample, inputs)
    assert torch.autograd.gradcheck(scores, inputs)
    gradients = torch.autograd.grad(sample(*inputs).square().sum(), inputs)
    assert all(bool((g != 0).any()) for g in gradients)
    assert not build(*inputs).sample().requires_grad


# Expansion


@pytest.mark.parametrize("kind", KINDS)
def test_expand(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make(kind, (2,))
    value, eps = randn(5, 3, 2, P, N, seed=99), randn(3, 2, P, N, seed=98)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("expand must reuse the Cholesky factors")

    monkeypatch.setattr(torch.linalg, "cholesky", refuse)
    wide = ours.expand((3, 2))
    assert type(wide) is kind
    assert ours.batch_shape == ours.entropy().shape == (2,)
    assert ours.mean.shape == (2, P, N)
    assert wide.batch_shape == wide.entropy().shape == (3, 2)
    assert wide.event_shape == (P, N)
    assert wide.sample((5,)).shape == (5, 3, 2, P, N)
    assert wide._validate_args
    close(wide.mean, ours.mean.expand(3, 2, P, N))
    close(wide.variance, ours.variance.expand(3, 2, P, N))
    close(wide.covariance_matrix, ours.covariance_matrix.expand(3, 2, P * N, P * N))
    close(wide.entropy(), ours.entropy().expand(3, 2))
    close(wide.log_prob(value), ours.log_prob(value))
    close(wide.from_standard(eps), ours.from_standard(eps))
    assert wide.mean.data_ptr() == ours.mean.data_ptr()
    with pytest.raises(RuntimeError, match="expand"):
        ours.expand((3,))


# Wrong arguments


@pytest.mark.parametrize(
    ("kind", "name", "spoil", "reported"),
    [
        (MatrixNormal, "loc", lambda t: t * math.nan, "loc"),
        (MatrixNormal, "cov_out", torch.neg, "cov_out"),
        (MatrixNormal, "cov_in", torch.triu, "cov_in"),
        (EigenMatrixNormal, "loc", lambda t: t * math.nan, "loc"),
        (EigenMatrixNormal, "q_out", lambda t: 1.001 * t, "q_out"),
        (EigenMatrixNormal, "q_in", torch.tril, "q_in"),
        (EigenMatrixNormal, "q_in", lambda t: t * math.nan, "q_in"),
        (EigenMatrixNormal, "variance", torch.neg, "eigen_variance"),
        (EigenMatrixNormal, "variance", torch.zeros_like, "eigen_variance"),
    ],
)
def test_values_are_validated(kind: type, name: str, spoil: Any, reported: str) -> None:
    given = arguments(kind, (2,))
    given[name] = spoil(given[name])
    with pytest.raises(ValueError, match=f"Expected parameter {reported} "):
        kind(**given, validate_args=True)


def test_validation_can_be_switched_off() -> None:
    given = arguments(EigenMatrixNormal)
    given["q_out"] = 2 * given["q_out"]
    ours = EigenMatrixNormal(**given, validate_args=False)
    close(
        ours.from_standard(given["loc"]) - given["loc"],
        2 * (make(EigenMatrixNormal).from_standard(given["loc"]) - given["loc"]),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_validates_its_value(kind: type) -> None:
    with pytest.raises(ValueError):
        make(kind).log_prob(randn(N, P, seed=0))
    with pytest.raises(ValueError):
        make(kind).log_prob(torch.full((P, N), math.nan, dtype=torch.float64))


@pytest.mark.parametrize("validate_args", [True, False])
@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        (MatrixNormal, "loc", (N,)),
        (MatrixNormal, "cov_out", (N, N)),
        (MatrixNormal, "cov_out", (P,)),
        (MatrixNormal, "cov_in", (P, P)),
        (MatrixNormal, "cov_in", (3, N, N)),
        (EigenMatrixNormal, "loc", ()),
        (EigenMatrixNormal, "q_out", (P, N)),
        (EigenMatrixNormal, "q_out", (1, 1)),
        (EigenMatrixNormal, "q_in", (1, N)),
        (EigenMatrixNormal, "variance", (N, P)),
        (EigenMatrixNormal, "variance", ()),
        (EigenMatrixNormal, "variance", (3, P, N)),
    ],
)
def test_shapes_are_always_checked(kind: type, name: str, shape: tuple[int, ...], validate_args: bool) -> None:
    given = arguments(kind, (2,))
    given[name] = torch.ones(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"^{name} must have"):
        kind(**given, validate_args=validate_args)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(MatrixNormal, n) for n in ("loc", "cov_out", "cov_in")]
    + [(EigenMatrixNormal, n) for n in ("loc", "q_out", "q_in", "variance")],
)
def test_only_floating_tensors(kind: type, name: str) -> None:
    given: dict[str, Any] = arguments(kind)
    for wrong in (given[name].long(), given[name].tolist()):
        with pytest.raises(TypeError, match=f"^{name} must be"):
            kind(**{**given, name: wrong})


@pytest.mark.parametrize("shape", [(N, P), (1, 1), (N,)])
@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_another_shape_is_refused(kind: type, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^eps must have the shape"):
        make(kind).from_standard(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthogonal_depends_on_the_dtype(dtype: torch.dtype) -> None:
    q = basis(2, size=50, seed=0).to(dtype)
    assert orthogonal.check(q).tolist() == [True, True]
    assert orthogonal.check(torch.stack([q[0], q[1] * (1 + 1e-3)])).tolist() == [True, False]
    slightly = orthogonal.check(q * (1 + 1e-6)).tolist()
    assert slightly == [dtype == torch.float32] * 2


# Kullback-Leibler divergences


@pytest.mark.parametrize(("left", "right"), [((), ()), ((2,), (2,)), ((3, 1), (2,)), ((), (2,)), ((2,), ())])
@pytest.mark.parametrize("kind", KINDS)
def test_kl_within_a_family(kind: type, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    got = kl_divergence(make(kind, left), make(kind, right, seed=1))
    wanted = kl_divergence(dense(kind, left), dense(kind, right, seed=1))
    assert got.shape == torch.broadcast_shapes(left, right)
    close(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_to_itself_is_zero(kind: type) -> None:
    close(kl_divergence(make(kind, (2,)), make(kind, (2,))), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(("left", "right"), [((), ()), ((3, 1), (2,)), ((), (2,)), ((2,), ())])
@pytest.mark.parametrize("kind", KINDS)
def test_kl_to_independent_normals(kind: type, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    loc, scale = randn(*right, P, N, seed=50), randn(*right, P, N, seed=51).exp()
    got = kl_divergence(make(kind, left), Independent(Normal(loc, scale), 2))
    wanted = kl_divergence(dense(kind, left), MultivariateNormal(flat(loc), torch.diag_embed(flat(scale.square()))))
    assert got.shape == torch.broadcast_shapes(left, right)
    close(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_to_the_isotropic_prior(kind: type) -> None:
    eye = torch.eye(P * N, dtype=torch.float64)
    wanted = kl_divergence(dense(kind, (2,)), MultivariateNormal(torch.zeros_like(eye[0]), 0.3 * eye))
    close(kl_divergence(make(kind, (2,)), isotropic((P, N), 0.3, torch.float64)), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_needs_independent_normals_over_matrices(kind: type) -> None:
    zeros, ones = torch.zeros(2, P, N, dtype=torch.float64), torch.ones(2, P, N, dtype=torch.float64)
    wrong = [
        Independent(Laplace(zeros, ones), 2),
        Independent(Normal(zeros, ones), 1),
        Independent(Normal(zeros, ones), 3),
    ]
    for prior in wrong:
        with pytest.raises(NotImplementedError, match="Independent"):
            kl_divergence(make(kind, (2,)), prior)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_needs_one_event_shape(kind: type) -> None:
    ones = {k: torch.ones(1, 1, dtype=torch.float64) for k in arguments(kind)}
    for other in (kind(**ones), isotropic((1, 1), 1.0, torch.float64)):
        with pytest.raises(ValueError, match="one event shape"):
            kl_divergence(make(kind), other)


def test_isotropic() -> None:
    prior = isotropic((5, P, N), 0.25, dtype=torch.float64)
    assert (prior.batch_shape, prior.event_shape) == ((5,), (P, N))
    assert torch.equal(prior.mean, torch.zeros(5, P, N, dtype=torch.float64))
    assert torch.equal(prior.variance, torch.full((5, P, N), 0.25, dtype=torch.float64))
    assert isotropic((P, N), 1.0).mean.dtype == torch.get_default_dtype()


@pytest.mark.parametrize("variance", [0.0, -1.0, math.nan, math.inf])
def test_isotropic_needs_a_positive_variance(variance: float) -> None:
    with pytest.raises(ValueError, match=r"^variance must be"):
        isotropic((P, N), variance)


def test_isotropic_needs_a_matrix() -> None:
    with pytest.raises(ValueError):
        isotropic((N,), 1.0)
