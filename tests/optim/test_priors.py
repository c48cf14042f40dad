"""An earlier posterior as prior, against dense Gaussians and exact updating; and what cannot be one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

import eigenoise as en
from arguments import BAYES, PAPER_STEP
from eigenoise.fisher import Diagonal, Eigen
from eigenoise.inference.posterior import Entry, Posterior
from eigenoise.optim.priors import LayerPrior
from seeded import generator, randn

EXACT = {"rtol": 1e-8, "atol": 1e-10}
P, N = 3, 4
METHODS = [en.NoisyEKFAC, en.EKFAC, en.NoisyAdam]


def spd(size, seed):
    root = randn(size, size, seed=seed)
    return root @ root.mT + 0.5 * torch.eye(size)


def basis(size, seed):
    return torch.linalg.qr(randn(size, size, seed=seed))[0]


EARLIER = {
    "EMVG": lambda: en.EigenMatrixNormal(randn(P, N), basis(P, 1), basis(N, 2), randn(P, N, seed=3).exp()),
    "matrix Gaussian": lambda: en.MatrixNormal(randn(P, N), spd(P, 1), spd(N, 2)),
    "factorised": lambda: Independent(Normal(randn(P, N), randn(P, N, seed=3).exp()), 2),
}


def dense(q):
    """Covariance (pn, pn)."""
    return q.covariance_matrix if hasattr(q, "covariance_matrix") else q.variance.flatten().diag()


def fisher_of(kind):
    if kind is Diagonal:
        return Diagonal((P, N), dtype=torch.float64)
    found = Eigen((P, N), dtype=torch.float64)
    found.update(randn(50, 1, N, seed=5), randn(50, 1, P, seed=6) @ spd(P, 7))
    found.commit(1.0, 1.0)
    assert found.refresh()
    return found


@pytest.mark.parametrize("kind", [Diagonal, Eigen])
@pytest.mark.parametrize("name", EARLIER)
def test_a_layers_prior_against_dense_matrices(name, kind):
    q, fisher = EARLIER[name](), fisher_of(kind)
    prior = LayerPrior(q, torch.float64, None)
    precision = torch.linalg.inv(dense(q))
    W = randn(P, N, seed=8)
    torch.testing.assert_close(prior.pull(W).flatten(), precision @ (W - q.mean).flatten(), **EXACT)
    columns = fisher.unrotate(torch.eye(P * N).reshape(P * N, P, N)).flatten(1)  # the basis vectors, one in a row
    in_basis = (columns @ precision @ columns.mT).diagonal().reshape(P, N)
    torch.testing.assert_close(prior.diagonal(fisher), in_basis, **EXACT)
    variance = randn(P, N, seed=9).exp()
    own = MultivariateNormal(W.flatten(), columns.mT @ variance.flatten().diag() @ columns)
    wanted = kl_divergence(own, MultivariateNormal(q.mean.flatten(), dense(q)))
    torch.testing.assert_close(prior.kl(W, variance, fisher), wanted, **EXACT)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2))


def run(method, steps=12, model=None, rows=slice(None), **options):
    model = model or network()
    likelihood = en.GaussianLikelihood(precision=2.0)
    opt = method(model, num_data=40, likelihood=likelihood, generator=generator(1), stats_every=2, **options)
    x, y = randn(40, 4, seed=2)[rows], randn(40, 2, seed=3)[rows]
    for _ in range(steps):
        with opt.sampled_params():
            opt.zero_grad()
            likelihood.nll(model(x), y).backward()
        opt.step()
    return opt, model


def standard(opt, prior_var):
    """N(0, ηI) for all layers, as a posterior."""
    entries = {
        name: Entry(
            Independent(Normal(torch.zeros_like(q.mean), prior_var**0.5), len(q.event_shape)), e.params, e.stack
        )
        for (name, q), e in zip(opt.posterior.items(), opt.posterior.entries.values(), strict=True)
    }
    return Posterior(entries, {})


@pytest.mark.parametrize("method", METHODS)
def test_the_standard_normal_as_prior_changes_nothing(method):
    options = {"prior_var": 0.3}
    options |= {} if method is en.NoisyAdam else {"refresh_every": 4}
    plain, model = run(method, **options)
    given, other = run(method, prior=standard(plain, 0.3), **{**options, "prior_var": 7.0})  # which is not used
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, **EXACT)
    torch.testing.assert_close(plain.kl(), given.kl(), **EXACT)
    for name, q in plain.posterior.items():
        torch.testing.assert_close(q.variance, given.posterior[name].variance, **EXACT)


def test_updating_twice_is_updating_once():
    """Linear regression with known noise: half the data, then the other half with the posterior as prior."""
    tau, rows = 4.0, 30
    x = randn(rows, 3) @ spd(3, 4)
    y = torch.cat([x @ randn(3, 2, seed=1) + randn(rows, 2, seed=seed) / tau**0.5 for seed in (2, 3)])
    x = torch.cat([x, x])  # the same inputs twice, so that both halves have the same eigenbasis
    design = torch.cat([x, torch.ones(2 * rows, 1)], -1)
    precision = tau * design.mT @ design + torch.eye(4)
    exact = torch.linalg.solve(precision, tau * design.mT @ y).mT

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    prior, steps, burn_in = None, 1200, 300
    for half in (slice(rows), slice(rows, None)):
        likelihood = en.GaussianLikelihood(precision=tau)
        how = {"lr": 0.05, "momentum": 0.0, "layer_clip": None, "ema_factors": 0.5, "ema_scale": 0.5, "stats_every": 1}
        how |= {**BAYES, **PAPER_STEP}
        opt = en.NoisyEKFAC(
            model, num_data=rows, likelihood=likelihood, prior=prior, fisher="exact", refresh_every=5, **how
        )
        average = torch.zeros(2, 4)
        for step in range(steps):
            with opt.sampled_params():
                opt.zero_grad()
                likelihood.nll(model(x[half]), y[half]).backward()
            opt.step()
            if step >= burn_in:
                average += torch.cat([model[0].weight, model[0].bias[:, None]], -1).detach() / (steps - burn_in)
        with torch.no_grad():  # the mean without the noise of the last steps
            model[0].weight.copy_(average[:, :-1])
            model[0].bias.copy_(average[:, -1])
        prior = opt.posterior
    covariance = torch.block_diag(*[torch.linalg.inv(precision)] * 2)
    torch.testing.assert_close(prior["0"].covariance_matrix, covariance, rtol=1e-8, atol=1e-10)
    error = covariance.diagonal().sqrt().reshape(2, 4) / (steps - burn_in) ** 0.5
    assert ((prior["0"].mean - exact).abs() < 2 * 4.5 * error).all()  # the error of each half


def test_elbo_counts_the_divergence_from_the_earlier_posterior():
    first, model = run(en.NoisyEKFAC, refresh_every=4)
    earlier = first.posterior
    opt, _ = run(en.NoisyEKFAC, steps=3, model=model, prior=earlier, refresh_every=4)
    wanted = sum(kl_divergence(q, earlier[name]).sum() for name, q in opt.posterior.items() if name in ("0", "3"))
    wanted += sum(kl_divergence(opt.posterior[name], earlier[name]).sum() for name in ("1.weight", "1.bias"))
    torch.testing.assert_close(opt.kl(), wanted, **EXACT)


def test_the_prior_that_is_replaced_has_no_say():
    """Nor at re-initialisations with factored damping, which has cross terms of it."""
    first, _ = run(en.NoisyEKFAC)
    how = {"prior": first.posterior, "refresh_every": 4, "reinit_every": 4, "damping_form": "factored"}
    models = [run(en.NoisyEKFAC, prior_var=prior_var, **how)[1] for prior_var in (0.01, 7.0)]
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(left, right)


def test_scheduled_settings_reach_the_prior():
    first, _ = run(en.NoisyEKFAC)
    opt, _ = run(en.NoisyEKFAC, steps=3, prior=first.posterior)
    fresh, _ = run(en.NoisyEKFAC, steps=3, prior=first.posterior)
    for name, value in (("kl_weight", 0.1), ("num_data", 400), ("prior_var", 3.0)):
        opt.param_groups[0][name] = value
        q = opt.posterior["0"]
        slot = opt.slots[0]
        whole = slot.fisher.R * opt.param_groups[0]["num_data"] / opt.param_groups[0]["kl_weight"]
        wanted = 1 / (whole + slot.prior.diagonal(slot.fisher))
        torch.testing.assert_close(q.eigen_variance, wanted, **EXACT)
    assert not torch.equal(opt.posterior["0"].variance, fresh.posterior["0"].variance)


def test_a_run_with_a_prior_resumes_bit_for_bit():
    first, _ = run(en.NoisyEKFAC)
    how = {"prior": first.posterior, "refresh_every": 4}
    straight, _ = run(en.NoisyEKFAC, steps=6, **how)
    state = copy.deepcopy((straight.state_dict(), straight.model.state_dict()))
    x, y = randn(40, 4, seed=2), randn(40, 2, seed=3)

    def more(opt):
        for _ in range(5):
            with opt.sampled_params():
                opt.zero_grad()
                opt.likelihood.nll(opt.model(x), y).backward()
            opt.step()
        return [p.detach().clone() for p in opt.model.parameters()]

    wanted = more(straight)
    again = network()
    again.load_state_dict(state[1])
    opt = en.NoisyEKFAC(again, num_data=40, likelihood=en.GaussianLikelihood(precision=2.0), stats_every=2, **how)
    opt.load_state_dict(state[0])
    for left, right in zip(wanted, more(opt), strict=True):
        assert torch.equal(left, right)


def test_a_prior_may_hold_some_layers_only():
    first, model = run(en.NoisyEKFAC)
    body = Posterior({name: entry for name, entry in first.posterior.entries.items() if name == "0"}, {})
    opt, _ = run(en.NoisyEKFAC, model=model, prior=body)
    assert [slot.name for slot in opt.slots if slot.prior is not None] == ["0"]


def test_a_loaded_posterior_can_be_a_prior(tmp_path):
    first, _ = run(en.NoisyKFAC, damping_form="factored")  # whose posterior cannot take a prior, but may be one
    assert isinstance(first.posterior["0"], en.MatrixNormal)
    first.posterior.save(tmp_path / "q.safetensors")
    loaded, kept = Posterior.load(tmp_path / "q.safetensors"), first.posterior
    for left, right in zip(*(run(en.NoisyEKFAC, prior=p)[1].parameters() for p in (loaded, kept)), strict=True):
        assert torch.equal(left, right)


def test_what_cannot_be_a_prior_is_refused():
    first, _ = run(en.NoisyEKFAC, steps=1)
    with pytest.raises(TypeError, match="prior must be a Posterior, got a dict"):
        run(en.NoisyEKFAC, prior=dict(first.posterior))
    for method in (en.NoisyKFAC, en.KFAC):
        with pytest.raises(TypeError, match="unexpected keyword argument 'prior'"):
            run(method, prior=first.posterior)
    wider = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"prior\['0'\] must have the layer's shape \(5, 5\), got \(6, 5\)"):
        run(en.NoisyEKFAC, model=wider, prior=first.posterior)
    with pytest.raises(ValueError, match="prior holds '0', which is no layer of the model or is treated otherwise"):
        run(en.NoisyEKFAC, model=nn.Linear(4, 2), prior=first.posterior)
    with pytest.raises(ValueError, match="prior holds '3', which is no layer"):
        run(en.NoisyEKFAC, prior=first.posterior, overrides={"3": "diagonal"})


def test_a_state_of_a_run_with_another_prior_is_refused():
    first, _ = run(en.NoisyEKFAC, steps=3)
    other, _ = run(en.NoisyEKFAC, steps=4)
    given, _ = run(en.NoisyEKFAC, steps=1, prior=first.posterior)
    plain, _ = run(en.NoisyEKFAC, steps=1)
    with pytest.raises(ValueError, match="the state is of a run with another prior for '0', or without one"):
        run(en.NoisyEKFAC, steps=1, prior=other.posterior)[0].load_state_dict(given.state_dict())
    with pytest.raises(ValueError, match="or without one"):
        given.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="expected the state of '0' to hold"):
        plain.load_state_dict(given.state_dict())


def test_a_step_does_not_overshoot_a_prior_that_the_basis_does_not_fit():
    """Λ₀ may be more than its diagonal in the new basis by as much as there are weights."""
    strong = torch.full((8, 8), 30.0) + 10 * torch.eye(8)  # one direction, in no basis of the data's
    values, vectors = torch.linalg.eigh(strong)
    model = nn.Sequential(nn.Linear(8, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(randn(1, 8))
    layer = en.EigenMatrixNormal(torch.zeros(1, 8), torch.eye(1), vectors, values.reciprocal().unsqueeze(0))
    prior = Posterior({"0": Entry(layer, (("0.weight", (1, 8)),), None)}, {})
    likelihood = en.GaussianLikelihood(precision=1.0)
    how = {"lr": 0.9, "momentum": 0.0, "layer_clip": None, "stats_every": 1, "fisher": "exact", **BAYES, **PAPER_STEP}
    opt = en.EKFAC(model, num_data=20, likelihood=likelihood, prior=prior, refresh_every=1000, **how)
    x, y = randn(20, 8, seed=1) * torch.logspace(0, -1, 8), randn(20, 1, seed=2)
    for _ in range(400):
        opt.zero_grad()
        with opt.sampled_params():
            likelihood.nll(model(x), y).backward()
        opt.step()
    assert opt.slots[0].max_rate < 0.3
    exact = torch.linalg.solve(x.mT @ x + strong, x.mT @ y)[:, 0]
    torch.testing.assert_close(model[0].weight[0].detach(), exact, rtol=1e-3, atol=1e-4)


def test_the_prior_is_seen_in_print():
    first, _ = run(en.NoisyEKFAC, steps=1)
    assert "Eigen Fisher, earlier posterior as prior" in repr(run(en.NoisyEKFAC, steps=1, prior=first.posterior)[0])
