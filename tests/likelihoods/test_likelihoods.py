"""Likelihoods against torch.distributions, autograd, quadrature and Monte Carlo, in float64."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Gamma, Normal, kl_divergence
from torch.nn.functional import one_hot

import eigenoise as en
from eigenoise.distributions.mixtures import BernoulliMixture, CategoricalMixture, GaussianMixture
from eigenoise.likelihoods import Likelihood, as_likelihood
from seeded import generator, randn

CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64 against closed forms, autograd and quadrature
STANDARD_ERRORS = 5.0  # a Monte Carlo mean may be this many of its own standard errors off
DRAWS = 4000  # Monte Carlo draws
STACK, B, N = 2, 4, 50
KINDS = ["gamma", "adam", "known", "heteroscedastic", "categorical", "bernoulli"]
LEARNING = ["gamma", "adam"]
WIDTHS = {"heteroscedastic": 4, "categorical": 3}  # numbers of one output; 2 for the others
LEADS = [(None, (B,)), (None, (3, B)), (STACK, (STACK, B)), (STACK, (3, STACK, B))]
lead_shapes = pytest.mark.parametrize(("stack", "lead"), LEADS, ids=["plain", "positions", "stack", "stack of several"])


def close(got: Tensor, wanted: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got, wanted, **(tolerance or CLOSE))


def make(kind: str, stack: int | None = None, **options: Any) -> Any:
    """A likelihood; one that learns has a q(τ) that is neither its prior nor its start, each member its own."""
    if kind == "heteroscedastic":
        return en.HeteroscedasticGaussianLikelihood(stack)
    if kind == "categorical":
        return en.CategoricalLikelihood(stack)
    if kind == "bernoulli":
        return en.BernoulliLikelihood(stack)
    if kind == "known":
        return en.GaussianLikelihood(2.5, stack=stack)
    options = {"prior": (2.0, 0.7), "lr": 0.05, **options}
    likelihood = en.GaussianLikelihood(update="adam" if kind == "adam" else "closed-form", stack=stack, **options)
    a, b = torch.tensor([3.0, 8.0], dtype=torch.float64), torch.tensor([1.5, 11.0], dtype=torch.float64)
    state = {"a": a[0], "b": b[0]} if stack is None else {"a": a[:stack], "b": b[:stack]}
    likelihood.load_state_dict({**state, "residual": torch.zeros_like(state["a"]), "steps": torch.tensor(0)})
    return likelihood


def output(kind: str, *lead: int, seed: int = 0) -> Tensor:
    return randn(*lead, WIDTHS.get(kind, 2), seed=seed)


def target(kind: str, *lead: int, seed: int = 1) -> Tensor:
    if kind == "categorical":
        return torch.randint(WIDTHS[kind], lead, generator=generator(seed))
    y = randn(*lead, 2, seed=seed)
    return (y > 0).double() if kind == "bernoulli" else y


def spread(tau: Tensor, f: Tensor, stack: int | None) -> Tensor:
    """The noise level of each output: one for all, or one for each member on the axis before the batch."""
    tau = tau if stack is None else tau[:, None, None]
    return tau.rsqrt().expand(f.shape)


def noise_model(kind: str, likelihood: Any, f: Tensor) -> Distribution:
    """p(y | f) by torch, τ at its mean, one distribution for each number of the target."""
    if kind == "categorical":
        return Categorical(logits=f)
    if kind == "bernoulli":
        return Bernoulli(logits=f)
    if kind == "heteroscedastic":
        return Normal(f[..., :2], (0.5 * f[..., 2:]).exp())
    tau = torch.full_like(likelihood.a, 2.5) if kind == "known" else likelihood.a / likelihood.b
    return Normal(f, spread(tau, f, likelihood.stack))


def over_gamma(q: Gamma, points: int = 4001) -> tuple[Tensor, Tensor]:
    """Nodes and weights of a quadrature in log τ, along a new first axis."""
    u = torch.linspace(-30.0, 8.0, points, dtype=torch.float64).reshape(-1, *(1,) * q.rate.ndim)
    return u.exp(), (q.log_prob(u.exp()) + u).exp() * 38.0 / (points - 1)


def score_by_autograd(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    f = f.detach().requires_grad_()
    return torch.autograd.grad(likelihood.log_prob(f, y).sum(), f)[0]


# Densities and losses


@pytest.mark.parametrize("kind", ["known", "heteroscedastic", "categorical", "bernoulli"])
@lead_shapes
def test_log_prob_is_torchs(kind: str, stack: int | None, lead: tuple[int, ...]) -> None:
    likelihood, f, y = make(kind, stack), output(kind, *lead), target(kind, *lead)
    wanted = noise_model(kind, likelihood, f).log_prob(y)
    close(likelihood.log_prob(f, y), wanted if kind == "categorical" else wanted.sum(-1))


@pytest.mark.parametrize("kind", LEARNING)
@lead_shapes
def test_log_prob_is_the_mean_over_the_precision(kind: str, stack: int | None, lead: tuple[int, ...]) -> None:
    likelihood, f, y = make(kind, stack), output(kind, *lead), target(kind, *lead)
    tau, weight = over_gamma(likelihood.posterior)
    close(weight.sum(0), torch.ones_like(likelihood.a))
    if stack is not None:
        tau, weight = tau[..., None], weight[..., None]
    tau, weight = (t.reshape(-1, *(1,) * (len(lead) + 1 - t.ndim), *t.shape[1:]) for t in (tau, weight))
    each = Normal(f, tau.rsqrt().unsqueeze(-1)).log_prob(y).sum(-1)
    close(likelihood.log_prob(f, y), (weight * each).sum(0), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@lead_shapes
def test_nll_is_the_mean_or_the_sum_of_the_models_means(kind: str, stack: int | None, lead: tuple[int, ...]) -> None:
    likelihood, f, y = make(kind, stack), output(kind, *lead), target(kind, *lead)
    log_prob = likelihood.log_prob(f, y)
    assert log_prob.shape == lead
    wanted = -log_prob.mean() * (stack or 1)  # in front of a stack stand weight samples, of which it is the mean
    close(likelihood.nll(f, y), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_its_members(kind: str) -> None:
    likelihood, f, y = make(kind, STACK), output(kind, STACK, B), target(kind, STACK, B)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(STACK):
        alone = make(kind)
        if kind in LEARNING:
            state = {name: t[i] if t.ndim else t for name, t in likelihood.state_dict().items()}
            alone.load_state_dict(state)
        total = total + alone.nll(f[i], y[i])
        close(likelihood.score(f, y)[i], alone.score(f[i], y[i]))
        close(likelihood.fisher_vectors(f)[:, i], alone.fisher_vectors(f[i]))
        close(likelihood.kl()[i], alone.kl())
    close(likelihood.nll(f, y), total)


@pytest.mark.parametrize("kind", KINDS)
@lead_shapes
def test_terms_counts_what_the_mean_was_taken_over(kind: str, stack: int | None, lead: tuple[int, ...]) -> None:
    f = output(kind, *lead)
    assert make(kind, stack).terms(f) == math.prod(lead) // (stack or 1)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_gives_float32(kind: str) -> None:
    likelihood, f, y = make(kind), output(kind, B), target(kind, B)
    narrow = y if kind == "categorical" else y.float()
    loss = likelihood.nll(f.float(), narrow)
    assert loss.dtype == likelihood.score(f.float(), narrow).dtype == torch.float32
    assert likelihood.fisher_vectors(f.float()).dtype == torch.float32
    close(loss.double(), likelihood.nll(f, y), rtol=1e-5, atol=1e-5)
    assert likelihood.log_prob(f, y).dtype == torch.float64  # nothing of float32 is kept


# Scores and the Fisher


@pytest.mark.parametrize("kind", KINDS)
@lead_shapes
def test_score_is_the_gradient(kind: str, stack: int | None, lead: tuple[int, ...]) -> None:
    likelihood, f, y = make(kind, stack), output(kind, *lead), target(kind, *lead)
    close(likelihood.score(f, y), score_by_autograd(likelihood, f, y))


def all_targets(kind: str, likelihood: Any, f: Tensor) -> tuple[Tensor, Tensor]:
    """Targets ``(m, ...)`` and their weights ``(m, *lead)``: every one there is, or quadrature nodes of the noise."""
    lead = f.shape[:-1]
    noise = noise_model(kind, likelihood, f)
    if kind == "categorical":
        y = torch.arange(f.shape[-1]).reshape(-1, *(1,) * len(lead)).expand(-1, *lead)
        return y, noise.log_prob(y).exp()
    if kind == "bernoulli":
        y = torch.tensor(list(itertools.product((0.0, 1.0), repeat=2)), dtype=torch.float64)
        y = y.reshape(4, *(1,) * len(lead), 2).expand(4, *lead, 2)
        return y, noise.log_prob(y).sum(-1).exp()
    nodes, weights = (torch.as_tensor(t) for t in np.polynomial.hermite_e.hermegauss(6))  # exact to degree 11
    pairs = torch.cartesian_prod(nodes, nodes).reshape(-1, *(1,) * len(lead), 2)
    y = noise.mean + noise.stddev * pairs
    weight = torch.cartesian_prod(weights, weights).prod(-1) / (2 * math.pi)
    return y, weight.reshape(-1, *(1,) * len(lead)).expand(-1, *lead)


def closed_form(kind: str, likelihood: Any, f: Tensor) -> Tensor:
    if kind == "categorical":
        p = f.softmax(-1)
        return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    if kind == "bernoulli":
        return torch.diag_embed(f.sigmoid() * (1 - f.sigmoid()))
    if kind == "heteroscedastic":
        return torch.diag_embed(torch.cat([(-f[..., 2:]).exp(), torch.full_like(f[..., 2:], 0.5)], -1))
    return torch.diag_embed(noise_model(kind, likelihood, f).variance.reciprocal())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stack", "lead"), [(None, (B,)), (STACK, (STACK, B))], ids=["plain", "stack"])
def test_fisher_vectors_add_up_to_the_fisher(kind: str, stack: int | None, lead: tuple[int, ...]) -> None:
    """Σ u·uᵀ = E[score·scoreᵀ] = −E[Hessian] = the textbook's formula."""
    likelihood, f = make(kind, stack), output(kind, *lead)
    u = likelihood.fisher_vectors(f)
    assert u.shape[1:] == f.shape
    got = (u[..., :, None] * u[..., None, :]).sum(0)

    y, weight = all_targets(kind, likelihood, f)
    wide = f.expand(len(y), *f.shape)
    scores = score_by_autograd(likelihood, wide, y)
    close(got, (weight[..., None, None] * scores[..., :, None] * scores[..., None, :]).sum(0))

    wide = wide.clone().requires_grad_()
    first = torch.autograd.grad(likelihood.log_prob(wide, y).sum(), wide, create_graph=True)[0]
    rows = [torch.autograd.grad(first[..., i].sum(), wide, retain_graph=True)[0] for i in range(f.shape[-1])]
    close(got, -(weight[..., None, None] * torch.stack(rows, -2)).sum(0))

    close(got, closed_form(kind, likelihood, f))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stack", "lead"), [(None, (B,)), (STACK, (STACK, B))], ids=["plain", "stack"])
def test_scores_of_sampled_targets_have_the_fisher_as_covariance(
    kind: str, stack: int | None, lead: tuple[int, ...]
) -> None:
    likelihood, f = make(kind, stack), output(kind, *lead)
    wide = f.expand(DRAWS, *f.shape)
    score = likelihood.score(wide, likelihood.sample(wide, generator(7)))
    assert_mean(score, torch.zeros_like(f))
    assert_mean(score[..., :, None] * score[..., None, :], closed_form(kind, likelihood, f))


def assert_mean(draws: Tensor, wanted: Tensor) -> None:
    """The mean over the first axis is ``wanted``, up to a few of its own standard errors."""
    error = draws.std(0) / len(draws) ** 0.5 + CLOSE["atol"]
    assert bool(((draws.mean(0) - wanted).abs() <= STANDARD_ERRORS * error).all())


# Sampling


@pytest.mark.parametrize("kind", KINDS)
@lead_shapes
def test_samples_have_the_right_moments(kind: str, stack: int | None, lead: tuple[int, ...]) -> None:
    likelihood, f = make(kind, stack), output(kind, *lead)
    wide = f.expand(DRAWS, *f.shape)
    y, noise = likelihood.sample(wide, generator(3)), noise_model(kind, likelihood, f)
    if kind == "categorical":
        assert y.shape == wide.shape[:-1]
        assert_mean(one_hot(y, f.shape[-1]).double(), f.softmax(-1))
    else:
        assert y.shape == (DRAWS, *lead, 2)
        assert_mean(y, noise.mean)
        assert_mean((y - noise.mean).square(), noise.variance)
    likelihood.check(wide[0], y[0])  # what is drawn is a valid target


@pytest.mark.parametrize("kind", KINDS)
def test_samples_follow_the_generator(kind: str) -> None:
    likelihood, f = make(kind), output(kind, 100)
    before = torch.get_rng_state()
    one, two, other = (likelihood.sample(f, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    likelihood.sample(f)
    assert not torch.equal(torch.get_rng_state(), before)  # without one, the global generator


# The predictive


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stack", [None, STACK])
def test_predictive_is_the_mixture_over_weight_samples(kind: str, stack: int | None) -> None:
    k, lead = 3, (B,) if stack is None else (STACK, B)
    likelihood, f, y = make(kind, stack), output(kind, k, *lead), target(kind, *lead)
    q = likelihood.predictive(f, generator())
    wanted = {"categorical": CategoricalMixture, "bernoulli": BernoulliMixture}.get(kind, GaussianMixture)
    assert type(q) is wanted
    if kind in LEARNING:  # one draw of τ for each weight sample and member
        assert q.scale.shape == f.shape
        assert torch.equal(q.scale, q.scale[..., :1, :1].expand(f.shape))
        assert len(q.scale[..., 0, 0].flatten().unique()) == k * (stack or 1)
        close(q.mean, f.mean(0))
    else:
        each = noise_model(kind, likelihood, f).log_prob(y)
        each = each if kind == "categorical" else each.sum(-1)
        close(q.log_prob(y), torch.logsumexp(each, 0) - math.log(k))


@pytest.mark.parametrize("stack", [None, STACK])
def test_predictive_draws_the_precision_from_its_posterior(stack: int | None) -> None:
    likelihood = make("gamma", stack)
    f = torch.zeros(DRAWS, *(() if stack is None else (stack,)), 1, 1, dtype=torch.float64)
    q, again, other = (likelihood.predictive(f, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(q.scale, again.scale)
    assert not torch.equal(q.scale, other.scale)
    tau, posterior = q.scale.square().reciprocal()[..., 0, 0], likelihood.posterior
    assert_mean(tau, posterior.mean)
    assert_mean((tau - posterior.mean).square(), posterior.variance)


def test_predictive_with_positions() -> None:
    likelihood, f = make("gamma"), output("gamma", 3, 5, B)
    assert likelihood.predictive(f, generator()).mean.shape == f.shape[1:]


# The posterior over the precision


@pytest.mark.parametrize("kind", LEARNING)
@pytest.mark.parametrize("stack", [None, STACK])
def test_kl_of_the_precision(kind: str, stack: int | None) -> None:
    likelihood = make(kind, stack)
    shape = () if stack is None else (stack,)
    q, prior = likelihood.posterior, Gamma(torch.tensor(2.0).double(), torch.tensor(0.7).double())
    assert q.batch_shape == likelihood.kl().shape == shape
    close(likelihood.kl(), kl_divergence(q, prior))
    tau, weight = over_gamma(q)
    close(likelihood.kl(), (weight * (q.log_prob(tau) - prior.log_prob(tau))).sum(0), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["known", "heteroscedastic", "categorical", "bernoulli"])
@pytest.mark.parametrize("stack", [None, STACK])
def test_without_a_posterior_there_is_no_kl(kind: str, stack: int | None) -> None:
    likelihood = make(kind, stack)
    likelihood.observe(output(kind, *((B,) if stack is None else (stack, B))), target(kind, B))
    likelihood.update(N)
    assert torch.equal(likelihood.kl().double(), torch.zeros(() if stack is None else (stack,)).double())


def test_a_known_precision_has_no_posterior() -> None:
    likelihood = make("known")
    assert likelihood.tau.item() == 2.5
    with pytest.raises(ValueError, match=r"known to be 2\.5"):
        _ = likelihood.posterior


@pytest.mark.parametrize("kind", LEARNING)
@pytest.mark.parametrize("stack", [None, STACK])
def test_tau_is_the_posterior_mean(kind: str, stack: int | None) -> None:
    likelihood = make(kind, stack)
    close(likelihood.tau, likelihood.posterior.mean)


def test_q_starts_with_mean_one() -> None:
    likelihood = en.GaussianLikelihood(prior=(6.0, 3.0))
    assert likelihood.posterior.mean.item() == 1.0
    assert likelihood.posterior.concentration.item() == 6.0


def residual(f: Tensor, y: Tensor) -> Tensor:
    """Mean squared residual of a member, summed over the d outputs."""
    return (y - f).square().sum(-1).mean(-1)


def objective(logs: Tensor, squared: Tensor, d: int, num_data: int, prior: tuple[float, float]) -> Tensor:
    """N·E_q[log N(y; f, 1/τ)] − KL(q ‖ prior) by (log a, log b)."""
    a, b = logs.exp()
    expected = 0.5 * (d * (torch.digamma(a) - b.log() - math.log(2 * math.pi)) - a / b * squared)
    p = Gamma(*(torch.tensor(value, dtype=torch.float64) for value in prior))
    return num_data * expected - kl_divergence(Gamma(a, b), p)


def gradient(likelihood: Any, squared: Tensor, d: int = 2) -> Tensor:
    logs = torch.stack([likelihood.a, likelihood.b]).log().requires_grad_()
    return torch.autograd.grad(objective(logs, squared, d, N, likelihood.prior).sum(), logs)[0]


@pytest.mark.parametrize("stack", [None, STACK])
@pytest.mark.parametrize("d", [1, 2, 5])
def test_elbo_gradient_is_autograds(stack: int | None, d: int) -> None:
    likelihood = make("adam", stack)
    lead = (B,) if stack is None else (stack, B)
    f, y = randn(*lead, d), randn(*lead, d, seed=1)
    wanted = gradient(likelihood, residual(f, y), d)
    likelihood.observe(f, y)
    likelihood._residual = residual(f, y).reshape(-1).tolist()
    close(likelihood._elbo_gradient(N), wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("stack", [None, STACK])
def test_the_closed_form_is_the_optimum(stack: int | None) -> None:
    likelihood = make("gamma", stack)
    lead = (B,) if stack is None else (stack, B)
    f, y = randn(*lead, 2), randn(*lead, 2, seed=1)
    likelihood.observe(f, y)
    likelihood.update(N)
    close(likelihood.posterior.concentration, torch.full_like(likelihood.a, 2.0 + N))
    close(likelihood.posterior.rate, 0.7 + 0.5 * N * residual(f, y))
    close(gradient(likelihood, residual(f, y)), torch.zeros(2, *likelihood.a.shape).double(), rtol=0, atol=1e-8)


def test_the_closed_form_averages_over_about_one_pass() -> None:
    """All batches alike while there are few, then with the batch's share of the data."""
    likelihood = make("gamma")
    batches = [(randn(B, 2, seed=i), randn(B, 2, seed=100 + i)) for i in range(30)]
    seen = [residual(f, y) for f, y in batches]
    average = torch.zeros((), dtype=torch.float64)
    for step, (f, y) in enumerate(batches, 1):
        likelihood.observe(f, y)
        likelihood.update(N)
        average = average + max(1 / step, B / N) * (seen[step - 1] - average)
        close(likelihood.posterior.rate, 0.7 + 0.5 * N * average)
        if step <= N // B:
            close(average, torch.stack(seen[:step]).mean())


def test_the_full_batch_forgets_the_past() -> None:
    likelihood = make("gamma")
    for seed in range(3):
        f, y = randn(N, 2, seed=seed), randn(N, 2, seed=100 + seed)
        likelihood.observe(f, y)
        likelihood.update(N)
        close(likelihood.posterior.rate, 0.7 + 0.5 * N * residual(f, y))


def test_more_rows_than_num_data_still_makes_an_average() -> None:
    likelihood = make("gamma")
    f, y = randn(N, 2), randn(N, 2, seed=1)
    for _ in range(3):
        likelihood.observe(f, y)
        likelihood.update(B)
    close(likelihood.residual, residual(f, y))


@pytest.mark.parametrize("stack", [None, STACK])
def test_adam_takes_torchs_adam_steps(stack: int | None) -> None:
    likelihood = make("adam", stack)
    lead = (B,) if stack is None else (stack, B)
    logs = torch.stack([likelihood.a, likelihood.b]).log().requires_grad_()
    adam = torch.optim.Adam([logs], lr=0.05)
    for seed in range(5):
        f, y = randn(*lead, 2, seed=seed), randn(*lead, 2, seed=10 + seed)
        likelihood.observe(f, y)
        likelihood.update(N)
        adam.zero_grad()
        (-objective(logs, residual(f, y), 2, N, (2.0, 0.7)).sum() / N).backward()
        adam.step()
        close(torch.stack([likelihood.a, likelihood.b]), logs.detach().exp(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("stack", [None, STACK])
def test_adam_moves_toward_the_closed_form(stack: int | None) -> None:
    adam, exact = make("adam", stack), make("gamma", stack)
    lead = (B,) if stack is None else (stack, B)
    f, y = randn(*lead, 2), 3 * randn(*lead, 2, seed=1)
    exact.observe(f, y)
    exact.update(N)
    gaps = []
    for step in range(301):
        adam.observe(f, y)
        adam.update(N)
        if step % 100 == 0:
            gaps.append(kl_divergence(adam.posterior, exact.posterior))
    assert all(bool((later < earlier).all()) for earlier, later in itertools.pairwise(gaps))
    assert bool((gaps[-1] < 0.1 * gaps[0]).all())
    close(adam.tau, exact.tau, rtol=0.2, atol=0)  # the mean comes first, the spread follows slowly


@pytest.mark.parametrize("kind", LEARNING)
def test_members_of_a_stack_learn_apart(kind: str) -> None:
    """A member's q(τ) is what it would be alone, whatever the others see."""
    likelihood = make(kind, STACK, prior=(2.0, 0.7))
    state = likelihood.state_dict()
    members = []
    for i in range(STACK):
        member = make(kind, prior=(2.0, 0.7))
        member.load_state_dict({name: t[i] if t.ndim else t for name, t in state.items()})
        members.append(member)
    other = copy.deepcopy(likelihood)
    for seed in range(4):
        f, y = randn(STACK, B, 2, seed=seed), randn(STACK, B, 2, seed=10 + seed)
        likelihood.observe(f, y)
        likelihood.update(N)
        changed = y.clone()
        changed[1] += 10.0
        other.observe(f, changed)
        other.update(N)
        for i, member in enumerate(members):
            member.observe(f[i], y[i])
            member.update(N)
            close(likelihood.a[i], member.a)
            close(likelihood.b[i], member.b)
    assert torch.equal(likelihood.a[0], other.a[0])
    assert torch.equal(likelihood.b[0], other.b[0])
    assert not torch.equal(likelihood.b[1], other.b[1])


def test_learning_changes_the_loss() -> None:
    """What was learned reaches log_prob, score, samples and Fisher: nothing stays cached."""
    likelihood, f, y = make("gamma"), randn(B, 2), 5 * randn(B, 2, seed=1)
    before = [likelihood.log_prob(f, y), likelihood.score(f, y), likelihood.fisher_vectors(f)]
    likelihood.observe(f, y)
    likelihood.update(N)
    after = [likelihood.log_prob(f, y), likelihood.score(f, y), likelihood.fisher_vectors(f)]
    assert all(not torch.allclose(old, new) for old, new in zip(before, after, strict=True))
    close(after[1], likelihood.tau * (y - f))


@pytest.mark.parametrize("kind", LEARNING)
@pytest.mark.parametrize("stack", [None, STACK])
def test_observations_of_one_step_add_up(kind: str, stack: int | None) -> None:
    lead = () if stack is None else (stack,)
    f, y = randn(*lead, 2 * B, 2), randn(*lead, 2 * B, 2, seed=1)
    whole, parts = make(kind, stack), make(kind, stack)
    whole.observe(f, y)
    for half in (slice(0, 3), slice(3, None)):
        parts.observe(f[..., half, :], y[..., half, :])
    for likelihood in (whole, parts):
        likelihood.update(N)
    close(parts.a, whole.a)
    close(parts.b, whole.b)
    assert parts.steps == whole.steps == 1


@pytest.mark.parametrize("kind", LEARNING)
def test_what_is_discarded_is_forgotten(kind: str) -> None:
    likelihood = make(kind)
    before = {name: t.clone() for name, t in likelihood.state_dict().items()}
    likelihood.observe(randn(B, 2), randn(B, 2, seed=1))
    likelihood.discard()
    likelihood.update(N)
    likelihood.update(N)  # nothing observed, nothing learned
    assert all(torch.equal(t, before[name]) for name, t in likelihood.state_dict().items())


def test_observing_needs_no_gradient_and_keeps_no_graph() -> None:
    likelihood, f = make("gamma"), randn(B, 2).requires_grad_()
    likelihood.observe(f * 2, randn(B, 2, seed=1))
    likelihood.update(N)
    assert not likelihood.b.requires_grad


# Keeping


@pytest.mark.parametrize("kind", LEARNING)
@pytest.mark.parametrize("stack", [None, STACK])
def test_learning_goes_on_identically_after_a_round_trip(kind: str, stack: int | None) -> None:
    lead = (B,) if stack is None else (stack, B)

    def learn(likelihood: Any, seeds: range) -> None:
        for seed in seeds:
            likelihood.observe(randn(*lead, 2, seed=seed), randn(*lead, 2, seed=50 + seed))
            likelihood.update(N)

    first = make(kind, stack)
    learn(first, range(3))
    state = copy.deepcopy(first.state_dict())
    kept = copy.deepcopy(state)
    second = type(first)(**first.config())
    second.observe(randn(*lead, 2), randn(*lead, 2))  # pending observations do not survive loading
    second.load_state_dict(state)
    for likelihood in (first, second):
        learn(likelihood, range(3, 7))
    one, two = first.state_dict(), second.state_dict()
    assert one.keys() == two.keys()
    assert any(name.startswith("adam.") for name in one) == (kind == "adam")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(state[name], kept[name]) for name in state)  # the caller's dict is left alone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stack", [None, STACK])
def test_config_is_json_and_rebuilds(kind: str, stack: int | None) -> None:
    likelihood = make(kind, stack)
    config = json.loads(json.dumps(likelihood.config()))
    again = type(likelihood)(**config)
    again.load_state_dict(likelihood.state_dict())
    assert again.config() == likelihood.config()
    lead = (B,) if stack is None else (stack, B)
    assert torch.equal(
        again.nll(output(kind, *lead), target(kind, *lead)), likelihood.nll(output(kind, *lead), target(kind, *lead))
    )


@pytest.mark.parametrize("name", ["a", "b", "residual", "steps"])
def test_a_state_that_lacks_something_is_refused(name: str) -> None:
    likelihood = make("gamma")
    state = {k: v for k, v in likelihood.state_dict().items() if k != name}
    with pytest.raises(ValueError, match=f"must hold '{name}'"):
        likelihood.load_state_dict(state)


@pytest.mark.parametrize("name", ["a", "b", "residual"])
def test_a_state_of_another_stack_is_refused_before_anything_changes(name: str) -> None:
    likelihood = make("gamma")
    before = {k: v.clone() for k, v in likelihood.state_dict().items()}
    state = {**{k: v + 1 for k, v in before.items()}, name: torch.ones(STACK, dtype=torch.float64)}
    with pytest.raises(ValueError, match=rf"{name} must have the shape \(\), got \(2,\)"):
        likelihood.load_state_dict(state)
    assert all(torch.equal(v, before[k]) for k, v in likelihood.state_dict().items())


@pytest.mark.parametrize("kind", ["heteroscedastic", "categorical", "bernoulli"])
def test_a_likelihood_without_state_takes_none(kind: str) -> None:
    likelihood = make(kind)
    assert likelihood.state_dict() == {}
    likelihood.load_state_dict({})
    with pytest.raises(ValueError, match=r"has no state, got one that holds \['a'\]"):
        likelihood.load_state_dict({"a": torch.ones(())})


# Wrong arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": 0}, ValueError, "precision must be .* greater than 0, got 0"),
        ({"precision": -1.0}, ValueError, "precision"),
        ({"precision": math.nan}, ValueError, "precision"),
        ({"precision": True}, TypeError, "precision must be a number, got bool"),
        ({"precision": "1"}, TypeError, "precision must be a number, got str"),
        ({"prior": (1.0,)}, ValueError, "prior must be the pair"),
        ({"prior": (1.0, 1.0, 1.0)}, ValueError, "prior must be the pair"),
        ({"prior": (0.0, 1.0)}, ValueError, r"prior\[0\] must be"),
        ({"prior": (1.0, math.inf)}, ValueError, r"prior\[1\] must be"),
        ({"update": "sgd"}, ValueError, "update must be one of 'closed-form', 'adam', got 'sgd'"),
        ({"lr": 0.0}, ValueError, "lr must be"),
        ({"stack": 0}, ValueError, "stack must be at least 1, got 0"),
        ({"stack": 2.0}, TypeError, "stack must be an int, got float"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        en.GaussianLikelihood(**options)


@pytest.mark.parametrize("kind", ["gamma", "known", "bernoulli", "heteroscedastic"])
def test_targets_without_their_last_axis_get_the_remedy(kind: str) -> None:
    f = output(kind, B)[..., : WIDTHS.get(kind, 2) // 2]
    y = torch.ones(B, dtype=torch.float64)
    message = f"y must have the shape ({B}, 1), got ({B},); use y.unsqueeze(-1)"
    with pytest.raises(ValueError, match=re.escape(message)):
        make(kind).nll(f, y)


@pytest.mark.parametrize("kind", ["gamma", "bernoulli", "heteroscedastic"])
@pytest.mark.parametrize("shape", [(B, 1), (B, 3), (B + 1, 2), (1, 2), (2,), (1, B, 2)])
def test_targets_of_another_shape_are_refused_and_never_broadcast(kind: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"y must have the shape ({B}, 2), got {shape}")):
        make(kind).nll(output(kind, B), torch.ones(shape, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["gamma", "bernoulli", "heteroscedastic"])
def test_targets_must_be_floating(kind: str) -> None:
    f = output(kind, B)
    with pytest.raises(TypeError, match=r"y must be a floating-point tensor.*torch\.int64; use y\.float"):
        make(kind).nll(f, torch.ones(B, 2, dtype=torch.long))
    with pytest.raises(TypeError, match="y must be a tensor, got list"):
        make(kind).nll(f, [[0.0, 1.0]] * B)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_must_be_floating(kind: str) -> None:
    with pytest.raises(TypeError, match="the model's output must be a floating-point tensor"):
        make(kind).nll(output(kind, B).long(), target(kind, B))
    with pytest.raises(TypeError, match="the model's output must be a tensor, got tuple"):
        make(kind).nll((output(kind, B),), target(kind, B))


@pytest.mark.parametrize("kind", ["gamma", "known", "bernoulli", "heteroscedastic"])
def test_an_output_without_a_batch_axis_is_refused(kind: str) -> None:
    """``model(x).squeeze(-1)`` against y (b,) would be one term of b outputs: the loss b times too large."""
    f = torch.zeros(2 * B if kind == "heteroscedastic" else B, dtype=torch.float64)
    with pytest.raises(ValueError, match="output"):
        make(kind).nll(f, torch.zeros(B, dtype=torch.float64))


@pytest.mark.parametrize("width", [1, 3])
def test_a_heteroscedastic_output_must_be_even(width: int) -> None:
    with pytest.raises(ValueError, match=f"means and d log-variances, an even number, got {width}"):
        make("heteroscedastic").nll(randn(B, width), randn(B, 1))


@pytest.mark.parametrize("bad", [-1, 3, 100])
def test_classes_out_of_range_are_refused(bad: int) -> None:
    y = torch.tensor([0, 1, 2, bad])
    low, high = min(0, bad), max(2, bad)
    with pytest.raises(ValueError, match=f"classes from 0 to 2, as the model has 3 outputs, got {low} to {high}"):
        make("categorical").nll(output("categorical", B), y)


@pytest.mark.parametrize(
    "y", [torch.zeros(B), torch.zeros(B, 3), torch.zeros(B, dtype=torch.bool), [0, 1, 2, 0], np.zeros(B, dtype=int)]
)
def test_classes_must_be_whole_numbers_in_a_tensor(y: Any) -> None:
    with pytest.raises(TypeError, match=r"y must be a tensor of class indices \(torch\.long\), got "):
        make("categorical").nll(output("categorical", B), y)


@pytest.mark.parametrize("shape", [(B, 1), (B, 3), (B + 1,), ()])
def test_classes_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"y must have the shape ({B},), got {shape}")):
        make("categorical").nll(output("categorical", B), torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_any_whole_numbers_are_classes(dtype: torch.dtype) -> None:
    f, y = output("categorical", B), target("categorical", B)
    close(make("categorical").nll(f, y.to(dtype)), -Categorical(logits=f).log_prob(y).mean())
    close(make("categorical").score(f, y.to(dtype)), make("categorical").score(f, y))


@pytest.mark.parametrize("bad", [0.5, -1.0, 2.0, math.nan])
def test_yes_or_no_must_be_one_or_zero(bad: float) -> None:
    y = target("bernoulli", B)
    y[1, 1] = bad
    with pytest.raises(ValueError, match="y must hold only 0 and 1"):
        make("bernoulli").nll(output("bernoulli", B), y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [(B,), (STACK + 1, B), (B, STACK)])
def test_the_output_of_a_stack_must_show_the_members(kind: str, lead: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"output must have the shape \(\.\.\., 2, b, d\) with stack=2, got"):
        make(kind, STACK).nll(output(kind, *lead), target(kind, *lead))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stack", "lead"), [(None, (0,)), (None, (3, 0)), (STACK, (STACK, 0)), (STACK, (0, STACK, B))])
def test_an_empty_batch_is_an_error_before_anything_changes(
    kind: str, stack: int | None, lead: tuple[int, ...]
) -> None:
    likelihood = make(kind, stack)
    before = {name: t.clone() for name, t in likelihood.state_dict().items()}
    seen: list[tuple[Any, ...]] = []
    f = output(kind, *lead).requires_grad_()
    with (
        likelihood.observed_by(lambda *what: seen.append(what)),
        pytest.raises(ValueError, match="the batch is empty: the model's output has the shape"),
    ):
        likelihood.nll(f, target(kind, *lead))
    likelihood.update(N)
    assert seen == []
    assert all(torch.equal(t, before[name]) for name, t in likelihood.state_dict().items())


# Choice by name


@pytest.mark.parametrize("kind", KINDS)
def test_a_likelihood_is_returned_as_it_is(kind: str) -> None:
    likelihood = make(kind)
    assert as_likelihood(likelihood) is likelihood


def test_a_task_names_a_new_likelihood() -> None:
    first, second = as_likelihood("regression"), as_likelihood("regression")
    assert type(first) is en.GaussianLikelihood
    assert first is not second
    assert first.config() == en.GaussianLikelihood().config()
    assert type(as_likelihood("classification")) is en.CategoricalLikelihood


@pytest.mark.parametrize(
    ("wrong", "error", "got"),
    [
        ("Regression", ValueError, "'Regression'"),
        ("", ValueError, "''"),
        (None, TypeError, "NoneType"),
        (1, TypeError, "int"),
        (torch.nn.MSELoss(), TypeError, "MSELoss"),
        (en.GaussianLikelihood, TypeError, "<class 'eigenoise.likelihoods.gaussian.GaussianLikelihood'>"),
        (["regression"], TypeError, "list"),
    ],
)
def test_anything_else_is_no_likelihood(wrong: Any, error: type[Exception], got: str) -> None:
    message = r"^likelihood must be one of eigenoise's likelihoods, such as .*'regression' or 'classification', got "
    with pytest.raises(error, match=message + re.escape(got) + "$"):
        as_likelihood(wrong)


# Observers


@pytest.mark.parametrize("kind", KINDS)
def test_an_observer_sees_every_training_loss_of_its_block(kind: str) -> None:
    likelihood, y = make(kind), target(kind, B)
    f = output(kind, B).requires_grad_()
    seen: list[tuple[Any, ...]] = []
    likelihood.nll(f, y)
    with likelihood.observed_by(lambda *what: seen.append(what)):
        loss = likelihood.nll(f, y)
        with torch.no_grad():
            likelihood.nll(f, y)  # no training
        likelihood.nll(f.detach(), y)
    likelihood.nll(f, y)
    assert len(seen) == 1
    assert seen[0][0] is f
    assert seen[0][1].shape == y.shape
    assert seen[0][2] is loss


def test_a_second_observer_is_refused_and_the_first_goes_on() -> None:
    likelihood, f, y = make("gamma"), output("gamma", B).requires_grad_(), target("gamma", B)
    seen: list[str] = []
    with likelihood.observed_by(lambda *_: seen.append("first")):
        with (
            pytest.raises(RuntimeError, match="already watched by another optimiser"),
            likelihood.observed_by(lambda *_: seen.append("second")),
        ):
            pytest.fail("unreachable")
        likelihood.nll(f, y)
    assert seen == ["first"]


def test_an_observer_is_gone_after_an_exception() -> None:
    likelihood, f, y = make("gamma"), output("gamma", B).requires_grad_(), target("gamma", B)
    seen: list[str] = []
    with pytest.raises(KeyError), likelihood.observed_by(lambda *_: seen.append("first")):
        raise KeyError
    likelihood.nll(f, y)
    with likelihood.observed_by(lambda *_: seen.append("second")):
        likelihood.nll(f, y)
    assert seen == ["second"]


def test_two_optimisers_cannot_train_with_one_likelihood_at_once() -> None:
    likelihood = en.GaussianLikelihood()
    models = [en.models.MLP(2, [3], 1) for _ in range(2)]
    one, two = (en.NoisyAdam(model, num_data=N, likelihood=likelihood, noise_ramp=0) for model in models)
    before = [p.detach().clone() for p in models[1].parameters()]
    with (
        one.sampled_params(),
        pytest.raises(RuntimeError, match="already watched"),
        two.sampled_params(),
    ):
        pytest.fail("unreachable")
    assert all(torch.equal(p, q) for p, q in zip(before, models[1].parameters(), strict=True))
    with two.sampled_params():  # free again
        assert not any(torch.equal(p, q) for p, q in zip(before, models[1].parameters(), strict=True))
