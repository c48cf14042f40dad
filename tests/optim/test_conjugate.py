"""Bayesian linear regression with known noise: the stationary posterior against the exact one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eigenoise as en
from arguments import BAYES, PAPER_STEP, accepted

N, D_IN, D_OUT, TAU = 30, 3, 2, 4.0
EXACT = {"rtol": 1e-9, "atol": 1e-12}
STANDARD_ERRORS = 4.5


@pytest.fixture
def problem():
    torch.manual_seed(3)
    x = torch.randn(N, D_IN) @ torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.6, 0.5], [0.0, 0.0, 0.3]])  # correlated inputs
    y = x @ torch.randn(D_IN, D_OUT) + 0.5 + torch.randn(N, D_OUT) / TAU**0.5
    return x, y


def exact_posterior(x, y, kl_weight, prior_var):
    """Mean (p, n) and covariance (pn, pn) of the tempered posterior, bias as last column."""
    design = torch.cat([x, torch.ones(N, 1)], -1)
    precision = TAU / kl_weight * design.mT @ design + torch.eye(D_IN + 1) / prior_var
    mean = torch.linalg.solve(precision, TAU / kl_weight * design.mT @ y).mT
    return mean, torch.block_diag(*[torch.linalg.inv(precision)] * D_OUT)


def train(method, x, y, steps, burn_in, **options):
    """Full-batch training; the optimiser, and mean and variance averaged over the steps after ``burn_in``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D_IN, D_OUT))
    likelihood = en.GaussianLikelihood(precision=TAU)
    opt = method(model, num_data=N, likelihood=likelihood, **accepted(method, noise_ramp=0, **options))
    mean, variance = torch.zeros(D_OUT, D_IN + 1), torch.zeros(D_OUT, D_IN + 1)
    for step in range(steps):
        with opt.sampled_params():
            opt.zero_grad()
            likelihood.nll(model(x), y).backward()
        opt.step()
        if step >= burn_in:
            mean += torch.cat([model[0].weight, model[0].bias[:, None]], -1).detach()
            if method is en.BayesByBackprop:
                variance += opt.slots[0].std.square()
    return opt, mean / (steps - burn_in), variance / (steps - burn_in)


NATURAL = {
    **PAPER_STEP,
    "fisher": "exact",
    "lr": 0.05,
    "momentum": 0.0,
    "layer_clip": None,
    "ema_factors": 0.5,
    "ema_scale": 0.5,
    "stats_every": 1,
}
CASES = [(1.0, 1.0), (0.3, 0.1), (1.0, 100.0)]


@pytest.mark.parametrize(("kl_weight", "prior_var"), CASES)
@pytest.mark.parametrize("method", [en.NoisyEKFAC, en.NoisyKFAC])
def test_structured_methods_find_the_exact_posterior(problem, method, kl_weight, prior_var):
    every = {"refresh_every": 5}
    steps, burn_in = 2500, 250
    opt, mean, _ = train(method, *problem, steps, burn_in, kl_weight=kl_weight, prior_var=prior_var, **every, **NATURAL)
    exact_mean, exact_cov = exact_posterior(*problem, kl_weight, prior_var)
    torch.testing.assert_close(opt.posterior["0"].covariance_matrix, exact_cov, **EXACT)
    # M follows M ← M − α(M + noise − M*), so its time average is off by the average of the noise.
    error = exact_cov.diagonal().sqrt().reshape(mean.shape) / (steps - burn_in) ** 0.5
    assert ((mean - exact_mean).abs() < STANDARD_ERRORS * error).all()
    assert (mean - exact_mean).abs().max() < 0.05 * exact_cov.diagonal().max().sqrt() + 1e-12


@pytest.mark.parametrize(("kl_weight", "prior_var"), CASES)
def test_the_diagonal_method_finds_the_mean_field_solution(problem, kl_weight, prior_var):
    steps, burn_in = 3000, 500
    opt, mean, _ = train(en.NoisyAdam, *problem, steps, burn_in, kl_weight=kl_weight, prior_var=prior_var, **NATURAL)
    exact_mean, exact_cov = exact_posterior(*problem, kl_weight, prior_var)
    mean_field = torch.linalg.inv(exact_cov).diagonal().reciprocal().reshape(mean.shape)
    torch.testing.assert_close(opt.posterior["0"].variance, mean_field, **EXACT)
    assert (mean_field < exact_cov.diagonal().reshape(mean.shape)).all()  # mean field is too sure of itself
    # The slowest direction forgets slowly: its average is off by (M_end − M_start)/(α·steps) through the Hessian too.
    error = mean_field.sqrt() / (steps - burn_in) ** 0.5
    drift = exact_cov.diagonal().max().sqrt() * torch.linalg.cond(exact_cov) / (0.05 * (steps - burn_in))
    assert ((mean - exact_mean).abs() < STANDARD_ERRORS * error + drift).all()


def test_bayes_by_backprop_finds_the_mean_field_solution(problem):
    _, mean, variance = train(en.BayesByBackprop, *problem, 5000, 2000, lr=3e-3, betas=(0.9, 0.99), **BAYES)
    exact_mean, exact_cov = exact_posterior(*problem, 1.0, 1.0)
    mean_field = torch.linalg.inv(exact_cov).diagonal().reciprocal().reshape(mean.shape)
    torch.testing.assert_close(variance, mean_field, rtol=0.08, atol=0)
    torch.testing.assert_close(mean, exact_mean, rtol=0, atol=0.25 * exact_cov.diagonal().max().sqrt().item())


def test_factored_damping_is_not_the_exact_posterior(problem):
    opt, _, _ = train(
        en.NoisyKFAC,
        *problem,
        30,
        0,
        damping_form="factored",
        refresh_every=1,
        **{**BAYES, "prior_var": 0.1},
        **NATURAL,
    )
    _, exact_cov = exact_posterior(*problem, 1.0, 0.1)
    covariance = opt.posterior["0"].covariance_matrix
    assert covariance.trace() < 0.95 * exact_cov.trace()


def test_the_noise_precision_finds_its_optimum():
    """With the mean known to be zero, closed-form q(τ) is the conjugate Gamma posterior."""
    torch.manual_seed(4)
    y = torch.randn(200, 1) / TAU**0.5
    likelihood = en.GaussianLikelihood(prior=(2.0, 3.0))
    likelihood.observe(torch.zeros_like(y), y)
    likelihood.update(200)
    q = likelihood.posterior
    torch.testing.assert_close(q.concentration, torch.tensor(2.0 + 100))
    torch.testing.assert_close(q.rate, 3.0 + 0.5 * y.square().sum())


def test_elbo_of_the_exact_posterior_is_the_evidence(problem):
    x, y = problem
    opt, _, _ = train(en.NoisyEKFAC, x, y, 20, 0, refresh_every=1, **BAYES, **NATURAL)
    exact_mean, _ = exact_posterior(x, y, 1.0, 1.0)
    with torch.no_grad():
        opt.model[0].weight.copy_(exact_mean[:, :-1])
        opt.model[0].bias.copy_(exact_mean[:, -1])
    terms = opt.elbo(x, y, samples=4000)
    design = torch.cat([x, torch.ones(N, 1)], -1)
    marginal = torch.distributions.MultivariateNormal(torch.zeros(N), design @ design.mT + torch.eye(N) / TAU)
    evidence = marginal.log_prob(y.mT).sum()
    spread = (D_OUT * (D_IN + 1) / 2) ** 0.5  # standard deviation of the log-likelihood under q
    assert (terms.value - evidence).abs() < STANDARD_ERRORS * spread / 4000**0.5
    assert float(terms.kl_noise) == 0
