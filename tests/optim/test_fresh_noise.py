"""Noise drawn for every example: exact marginals, unbiased gradients, statistics as with shared samples."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import eigenoise as en

METHODS = {
    "EMVG": en.NoisyEKFAC,
    "MVG, exact": en.NoisyKFAC,
    "MVG, factored": functools.partial(en.NoisyKFAC, damping_form="factored"),
    "FFG": en.NoisyAdam,
}
DRAWS = 2500
STANDARD_ERRORS = 5.0


def build(model, method=en.NoisyEKFAC, noise="per-example", likelihood=None, **options):
    options = {"num_data": 30, "stats_every": 10**6, "lr": 0.01, **options}
    return method(
        model,
        likelihood=likelihood or en.GaussianLikelihood(),
        noise=noise,
        generator=torch.Generator().manual_seed(5),
        **options,
    )


def step(opt, x, y):
    opt.zero_grad()
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(x), y).backward()
    opt.step()


def fitted(model, method, x, y, **options):
    """An optimiser after a few steps, the first with statistics and a basis."""
    opt = build(model, method, **options)
    for _ in range(4):
        step(opt, x, y)
    return opt


def outputs(opt, x, draws=DRAWS):
    """What training blocks see: ``(draws, *f.shape)``."""
    found = []
    for _ in range(draws):
        with opt.sampled_params():
            found.append(opt.model(x).detach())
    return torch.stack(found)


def assert_mean(values, wanted):
    """The mean of ``values`` over the first axis is ``wanted`` within its standard errors, which are not large."""
    error = values.std(0) / len(values) ** 0.5
    assert ((values.mean(0) - wanted).abs() <= STANDARD_ERRORS * error + 1e-12).all()
    assert error.max() < 0.2 * wanted.abs().max() + 1e-12


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_outputs_have_the_posteriors_distribution(method, bias):
    layer = nn.Linear(3, 4, bias=bias)
    opt = fitted(layer, METHODS[method], torch.randn(20, 3), torch.randn(20, 4))
    x = torch.randn(2, 3)
    q = opt.posterior[""]
    a = torch.cat([x, torch.ones(2, 1)], 1) if bias else x
    f = outputs(opt, x)
    mean = a @ q.mean.mT
    assert_mean(f, mean)
    centred = f - mean
    n = a.shape[1]
    sigma = q.covariance_matrix if hasattr(q, "covariance_matrix") else torch.diag(q.variance.flatten())
    sigma = sigma.reshape(4, n, 4, n)
    for i in range(2):  # the covariance between outputs of one example
        wanted = torch.einsum("n,pnqm,m->pq", a[i], sigma, a[i])
        assert_mean(centred[:, i, :, None] * centred[:, i, None, :], wanted)
    between = centred[:, 0, :, None] * centred[:, 1, None, :]  # examples are independent
    assert (between.mean(0).abs() <= STANDARD_ERRORS * between.std(0) / DRAWS**0.5).all()


def test_a_convolution_has_the_marginal_variances_of_its_weights():
    model = nn.Sequential(nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.Flatten(), nn.Linear(27, 2))
    opt = fitted(model, en.NoisyEKFAC, torch.randn(20, 2, 4, 4), torch.randn(20, 2))
    conv, x = model[0], torch.randn(2, 2, 4, 4)
    variance = opt.posterior["0"].variance
    spread = [variance[:, :-1].reshape(conv.weight.shape), variance[:, -1]]
    wanted = nn.functional.conv2d(x.square(), *spread, stride=2, padding=1)
    seen = []
    for _ in range(DRAWS):
        with opt.sampled_params():
            seen.append(conv(x).detach())
    f = torch.stack(seen)
    assert_mean((f - f.mean(0)).square(), wanted)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_unbiased(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(10, 3), torch.randn(10, 2)
    opt = fitted(model, METHODS[method], x, y, kl_weight=3.0)
    twin = build(copy.deepcopy(model), METHODS[method], noise="shared", kl_weight=3.0, eigenbasis=False)
    state = opt.state_dict()
    for slot in state["eigenoise"]["slots"].values():
        slot.pop("mean")
    twin.load_state_dict(state)
    means = {}
    for name, one in (("fresh", opt), ("shared", twin)):
        found = []
        for _ in range(DRAWS):
            one.zero_grad()
            with one.sampled_params():
                one.likelihood.nll(one.model(x), y).backward()
            matrices = []
            for slot in one.slots:
                matrix = torch.cat([slot.layer.params[0].grad, slot.layer.params[1].grad[:, None]], 1)
                matrices.append(slot.fisher.unrotate(matrix) if slot.rotated else matrix)
            found.append(torch.cat([m.flatten() for m in matrices]))
            one._forget()
        means[name] = torch.stack(found)
    fresh, shared = means["fresh"], means["shared"]
    error = (fresh.var(0) / DRAWS + shared.var(0) / DRAWS).sqrt()
    assert ((fresh.mean(0) - shared.mean(0)).abs() <= STANDARD_ERRORS * error).all()
    assert fresh.var(0).sum() < shared.var(0).sum()  # and of less variance


@pytest.mark.parametrize("method", METHODS)
def test_steps_with_statistics_are_those_of_a_shared_sample(method):
    x, y = torch.randn(10, 3), torch.randn(10, 2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    one, other = (
        build(copy.deepcopy(model), METHODS[method], noise=noise, stats_every=1, eigenbasis=noise == "shared" or None)
        for noise in ("per-example", "shared")
    )
    for opt in (one, other):
        for _ in range(3):
            step(opt, x, y)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach())


def test_predictions_share_a_sample():
    layer = nn.Linear(2, 1)
    opt = fitted(layer, en.NoisyEKFAC, torch.randn(20, 2), torch.randn(20, 1))
    x = torch.randn(1, 2).expand(5, 2)
    with opt.sampled_params(torch.Generator().manual_seed(0)), torch.no_grad():
        f = opt.model(x)
    assert torch.equal(f, f[:1].expand(5, 1))
    with opt.sampled_params():
        f = opt.model(x)
    assert f.unique().numel() == 5


def test_a_dead_input_gives_no_nan():
    layer = nn.Linear(3, 2, bias=False)
    opt = fitted(layer, en.NoisyEKFAC, torch.randn(20, 3), torch.randn(20, 2))
    x = torch.zeros(4, 3, requires_grad=True)
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(x), torch.randn(4, 2)).backward()
    assert torch.isfinite(x.grad).all()


def test_layers_that_cannot_draw_outputs_share_a_sample():
    model, likelihood = en.models.MLP(3, [4], 1, stack=2), en.GaussianLikelihood(stack=2)
    opt = build(model, likelihood=likelihood)
    x, y = torch.randn(2, 6, 3), torch.randn(2, 6, 1)
    step(opt, x, y)
    same = torch.randn(2, 1, 3).expand(2, 6, 3)
    with opt.sampled_params():
        f = opt.model(same)
    torch.testing.assert_close(f, f[:, :1].expand_as(f))
    with opt.sampled_params():
        assert not torch.allclose(opt.model(same), f)


def test_training_resumes_bit_for_bit():
    x, y = torch.randn(10, 3), torch.randn(10, 1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    straight = build(model, stats_every=3)
    for _ in range(4):
        step(straight, x, y)
    saved = copy.deepcopy((straight.model.state_dict(), straight.state_dict()))
    again = build(copy.deepcopy(straight.model), stats_every=3)
    again.model.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    for opt in (straight, again):
        for _ in range(4):
            step(opt, x, y)
    for a, b in zip(straight.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a.detach(), b.detach())


class Again(nn.Module):
    """A layer that is computed a second time in the backward pass."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(9, 8), nn.Linear(8, 1)
        self.again = True

    def forward(self, x):
        h = checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
        return self.head(h.tanh())


# By default.


def same_rows(opt, x):
    """Whether equal inputs have equal outputs within a training block."""
    with opt.sampled_params():
        f = opt.model(x)
    return torch.allclose(f, f[:1].expand_as(f), rtol=1e-9)


def test_by_default_few_rows_of_a_large_layer_get_their_own_noise():
    layer = nn.Linear(9, 8)
    opt = fitted(layer, en.NoisyEKFAC, torch.randn(20, 9), torch.randn(20, 8), noise="auto", eigenbasis=True)
    x = torch.randn(1, 9)
    assert not same_rows(opt, x.expand(4, 9))
    assert same_rows(opt, x.expand(60, 9))  # it costs less to form the weight
    assert same_rows(opt, x.expand(4, 1, 9))  # rows may be positions of one example
    with torch.no_grad():
        assert same_rows(opt, x.expand(4, 9))
    opt.steps = 0  # statistics are due
    assert same_rows(opt, x.expand(4, 9))


def test_by_default_small_layers_share_a_sample():
    layer = nn.Linear(9, 8)
    opt = fitted(layer, en.NoisyEKFAC, torch.randn(20, 9), torch.randn(20, 8), noise="auto")
    assert same_rows(opt, torch.randn(1, 9).expand(4, 9))
    for options in ({"samples": 2, "antithetic": True}, {"noise": "shared"}):
        opt = build(nn.Linear(9, 8), **{"noise": "auto", "eigenbasis": True, **options})
        opt.steps = 1
        assert same_rows(opt, torch.randn(1, 9).expand(4, 9))


def test_by_default_the_prior_pulls_at_what_was_used():
    layer = nn.Linear(9, 8)
    opt = fitted(layer, en.NoisyEKFAC, torch.randn(20, 9), torch.randn(20, 8), noise="auto", eigenbasis=True)
    for rows, shared in ((4, False), (60, True)):
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(layer(torch.randn(rows, 9)), torch.randn(rows, 8)).backward()
        assert torch.equal(opt.blocks.drawn[0], opt.slots[0].mean) != shared
        opt.step()


def test_by_default_a_checkpoint_shares_a_sample():
    x, y = torch.randn(4, 9), torch.randn(4, 1)
    gradients = []
    for again in (True, False):
        torch.manual_seed(0)
        opt = build(Again(), noise="auto" if again else "shared", eigenbasis=True)
        opt.model.again = again
        step(opt, x, y)
        opt.model.head.requires_grad_(True)
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(opt.model(x), y).backward()
            gradients.append(opt.model.body.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_what_it_cannot_do_is_refused():
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="noise must be one of 'auto', 'shared', 'per-example'"):
        build(layer, noise="fresh")
    with pytest.raises(ValueError, match="not parallel or antithetic samples"):
        build(layer, samples=2, antithetic=True)

    opt = build(Again())
    x, y = torch.randn(5, 9), torch.randn(5, 1)
    step(opt, x, y)  # a statistics step
    opt.zero_grad()
    with (
        pytest.raises(RuntimeError, match="'body' is computed a second time in the backward pass"),
        opt.sampled_params(),
    ):
        opt.likelihood.nll(opt.model(x), y).backward()


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_fishers_under_autocast(kind, dtype):
    """1/R is beyond float16, and the noise that comes of it is not."""
    torch.manual_seed(0)
    layer = nn.Linear(9, 4) if kind == "linear" else nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten())
    first = nn.Identity() if kind == "linear" else nn.Unflatten(1, (1, 3, 3))
    model = nn.Sequential(first, layer, nn.Tanh(), nn.Linear(4 if kind == "linear" else 16, 1)).float()
    options = {"noise": "per-example", "init": 1e-6, "warmup": False, "ema_scale": 0.003}
    opt = en.NoisyAdam(model, num_data=10**6, likelihood=en.GaussianLikelihood(precision=1.0), **options)
    x = torch.randn(20, 9, dtype=torch.float32)
    x[:, :2] = 0.0
    for _ in range(5):
        opt.zero_grad()
        with opt.sampled_params():
            with torch.autocast("cpu", dtype):
                f = model(x)
            opt.likelihood.nll(f.float(), x[:, -1:]).backward()
        opt.step()
    assert opt.steps == 5
    assert all(torch.isfinite(p).all() for p in model.parameters())
