"""The size of steps and their damping: what they remember, and the excess loss that this leaves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import eigenoise as en
from arguments import accepted
from eigenoise.checks import NotFiniteError
from eigenoise.optim import natural_gradient
from eigenoise.optim.kl_weight import resolve_kl_weight
from eigenoise.optim.step_size import MAX_MOVE, step_size
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
    how = {"num_data": 10**9, "prior_var": ETA, "kl_weight": 1.0, "guard": False, "fisher": "exact"}
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
    """A direction whose error shrinks by ρ = αR/D a step gets noise R/B, and keeps a loss of ρ/(2B(2 − ρ)).

    The gradient's square is then v = 2R/(B(2 − ρ)) on average, and D = R + α/(κ√η)·√v.
    """
    runs = [excess_losses(method, 4000, seed, lr=lr, memory=None, momentum=0.0)[2000:] for seed in range(3)]
    excess = torch.cat(runs).mean(0)
    rho = torch.zeros(D)
    for _ in range(100):
        rho = lr * SPECTRUM / (SPECTRUM + lr / (MAX_MOVE * ETA**0.5) * (2 * SPECTRUM / (B * (2 - rho))).sqrt())
    expected = rho / (2 * B * (2 - rho))
    settled = rho * 2000 > 20
    assert settled.sum() >= 4
    assert 0.75 < excess[settled].sum() / expected[settled].sum() < 1.35
    assert (excess[~settled] < 5 * (expected + 0.5 * ETA * SPECTRUM)[~settled]).all()
    assert excess.sum() < 0.8 * lr * D / (2 * B * (2 - lr))  # which steps without the bound on moves would leave


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_moves_weights_by_a_share_of_their_prior_deviation(method, scale):
    """However large or small gradients are, and whatever lr is: |m| ≤ √v̂·√(Σ weights²/weight) by Cauchy–Schwarz."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3, bias=False)).double()
    likelihood = en.GaussianLikelihood(precision=1.0)
    how = {"num_data": 10**9, "prior_var": 0.25, "max_move": 0.02, "lr": 1.0, "memory": None, "guard": False}
    opt = method(model, likelihood=likelihood, kl_weight=1e-9, **how)
    moves = []
    for _ in range(30):
        before = model[0].weight.detach().clone()
        with opt.sampled_params():
            opt.zero_grad()
            likelihood.nll(scale * model(randn(8, 6).double()), scale * randn(8, 3).double()).backward()
        opt.step()
        slot = opt.slots[0]
        moved = model[0].weight.detach() - before
        moves.append((moved if slot.fisher.factors is None else slot.fisher.rotate(moved)).abs().max())
    unit = 0.02 * 0.25**0.5
    assert max(moves) < 3 * unit
    assert max(moves) > 0.1 * unit or scale == 1e6  # steep directions take the smaller natural-gradient step


def test_a_gradient_whose_square_overflows_is_refused():
    model = nn.Sequential(nn.Linear(3, 1)).float()
    opt = en.NoisyEKFAC(model, num_data=100, likelihood="regression", guard=False)

    def gradients_of(size):
        with opt.sampled_params():
            opt.zero_grad()
            opt.likelihood.nll(model(torch.ones(4, 3).float()), torch.zeros(4, 1).float()).backward()
        for param in model.parameters():
            param.grad.fill_(size)

    gradients_of(1.0)
    opt.step()
    before = [slot.squares.clone() for slot in opt.slots]
    gradients_of(1e25)
    with pytest.raises(NotFiniteError, match="finite"):
        opt.step()
    assert all(torch.equal(slot.squares, square) for slot, square in zip(opt.slots, before, strict=True))


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
        ({"damping": "auto"}, TypeError, "damping must be a number"),
        ({"max_move": 0.0}, ValueError, "max_move"),
        ({"max_move": "far"}, TypeError, "max_move"),
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
    assert resolve_kl_weight("auto", classes, num_data=1000, weights=100_000) == pytest.approx(0.03)
    assert resolve_kl_weight("auto", noise, num_data=1000, weights=100_000) == 0.3
    assert resolve_kl_weight("auto", known, num_data=1000, weights=5000) == 0.1
    assert resolve_kl_weight(1, classes, num_data=1000, weights=5000) == 1.0
    opt = en.NoisyEKFAC(nn.Sequential(nn.Linear(99, 3)), num_data=100, likelihood=classes)
    assert math.isclose(opt.group["kl_weight"], 0.1)
