"""Batch norm's averages are recomputed for each weight sample, from a loader or from what a posterior keeps."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import eigenoise as en

x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    opt = en.NoisyEKFAC(model, num_data=40, likelihood="classification", noise_ramp=0)
    for _ in range(20):
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(model(x.to(model[0].weight.dtype)), y).backward()
        opt.step()
    return model, opt


def inputs(model):
    return x.to(model[0].weight.dtype)


def batches(model):
    return [(part, None) for part in inputs(model).split(10)]


def by_hand(model, opt, samples):
    """Logits of samples whose averages are those of the four batches."""
    generator, outputs = torch.Generator().manual_seed(0), []
    for _ in range(samples):
        with torch.no_grad(), opt.sampled_params(generator):
            en.settle_batch_norm(model, [batch for batch, _ in batches(model)])
            outputs.append(model.eval()(inputs(model)))
    model.train()
    return torch.stack(outputs)


def test_predictions_with_batches_are_those_of_settled_samples(trained):
    model, opt = trained
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    loaded = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs(model), y), batch_size=10)
    for batch_norm in (batches(model), loaded, [batch for batch, _ in batches(model)]):
        found = opt.predict(inputs(model), samples=3, batch_norm=batch_norm)
        assert all(torch.equal(buffers[name], b) for name, b in model.named_buffers())
    expected = by_hand(model, opt, 3).softmax(-1).mean(0)
    torch.testing.assert_close(found.probs, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found.probs, opt.predict(inputs(model), samples=3, batch_norm="running").probs, atol=1e-3)


def test_the_elbo_is_that_of_settled_samples(trained):
    model, opt = trained
    found = opt.elbo(inputs(model), y, samples=3, batch_norm=batches(model)).log_likelihood / 40
    f = by_hand(model, opt, 3)
    expected = -torch.nn.functional.cross_entropy(f.flatten(0, 1), y.repeat(3))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_without_batches_there_is_a_warning(trained):
    model, opt = trained
    for call in (
        lambda **options: opt.predict(inputs(model), **options),
        lambda **options: en.predict(model, opt.posterior, inputs(model), **options),
        lambda **options: opt.elbo(inputs(model), y, **options),
    ):
        with pytest.warns(RuntimeWarning, match="pass batch_norm=train_loader"):
            call()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(batch_norm="running")
            call(batch_norm=batches(model))


def test_a_mean_alone_needs_none():
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    opt = en.EKFAC(model, num_data=40, likelihood="classification")
    opt.predict(inputs(model))


@pytest.mark.parametrize("wrong", ["sometimes", {"x": 1}, 3])
def test_other_things_are_refused(trained, wrong):
    model, opt = trained
    with pytest.raises(TypeError, match="batch_norm must be a tensor or an iterable of batches"):
        opt.predict(inputs(model), batch_norm=wrong)
    with pytest.raises(ValueError, match="batch_norm must hold at least one batch"):
        opt.predict(inputs(model), batch_norm=[])


def test_a_posterior_keeps_what_its_samples_need(trained, tmp_path):
    model, opt = trained
    posterior = opt.posterior
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    posterior.settle_batch_norm(model, batches(model), samples=4)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    expected = en.predict(model, posterior, inputs(model), samples=4, batch_norm=batches(model))
    posterior.save(tmp_path / "q.safetensors")
    for source in (posterior, en.Posterior.load(tmp_path / "q.safetensors")):
        found = en.predict(model, source, inputs(model), samples=4)
        torch.testing.assert_close(found.probs, expected.probs)
        with pytest.raises(ValueError, match="its first 4 samples, got 5 samples"):
            en.predict(model, source, inputs(model), samples=5)
        with pytest.raises(ValueError, match="got a generator of your own"):
            en.predict(model, source, inputs(model), samples=4, generator=torch.Generator())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="model must have batch norm"):
        opt.posterior.settle_batch_norm(nn.Linear(3, 2), batches(model))
