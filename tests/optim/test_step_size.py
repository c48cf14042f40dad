"""The size of steps and their damping: what they remember, and the excess loss that this leaves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import eigenoise as en
from arguments import accepted
from eigenoise.optim import natural_gradient
from eigenoise.optim.kl_weight import resolve_kl_weight
from eigenoise.optim.step_size import step_size
from seeded import randn

D, B, ETA = 12, 16, 0.5
SPECTRUM = torch.logspace(0, -5, D)  # of the inputs' second moments, and so of F with precision 1
METHODS = [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam]


def excess_losses(method, steps, seed=0, **options):
    """½·F·(M − M*)² in each direction after each step ``(steps, D)``, of a linear model that sees nothing twice."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(D, 1, bias=False))
    truth = ETA**0.5 * torch.randn(1, D)
    nn.init.zeros_(model[0].weight)
    likelihood = en.GaussianLikelihood(precision=1.0)
    how = {"num_data": 10**9, "prior_var": ETA, "kl_weight": 1.0, "layer_clip": None, "guard": False, "fisher": "exact"}
    how |= {"stats_every": 1, "refresh_every": 20, "ema_factors": 0.01, "ema_scale": 0.01, "noise_ramp": 0}
    opt = method(model, likelihood=likelihood, **accepted(method, **how), **options)
    losses = []
    for _ in range(steps):
        x = torch.randn(B, D) * SPECTRUM.sqrt()
        y = x @ truth.mT + torch.randn(B, 1)
        with opt.sampled_params():
            opt.zero_grad()
            likelihood.nll(model(x), y).backward()
        opt.step()
        losses.append(0.5 * SPECTRUM * (model[0].weight.detach() - truth)[0].square())
    return torch.stack(losses)


@pytest.mark.parametrize("lr", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("method", [en.NoisyEKFAC, en.NoisyAdam])
def test_the_excess_loss_of_constant_steps_is_what_theory_says(method, lr):
    """A direction whose error shrinks by ρ = αR/(R + γ) a step gets noise R/B, and keeps a loss of ρ/(2B(2 − ρ))."""
    runs = [excess_losses(method, 4000, seed, lr=lr, memory=None, momentum=0.0)[2000:] for seed in range(3)]
    excess = torch.cat(runs).mean(0)
    rho = lr * SPECTRUM / (SPECTRUM + lr / (B * ETA))
    expected = rho / (2 * B * (2 - rho))
    settled = rho * 2000 > 20
    assert settled.sum() >= D // 2
    assert 0.75 < excess[settled].sum() / expected[settled].sum() < 1.35
    assert (excess[~settled] < 5 * 0.5 * ETA * SPECTRUM[~settled]).all()  # no farther than the prior has it
    assert expected.sum() < 0.8 * lr * D / (4 * B)  # which steps without this damping would leave


@pytest.mark.parametrize("method", METHODS)
def test_ten_times_as_many_steps_are_never_worse(method):
    """By default the excess falls about as 1/steps: what any estimate from so many examples has."""
    short = torch.stack([excess_losses(method, 300, seed)[-50:].sum(-1).mean() for seed in range(4)])
    long = torch.stack([excess_losses(method, 3000, seed)[-500:].sum(-1).mean() for seed in range(4)])
    assert long.mean() < 0.3 * short.mean()
    assert long.mean() < 5 * D / (4 * 3000 * B)  # a fifth is remembered


def test_a_step_remembers_a_share_of_what_was_seen(monkeypatch):
    opt = en.NoisyEKFAC(nn.Sequential(nn.Linear(3, 1)), num_data=100, likelihood="regression", lr=0.1, memory=0.25)
    seen = []

    def recorded(group, terms, total):
        seen.append((terms, total))
        return step_size(group, terms, total)

    monkeypatch.setattr(natural_gradient, "step_size", recorded)
    for rows in (10, 10, 5):
        with opt.sampled_params():
            opt.zero_grad()
            opt.likelihood.nll(opt.model(randn(rows, 3)), randn(rows, 1)).backward()
        opt.step()
    assert seen == [(10, 10), (10, 20), (5, 25)]
    assert step_size(opt.group, 10, 20) == 0.1  # lr is the largest
    assert step_size(opt.group, 10, 10_000) == 10 / 2500
    opt.group["memory"] = None
    assert step_size(opt.group, 10, 10_000) == 0.1


def test_samples_and_accumulation_count_examples_once():
    def train(blocks, **options):
        opt = en.NoisyEKFAC(nn.Sequential(nn.Linear(3, 1)), num_data=100, likelihood="regression", **options)
        opt.zero_grad()
        for _ in range(blocks):
            with opt.sampled_params():
                (opt.likelihood.nll(opt.model(torch.ones(8, 3)), torch.zeros(8, 1)) / blocks).backward()
        opt.step()
        return opt.seen

    assert train(1) == 8
    assert train(4, samples=4) == 8  # four samples of the weights on the same examples
    assert train(3) == 24  # three parts of a batch


def test_the_count_of_examples_survives_a_restart():
    def build():
        torch.manual_seed(0)
        return en.NoisyEKFAC(nn.Sequential(nn.Linear(3, 1)), num_data=100, likelihood="regression")

    opt = build()
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(torch.ones(8, 3)), torch.zeros(8, 1)).backward()
    opt.step()
    again = build()
    again.load_state_dict(opt.state_dict())
    assert again.seen == 8


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"damping": "much"}, ValueError, "damping must be a number or 'auto'"),
        ({"damping": -1.0}, ValueError, "damping"),
        ({"memory": 0.0}, ValueError, "memory"),
        ({"memory": 2.0}, ValueError, "memory"),
        ({"memory": "all"}, TypeError, "memory"),
        ({"kl_weight": "cold"}, ValueError, "kl_weight must be a number or 'auto'"),
    ],
)
def test_what_is_no_step_size_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        en.NoisyEKFAC(nn.Sequential(nn.Linear(3, 1)), num_data=100, likelihood="regression", **options)


def test_the_default_weight_of_the_kl_term():
    classes, noise, known = en.CategoricalLikelihood(), en.GaussianLikelihood(), en.GaussianLikelihood(precision=1.0)
    assert resolve_kl_weight("auto", classes, num_data=1000, weights=5000) == 0.1
    assert resolve_kl_weight("auto", classes, num_data=1000, weights=100_000) == 0.01
    assert resolve_kl_weight("auto", noise, num_data=1000, weights=100_000) == 0.3
    assert resolve_kl_weight("auto", known, num_data=1000, weights=5000) == 0.1
    assert resolve_kl_weight(1, classes, num_data=1000, weights=5000) == 1.0
    opt = en.NoisyEKFAC(nn.Sequential(nn.Linear(99, 3)), num_data=100, likelihood=classes)
    assert math.isclose(opt.group["kl_weight"], 0.1)
