"""All weight samples of a step at once, as one more leading axis, against one block after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eigenoise as en
from eigenoise import linalg
from eigenoise.models import SampledLinear
from eigenoise.optim import training

TOL = {"rtol": 1e-9, "atol": 1e-11}
NOISY = [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam, en.BayesByBackprop]
S, K, B = 3, 4, 6


@pytest.fixture
def data():
    return torch.randn(S, B, 3), torch.randn(S, B, 1)


def build(method, *, parallel, model=None, **options):
    torch.manual_seed(2)
    model = model or en.models.MLP(3, [5], 1, stack=S)
    if method is not en.BayesByBackprop:
        options = {"stats_every": 2, "fisher": "exact", "noise_ramp": 0, **options}
    likelihood = options.pop("likelihood", None) or en.GaussianLikelihood(stack=S)
    return method(model, num_data=40, likelihood=likelihood, samples=K, parallel=parallel, **options)


def one_by_one(opt, noises, x, y):
    """A step of K blocks whose samples are mean + given deviations."""
    opt.zero_grad()
    for k in range(K):

        def draw(generator, ramp, k=k):
            for slot, noise in zip(opt.slots, noises, strict=True):
                slot.sample.copy_(slot.mean + noise[k])

        opt._draw = draw
        with opt.sampled_params():
            opt.likelihood.nll(opt.model(x), y).backward()
    opt.step()


def at_once(opt, noises, x, y):
    def draw(generator, training):
        for slot, noise in zip(opt.slots, noises, strict=True):
            slot.sample.copy_(slot.mean + noise)

    opt._draw = draw
    with opt.sampled_params():
        opt.zero_grad()
        loss = opt.likelihood.nll(opt.model(x), y)
        loss.backward()
    opt.step()
    return loss


@pytest.mark.parametrize("method", NOISY)
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_at_once_is_one_by_one(data, method, fisher):
    options = {} if method is en.BayesByBackprop else {"fisher": fisher}
    slow, fast = build(method, parallel=False, **options), build(method, parallel=True, **options)
    for _ in range(5):
        noises = [0.1 * torch.randn(K, *slot.layer.shape) for slot in slow.slots]
        one_by_one(slow, noises, *data)
        at_once(fast, noises, *data)
    for ours, theirs in zip(fast.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **TOL)
    torch.testing.assert_close(fast.kl(), slow.kl(), **TOL)
    torch.testing.assert_close(fast.likelihood.tau, slow.likelihood.tau, **TOL)
    torch.testing.assert_close(fast.elbo_terms().value, slow.elbo_terms().value, **TOL)


@pytest.mark.parametrize("method", NOISY)
def test_mirrored_at_once_is_one_by_one(data, method):
    slow, fast = build(method, parallel=False), build(method, parallel=True, antithetic=True)
    for _ in range(5):
        half = [0.1 * torch.randn(K // 2, *slot.layer.shape) for slot in slow.slots]
        one_by_one(slow, [torch.cat([noise, -noise]) for noise in half], *data)
        at_once(fast, half, *data)
    for ours, theirs in zip(fast.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **TOL)
    torch.testing.assert_close(fast.kl(), slow.kl(), **TOL)
    torch.testing.assert_close(fast.likelihood.tau, slow.likelihood.tau, **TOL)


@pytest.mark.parametrize("method", NOISY)
def test_samples_have_the_posterior_covariance(data, method):
    opt = build(method, parallel=True, antithetic=False)
    for _ in range(4):
        with opt.sampled_params():
            opt.zero_grad()
            opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
        opt.step()
    draws = []
    for _ in range(600):
        with opt.sampled_params():
            draws.append(opt.slots[0].sample.clone())
    draws = torch.cat(draws)
    q = opt.posterior["0"]
    error = q.variance * (2 / len(draws)) ** 0.5
    assert ((draws.var(0) - q.variance).abs() < 5.5 * error).all()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(K, S, B, 3), (S, B, 3), (B, 3)])
def test_sampled_linear_is_k_linear_maps(shape, with_bias):
    """Against autograd on each sample's own affine map; what holds no bias takes the layer's."""
    x = torch.randn(shape, requires_grad=True)
    sample = torch.randn(S, K, 5, 3 + with_bias, requires_grad=True)
    weight, bias = torch.zeros(S, 5, 3, requires_grad=True), torch.randn(S, 5, requires_grad=True)
    out = SampledLinear.apply(x, sample, weight, bias)
    own = sample[..., 3] if with_bias else bias.unsqueeze(1).expand(S, K, 5)
    rows = x.expand(K, S, B, 3)
    expected = torch.einsum("ksbn,skpn->ksbp", rows, sample[..., :3]) + own.movedim(1, 0).unsqueeze(2)
    torch.testing.assert_close(out, expected, **TOL)
    g = torch.randn(K, S, B, 5)
    by_x, by_sample = torch.autograd.grad(expected, [x, sample], g, retain_graph=True)
    found = torch.autograd.grad(out, [x, sample, weight, bias], g)
    torch.testing.assert_close(found[0], by_x, **TOL)
    torch.testing.assert_close(found[1], by_sample, **TOL)
    torch.testing.assert_close(found[2], by_sample.sum(1)[..., :3], **TOL)
    torch.testing.assert_close(found[3], g.sum((0, 2)), **TOL)
    assert not out._is_view()  # so that what follows may change it in place


def test_antithetic_halves_mirror_each_other(data):
    opt = build(en.NoisyEKFAC, parallel=True, antithetic=True)
    with opt.sampled_params():
        opt.zero_grad()
        opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
        first, second = opt.blocks.swap.samples[0].chunk(2)
        torch.testing.assert_close(first + second, 2 * opt.slots[0].mean.expand_as(first), **TOL)


def test_the_loss_is_the_mean_over_samples(data):
    opt = build(en.NoisyEKFAC, parallel=True)
    with opt.sampled_params():
        f = opt.model(data[0])
        assert f.shape == (K, S, B, 1)
        each = -opt.likelihood.log_prob(f, data[1]).mean(-1).sum(-1)
        torch.testing.assert_close(opt.likelihood.nll(f, data[1]), each.mean(), **TOL)


def test_prediction_elbo_and_the_loop(data):
    x, y = data
    opt = build(en.NoisyEKFAC, parallel=True)
    for _ in training.epochs(opt, x, y, count=2, batch_size=4):
        assert opt.model[0].sample is None
    assert opt.steps == 4
    predicted = en.predict(opt.model, opt, x, samples=6, chunk_size=4)
    assert predicted.loc.shape == (6, S, B, 1)
    assert predicted.mean.shape == y.shape
    assert opt.elbo(x, y, samples=5).value.shape == (S,)


def test_classes_side_by_side():
    opt = build(
        en.NoisyEKFAC,
        parallel=True,
        model=en.models.MLP(3, [4], 5, stack=S),
        likelihood=en.CategoricalLikelihood(stack=S),
        fisher="sampled",
    )
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(torch.randn(B, 3)), torch.randint(5, (S, B))).backward()
    opt.step()
    assert opt.steps == 1


def test_an_exception_takes_the_samples_away(data):
    opt = build(en.NoisyEKFAC, parallel=True)
    before = [p.detach().clone() for p in opt.model.parameters()]

    def interrupted():
        with opt.sampled_params():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(layer.sample is None for layer in opt.model if isinstance(layer, en.models.StackedLinear))
    for ours, theirs in zip(opt.model.parameters(), before, strict=True):
        assert torch.equal(ours, theirs)


def test_other_layers_are_refused_by_name():
    model = nn.Sequential(en.models.StackedLinear(S, 3, 4), nn.LayerNorm(4), en.models.StackedLinear(S, 4, 1))
    with pytest.raises(ValueError, match=r"got '1\.weight'"):
        build(en.NoisyEKFAC, parallel=True, model=model)


def test_a_frozen_bias_stays(data):
    model = en.models.MLP(3, [4], 1, stack=S)
    model[0].bias.requires_grad_(False)
    opt = build(en.NoisyEKFAC, parallel=True, model=model)
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
    opt.step()
    assert model[0].bias.grad is None


@pytest.mark.parametrize("lead", [(), (S,), (2, S)])
def test_shared_rotations(lead):
    q_out = torch.linalg.qr(torch.randn(*lead, 3, 3))[0]
    q_in = torch.linalg.qr(torch.randn(*lead, 4, 4))[0]
    matrix = torch.randn(K, *lead, 3, 4)
    rotated = linalg.rotate(q_out, matrix, q_in)
    for k in range(K):
        torch.testing.assert_close(rotated[k], q_out.mT @ matrix[k] @ q_in, **TOL)
    torch.testing.assert_close(linalg.unrotate(q_out, rotated, q_in), matrix, **TOL)
