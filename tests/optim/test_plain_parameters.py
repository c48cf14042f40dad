"""Parameters stay plain: what a user does with weights and gradients works as with any optimiser."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import eigenoise as en
from eigenoise.optim.decomposition_schedule import turns

METHODS = [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam, en.EKFAC, en.KFAC, en.BayesByBackprop]
every_method = pytest.mark.parametrize("method", METHODS)


class Twice(nn.Module):
    """A layer that is called twice, once in a checkpoint, and a weight that is also used directly."""

    def __init__(self):
        super().__init__()
        self.first, self.body, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2, bias=False)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = torch.tanh(checkpoint(self.body, h, use_reentrant=False))
        return self.last(torch.tanh(self.body(h))) + functional.linear(h, self.last.weight) * 0.1


def vectors():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))


def images():
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)
    )


MODELS = {"vectors": vectors, "images": images, "twice": Twice}


def build(kind="vectors", method=en.NoisyEKFAC, dtype=torch.float64, **options):
    torch.manual_seed(1)
    model = MODELS[kind]().to(dtype)
    x, y = torch.randn(80, 5, dtype=dtype), torch.randn(80, 2, dtype=dtype)
    options = {"generator": torch.Generator().manual_seed(3), "lr": 0.02, **options}
    if method is not en.BayesByBackprop:
        options = {"stats_every": 2, **options}
    if method not in (en.BayesByBackprop, en.EKFAC, en.KFAC):
        options = {"noise_ramp": 0, **options}
    opt = method(model, num_data=90, likelihood=en.GaussianLikelihood(), **options)
    return opt, x, y


def train(opt, x, y, steps=5, penalty=0.0):
    for _ in range(steps):
        opt.zero_grad()
        with opt.sampled_params():
            loss = opt.likelihood.nll(opt.model(x), y)
            if penalty:
                loss = loss + penalty * sum(p.square().sum() for p in opt.model.parameters())
            loss.backward()
        opt.step()


def weights(opt):
    return [p.detach().clone() for p in opt.model.parameters()]


@every_method
@pytest.mark.parametrize("kind", MODELS)
def test_parameters_are_plain_and_gradients_are_by_weights(kind, method):
    opt, x, y = build(kind, method)
    train(opt, x, y)
    opt.zero_grad()
    with opt.sampled_params():
        sample = {name: p.detach().clone() for name, p in opt.model.named_parameters()}
        opt.likelihood.nll(opt.model(x), y).backward()
    assert all(type(p) is nn.Parameter for p in opt.model.parameters())
    twin = copy.deepcopy(opt.model)
    twin.load_state_dict(sample)
    twin.zero_grad()
    copy.deepcopy(opt.likelihood).nll(twin(x), y).backward()
    for (name, p), other in zip(opt.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


@every_method
def test_a_backward_pass_outside_the_block_adds_to_the_gradient(method):
    """A penalty on the mean: the same gradient as added by hand."""
    results = []
    for by_hand in (False, True):
        opt, x, y = build(method=method)
        train(opt, x, y, steps=3)
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(opt.model(x), y).backward()
        if by_hand:
            for p in opt.model.parameters():
                p.grad += 0.3 * 2 * p.detach()
        else:
            (0.3 * sum(p.square().sum() for p in opt.model.parameters())).backward()
        opt.step()
        results.append(weights(opt))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@every_method
def test_one_sample_is_one_function_however_often_it_is_called(method):
    opt, x, y = build(method=method)
    train(opt, x, y)
    with opt.sampled_params(), torch.no_grad():
        first = opt.model[0]
        assert torch.equal(first(x), first(x))
        torch.testing.assert_close(first(x[:3]), first(x)[:3])
        torch.testing.assert_close(first(x), functional.linear(x, first.weight, first.bias))


def test_elements_of_gradients_can_be_clipped_and_logged():
    opt, x, y = build()
    opt.zero_grad()
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(x), y).backward()
    nn.utils.clip_grad_value_(opt.model.parameters(), 1e-3)
    assert max(float(p.grad.abs().max()) for p in opt.model.parameters()) <= 1e-3
    wanted = [p.grad.clone() for p in opt.model.parameters()]
    opt.param_groups[0]["prior_var"] = 1e30  # so that the gradient is the loss's alone
    opt.step()
    gradient = opt.slots[0].fisher.unrotate(opt.slots[0].momentum) / 0.1  # of which the momentum has taken a tenth
    torch.testing.assert_close(gradient, torch.cat([wanted[0], wanted[1].unsqueeze(-1)], -1))


def test_models_can_be_averaged():
    opt, x, y = build()
    average = torch.optim.swa_utils.AveragedModel(opt.model)
    total = [torch.zeros_like(p) for p in opt.model.parameters()]
    for _ in range(4):
        train(opt, x, y, steps=1)
        average.update_parameters(opt.model)
        total = [t + p.detach() for t, p in zip(total, opt.model.parameters(), strict=True)]
    for mean, p in zip(total, average.module.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), mean / 4)


def test_a_loss_that_uses_weights_directly_has_the_right_gradient():
    opt, x, y = build()
    opt.zero_grad()
    with opt.sampled_params():
        sample = weights(opt)
        opt.likelihood.nll(opt.model(x), y).backward()
        plain = [p.grad.clone() for p in opt.model.parameters()]
        opt.zero_grad()
        (opt.likelihood.nll(opt.model(x), y) + 0.1 * sum(p.square().sum() for p in opt.model.parameters())).backward()
    for p, grad, w in zip(opt.model.parameters(), plain, sample, strict=True):
        torch.testing.assert_close(p.grad, grad + 0.2 * w)
    opt.step()


def test_a_gradient_penalty_can_be_trained():
    opt, x, y = build()
    x.requires_grad_()
    for _ in range(3):
        opt.zero_grad()
        with opt.sampled_params():
            f = opt.model(x)
            (slope,) = torch.autograd.grad(f.sum(), x, create_graph=True)
            (opt.likelihood.nll(f, y) + slope.square().mean()).backward()
        opt.step()
    assert all(torch.isfinite(p).all() for p in opt.model.parameters())


@pytest.mark.parametrize("change", ["load_state_dict", "data", "copy_"])
def test_weights_that_a_user_changes_are_trained_from(change):
    opt, x, y = build()
    train(opt, x, y)
    wanted = {name: torch.randn_like(p) for name, p in opt.model.state_dict().items()}
    if change == "load_state_dict":
        opt.model.load_state_dict(wanted)
    for name, p in opt.model.named_parameters():
        if change == "data":
            p.data = wanted[name].clone()
        elif change == "copy_":
            with torch.no_grad():
                p.copy_(wanted[name])
    for name, mean in opt.posterior.mean.items():
        assert torch.equal(mean, wanted[name])
    with opt.sampled_params():
        assert not any(torch.equal(p, wanted[name]) for name, p in opt.model.named_parameters())
    for name, p in opt.model.named_parameters():
        assert torch.equal(p, wanted[name])  # to the last bit, until a step moves them


def test_a_second_optimiser_of_the_model_starts_where_the_first_is():
    first, x, y = build()
    train(first, x, y)
    second = en.NoisyEKFAC(first.model, num_data=90, likelihood=first.likelihood)
    train(second, x, y, steps=1)
    for name, mean in first.posterior.mean.items():
        assert torch.equal(mean, dict(first.model.named_parameters())[name])


@pytest.mark.parametrize("what", ["posterior", "state_dict", "kl", "step"])
def test_nothing_is_rounded_under_autocast(what):
    opt, x, y = build(dtype=torch.float32)
    train(opt, x, y)
    if what == "step":
        opt.param_groups[0]["lr"] = 0.0
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(opt.model(x), y).backward()
    before = weights(opt)
    with torch.autocast("cpu", torch.bfloat16):
        result = opt.posterior if what == "posterior" else getattr(opt, what)()
    if what == "posterior":
        assert torch.equal(result["0"].variance, opt.posterior["0"].variance)
    for one, other in zip(weights(opt), before, strict=True):
        assert torch.equal(one, other)


def test_a_load_that_is_refused_in_a_block_leaves_the_sample_in_place():
    opt, x, y = build()
    train(opt, x, y)
    state = copy.deepcopy(opt.state_dict())
    opt.zero_grad()
    with opt.sampled_params(), torch.no_grad():
        before = opt.model(x)
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) inside sampled_params"):
            opt.load_state_dict(state)
        assert torch.equal(opt.model(x), before)


# Sides that are not decomposed.


def test_a_side_that_is_too_large_keeps_the_identity_and_print_says_so():
    opt, x, y = build(max_side=6)
    train(opt, x, y)
    assert torch.equal(opt.slots[0].fisher.factors.q_out, torch.eye(7))
    assert not torch.equal(opt.slots[0].fisher.factors.q_in, torch.eye(6))
    lines = str(opt).splitlines()
    assert "7 outputs are too many to decompose" in next(line for line in lines if "0.weight" in line)
    assert "7 inputs are too many to decompose" in next(line for line in lines if "2.weight" in line)
    assert "too many" not in next(line for line in lines if "4.weight" in line)
    assert "MB; new eigenbases every 100 steps" in lines[-1]


# Turns.


def test_large_decompositions_take_turns(monkeypatch):
    monkeypatch.setattr("eigenoise.optim.decomposition_schedule.MAX_COST_PER_STEP", 0)
    model = nn.Sequential(nn.Linear(20, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 20), nn.Linear(20, 2))
    opt = en.NoisyEKFAC(model, num_data=50, likelihood=en.GaussianLikelihood(), refresh_every=6, stats_every=1)
    x, y = torch.randn(60, 20), torch.randn(60, 2)
    seen = []
    for _ in range(12):
        before = [slot.fisher.factors.q_in.clone() for slot in opt.slots]
        train(opt, x, y, steps=1)
        seen.append([i for i, slot in enumerate(opt.slots) if not torch.equal(before[i], slot.fisher.factors.q_in)])
    assert seen == 2 * [[], [0], [1, 2], [3], [], []]


@pytest.mark.parametrize(
    ("costs", "every", "stats_every", "expected"),
    [
        ([9, 9, 9], 10, 5, {0: [0, 1, 2]}),  # all together cost no more than one step may do
        ([100, 100, 100], 10, 5, {0: [], 1: [0], 2: [1], 3: [2]}),
        ([20, 300, 400, 20, 380], 10, 2, {0: [0], 1: [1], 3: [2], 5: [3, 4]}),
        ([100] * 7, 4, 1, {0: [], 1: [0, 1], 2: [2, 3], 3: [4, 5, 6]}),  # statistics at every step
        ([100] * 7, 3, 2, {0: [0], 1: [1, 2, 3, 4, 5, 6]}),
        ([100] * 7, 1, 1, {0: [0, 1, 2, 3, 4, 5, 6]}),
        ([100] * 3, 10**15, 10**12, {0: [], 1: [0], 2: [1], 3: [2]}),  # as good as never
        ([], 5, 1, {0: []}),
    ],
)
def test_turns(monkeypatch, costs, every, stats_every, expected):
    monkeypatch.setattr("eigenoise.optim.decomposition_schedule.MAX_COST_PER_STEP", 27)
    assert turns(costs, every, (stats_every, 10**9)) == expected
    assert turns(costs, every, (10**9, stats_every)) == expected
