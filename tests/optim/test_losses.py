"""The running loss, and the word when training is hopeless."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import eigenoise as en
from eigenoise.optim.monitoring import SPAN, RunningLoss


def after(losses, models=1):
    running = RunningLoss(models)
    for step, loss in enumerate(losses):
        running.add(torch.tensor(float(loss)), step)
    return running


def test_the_mean_is_of_all_steps_at_first_and_of_about_the_last_hundred_later():
    assert after([]).mean is None
    assert float(after([1, 2, 6]).mean) == pytest.approx(3)
    assert float(after([5] * 1000 + [0] * SPAN).mean) == pytest.approx(5 * (1 - 1 / SPAN) ** SPAN)


@pytest.mark.parametrize(
    ("losses", "models"),
    [
        ([2.3] + [7.2] * 200, 1),  # 4.9 above the start
        ([100] + [299] * 200, 1),  # not three times
        ([-5] + [-0.1] * 200, 1),
        ([2.3] + [1000] * (SPAN - 2) + [0.1] * SPAN * 10, 1),  # it comes back before the first look
        ([2.3] * 150 + [1e6] + [2.3] * 500, 1),  # one outlier
        ([23] + [72] * 200, 10),
    ],
)
def test_moderate_losses_are_nobodys_business(losses, models):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not after(losses, models).diagnosis()


@pytest.mark.parametrize(
    ("losses", "models"), [([2.3] + [451] * 300, 1), ([-5] + [0.2] * 600, 1), ([23] + [74] * 600, 10)]
)
def test_hopeless_ones_are_said_once(losses, models):
    with pytest.warns(RuntimeWarning, match=r"far above its initial value .*: lower lr, or kl_weight") as said:
        running = after(losses, models)
    assert len(said) == 1
    assert f"initial value {losses[0] / models:.3g}" in str(said[0].message)
    assert running.diagnosis()


def train(opt, model, steps, x, y):
    for _ in range(steps):
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(model(x), y).backward()
        opt.step()


def hopeless(**options):
    """Far too large steps: the loss rises until it is no number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1)).float()
    likelihood = en.GaussianLikelihood(precision=1.0)
    opt = en.BayesByBackprop(model, num_data=50, likelihood=likelihood, lr=3.0, **options)
    x = torch.randn(50, 3, dtype=torch.float32)
    return model, opt, x, x[:, :1]


def test_an_optimiser_says_so_while_it_trains_and_goes_on():
    model, opt, x, y = hopeless()
    with pytest.warns(RuntimeWarning, match=r"step 99: the loss averaged over the last 100 steps is"):
        train(opt, model, 150, x, y)
    assert opt.steps == 150
    assert all(p.isfinite().all() for p in model.parameters())


def test_when_a_loss_is_no_number_at_last_the_error_tells_how_it_came_to_that():
    model, opt, x, y = hopeless()
    with pytest.warns(RuntimeWarning):
        train(opt, model, 100, x, y)
    with pytest.raises(FloatingPointError, match=r"NaN or infinite at step 100: .* far above its initial value"):
        train(opt, model, 1, x * torch.nan, y)


def test_what_was_lost_is_kept_with_the_state():
    model, opt, x, y = hopeless()
    train(opt, model, 30, x, y)
    kept = opt.state_dict()
    model, other, *_ = hopeless()
    other.load_state_dict(kept)
    train(opt, opt.model, 1, x, y)
    assert float(other.losses.first) == float(opt.losses.first)
    assert float(other.losses.mean) == float(kept["eigenoise"]["losses"]["mean"])
    assert float(other.losses.mean) != float(opt.losses.mean)


def test_a_state_from_another_device_comes_to_where_the_losses_are():
    losses = RunningLoss()
    losses.add(torch.tensor(2.0), 0)
    other = RunningLoss()
    other.load(losses.state(), torch.device("meta"))
    assert {part.device.type for part in other.state().values()} == {"meta"}
    assert losses.mean.device.type == "cpu"


@pytest.mark.parametrize("kind", ["classes", "numbers", "numbers with variances", "zeros and ones"])
@pytest.mark.parametrize("learnable", [False, True])
def test_a_loss_of_a_constant_guess_is_said_once(kind, learnable):
    torch.manual_seed(0)
    x = torch.randn(400, 3)
    signal = x[:, :1] if learnable else torch.randn(400, 1)
    y, likelihood, outputs = {
        "classes": ((signal[:, 0] > 0).long(), en.CategoricalLikelihood(), 2),
        "numbers": (signal, en.GaussianLikelihood(), 1),
        "numbers with variances": (signal, en.HeteroscedasticGaussianLikelihood(), 2),
        "zeros and ones": ((signal > 0).to(x.dtype), en.BernoulliLikelihood(), 1),
    }[kind]
    model = nn.Linear(3, outputs)
    options = {"lr": 0.1, "kl_weight": 0.1} if learnable else {"lr": 1e-9}
    opt = en.NoisyEKFAC(model, num_data=400, likelihood=likelihood, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(600):
            rows = slice(i % 8 * 50, i % 8 * 50 + 50)
            train(opt, model, 1, x[rows], y[rows])
    said = [str(each.message) for each in said]
    assert len(said) == (0 if learnable else 1)
    if not learnable:
        assert "no better than guessing the same for every input" in said[0]
        assert "lower kl_weight or prior_var" in said[0]


@pytest.mark.parametrize(
    ("likelihood", "f", "y", "expected"),
    [
        (en.CategoricalLikelihood(), torch.zeros(1, 2), torch.tensor([0, 1, 1, 1] * 10), 0.5623),
        (en.CategoricalLikelihood(), torch.zeros(1, 9), torch.tensor([0, 1, 1, 1] * 10), None),  # too few to tell
        (en.BernoulliLikelihood(), torch.zeros(1, 2), torch.tensor([[0.0, 1.0], [1.0, 1.0]]), 0.6931),
        (en.GaussianLikelihood(), torch.zeros(1, 1), torch.tensor([[-2.0], [2.0]]), 2.1121),
        (en.GaussianLikelihood(precision=4.0), torch.zeros(1, 1), torch.tensor([[-2.0], [2.0]]), 8.2258),
        (en.HeteroscedasticGaussianLikelihood(), torch.zeros(1, 2), torch.tensor([[-2.0], [2.0]]), 2.1121),
    ],
)
def test_the_loss_of_the_best_constant(likelihood, f, y, expected):
    found = likelihood.constant_loss(f, y)
    assert found == (expected if expected is None else pytest.approx(expected, abs=1e-4))
