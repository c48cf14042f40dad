"""Predictive mixtures against torch's MixtureSameFamily and against their own samples, in float64 unless said."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Independent, MixtureSameFamily, Normal
from torch.nn.functional import one_hot

from eigenoise.distributions import mixtures
from eigenoise.distributions.mixtures import BernoulliMixture, CategoricalMixture, GaussianMixture, log_mean_exp
from seeded import generator, randn

CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64 against torch's own mixture
CLOSE32 = {"rtol": 1e-4, "atol": 1e-4}  # float32 against float64
STANDARD_ERRORS = 5.0  # a sample mean may be this many of its own standard errors off
DRAWS = 20_000
K, B, D, C = 5, 4, 2, 3
LEADS: list[tuple[int, ...]] = [(B,), (2, B), (3, 2, B), ()]
KINDS = [GaussianMixture, CategoricalMixture, BernoulliMixture]
kinds = pytest.mark.parametrize("kind", KINDS)
leads = pytest.mark.parametrize("lead", LEADS, ids=str)


def close(got: Tensor, wanted: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got, wanted, **(tolerance or CLOSE))


def make(kind: Any, *lead: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    if kind is GaussianMixture:
        scale = (0.3 * randn(K, *lead, D, seed=seed + 1)).exp()
        return kind(2 * randn(K, *lead, D, seed=seed).to(dtype), scale.to(dtype))
    return kind(2 * randn(K, *lead, C if kind is CategoricalMixture else D, seed=seed).to(dtype))


def target(kind: Any, *lead: int) -> Tensor:
    if kind is CategoricalMixture:
        return torch.randint(C, lead, generator=generator(9))
    y = randn(*lead, D, seed=9)
    return (y > 0).double() if kind is BernoulliMixture else y


def reference(q: Any) -> MixtureSameFamily:
    """Torch's mixture: the samples of the weights on its last batch axis."""
    if isinstance(q, GaussianMixture):
        parts = Independent(Normal(q.loc.movedim(0, -2), q.scale.movedim(0, -2)), 1)
    elif isinstance(q, BernoulliMixture):
        parts = Independent(Bernoulli(logits=q.logits.movedim(0, -2)), 1)
    else:
        parts = Categorical(logits=q.logits.movedim(0, -2))
    return MixtureSameFamily(Categorical(torch.ones(parts.batch_shape, dtype=torch.float64)), parts)


def each_output(q: GaussianMixture) -> MixtureSameFamily:
    """The mixture of each output on its own."""
    parts = Normal(q.loc.movedim(0, -1), q.scale.movedim(0, -1))
    return MixtureSameFamily(Categorical(torch.ones(parts.batch_shape, dtype=torch.float64)), parts)


def one_hot_or(q: Any, value: Tensor) -> Tensor:
    return one_hot(value, C).double() if isinstance(q, CategoricalMixture) else value.double()


def assert_mean(draws: Tensor, wanted: Tensor) -> None:
    """The mean over the first axis is ``wanted``, up to a few of its own standard errors."""
    error = draws.std(0) / len(draws) ** 0.5 + CLOSE["atol"]
    assert bool(((draws.mean(0) - wanted).abs() <= STANDARD_ERRORS * error).all())


# Density and moments


@kinds
@leads
def test_log_prob_is_torchs(kind: Any, lead: tuple[int, ...]) -> None:
    q, y = make(kind, *lead), target(kind, *lead)
    assert q.log_prob(y).shape == q.batch_shape == lead
    close(q.log_prob(y), reference(q).log_prob(y))


@pytest.mark.parametrize("kind", [GaussianMixture, BernoulliMixture])
@leads
def test_mean_and_variance_are_torchs(kind: Any, lead: tuple[int, ...]) -> None:
    q = make(kind, *lead)
    assert q.mean.shape == q.variance.shape == (*lead, D)
    assert q.event_shape == (D,)
    close(q.mean, reference(q).mean)
    close(q.variance, reference(q).variance)


@leads
def test_class_probabilities_are_the_mean_of_the_samples(lead: tuple[int, ...]) -> None:
    q = make(CategoricalMixture, *lead)
    every = torch.arange(C).reshape(C, *(1,) * len(lead)).expand(C, *lead)
    wanted = reference(q).log_prob(every).exp().movedim(0, -1)
    close(q.probs, wanted)
    close(q.mean, wanted)
    close(q.probs.sum(-1), torch.ones(lead, dtype=torch.float64))
    close(q.variance, wanted * (1 - wanted))
    assert torch.equal(q.mode, wanted.argmax(-1))


@kinds
@leads
def test_noise_and_weights_make_up_the_spread(kind: Any, lead: tuple[int, ...]) -> None:
    q = make(kind, *lead)
    close(q.noise_stddev.square() + q.weights_stddev.square(), q.stddev.square())
    close(q.stddev.square(), q.variance)
    assert bool((q.noise_stddev > 0).all())
    assert bool((q.weights_stddev > 0).all())


@kinds
def test_one_weight_sample_leaves_noise_only(kind: Any) -> None:
    q = make(kind, B)
    one = GaussianMixture(q.loc[:1], q.scale[:1]) if kind is GaussianMixture else kind(q.logits[:1])
    assert torch.equal(one.weights_stddev, torch.zeros_like(one.mean))
    close(one.noise_stddev, one.stddev)


def test_the_noise_is_the_root_mean_variance() -> None:
    q = make(GaussianMixture, B)
    close(q.noise_stddev, torch.as_tensor(np.sqrt((q.scale.numpy() ** 2).mean(0))))
    close(q.weights_stddev, torch.as_tensor(q.loc.numpy().std(0)))


def test_scaled_noise_leaves_the_weights_share_as_it_is() -> None:
    mixture = GaussianMixture(torch.randn(5, 4, 2), torch.rand(5, 1, 1) + 0.1)
    wider = mixture.with_noise_scaled(1.5)
    torch.testing.assert_close(wider.noise_stddev, 1.5 * mixture.noise_stddev)
    torch.testing.assert_close(wider.weights_stddev, mixture.weights_stddev)
    torch.testing.assert_close(wider.mean, mixture.mean)
    with pytest.raises(ValueError, match="factor must be"):
        mixture.with_noise_scaled(0.0)


def test_a_scale_for_each_sample_broadcasts() -> None:
    loc, scale, y = randn(K, 2, B, D), randn(K, 2, 1, 1, seed=1).exp(), target(GaussianMixture, 2, B)
    q, wide = GaussianMixture(loc, scale), GaussianMixture(loc, scale.expand(loc.shape).clone())
    assert torch.equal(q.log_prob(y), wide.log_prob(y))
    assert torch.equal(q.quantile(0.3), wide.quantile(0.3))
    assert torch.equal(q.sample((3,), generator()), wide.sample((3,), generator()))


def test_log_mean_exp_does_not_overflow() -> None:
    values = torch.tensor([[1000.0, -1000.0], [1000.0, -1001.0]], dtype=torch.float64)
    wanted = torch.tensor([1000.0, -1000.0 + math.log((1 + math.exp(-1)) / 2)], dtype=torch.float64)
    close(log_mean_exp(values), wanted)


@pytest.mark.parametrize("far", [1e3, 1e6])
def test_log_prob_far_away_is_finite(far: float) -> None:
    q = make(GaussianMixture, B)
    y = torch.full((B, D), far, dtype=torch.float64)
    assert bool(torch.isfinite(q.log_prob(y)).all())
    logits = far * torch.tensor([[[1.0, -1.0]]], dtype=torch.float64)
    close(BernoulliMixture(logits).log_prob(torch.tensor([[0.0, 0.0]]).double()), torch.tensor([-far]).double())
    close(CategoricalMixture(logits).log_prob(torch.tensor([1])), torch.tensor([-2 * far]).double())


@kinds
def test_values_of_another_shape_are_refused_and_never_broadcast(kind: Any) -> None:
    q, y = make(kind, B), target(kind, B)
    for wrong in (y[:1], y[0], y.unsqueeze(0), y[:2]):
        with pytest.raises(ValueError, match="value must have the shape"):
            q.log_prob(wrong)


# CDF, quantiles, intervals

Q = [1e-300, 1e-12, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-3, 1 - 1e-12]


@leads
def test_cdf_is_torchs(lead: tuple[int, ...]) -> None:
    q, y = make(GaussianMixture, *lead), target(GaussianMixture, *lead)
    close(q.cdf(y), each_output(q).cdf(y))
    assert q.cdf(torch.tensor(0.0)).shape == (*lead, D)  # a threshold for all


@pytest.mark.parametrize("level", Q)
def test_cdf_undoes_quantile(level: float) -> None:
    q = make(GaussianMixture, 2, B)
    value = q.quantile(level)
    assert value.shape == (2, B, D)
    close(q.cdf(value) / level, torch.ones_like(value), rtol=1e-7, atol=1e-7)
    if level > 0.5:  # and the tail above it
        close((1 - q.cdf(value)) / (1 - level), torch.ones_like(value), rtol=1e-3, atol=1e-3)


@leads
def test_quantile_undoes_cdf(lead: tuple[int, ...]) -> None:
    """One element at a time: the levels differ."""
    q, y = make(GaussianMixture, *lead), target(GaussianMixture, *lead)
    levels = q.cdf(y)
    for index in np.ndindex(*levels.shape):
        close(q.quantile(levels[index].item())[index], y[index], rtol=1e-8, atol=1e-8)


def test_quantiles_of_one_normal_are_its_own() -> None:
    loc, scale = randn(1, B, D), randn(1, B, D, seed=1).exp()
    q = GaussianMixture(loc, scale)
    for level in Q:
        close(q.quantile(level), loc[0] + scale[0] * NormalDist().inv_cdf(level), rtol=1e-9, atol=1e-9)


def test_quantiles_rise() -> None:
    values = torch.stack([make(GaussianMixture, B).quantile(level) for level in Q])
    assert bool((values.diff(dim=0) > 0).all())


def test_quantiles_between_far_apart_modes() -> None:
    loc = torch.tensor([-1e6, 1e6], dtype=torch.float64).reshape(2, 1, 1)
    q = GaussianMixture(loc, torch.full_like(loc, 1e-3))
    for level, mode in ((0.25, -1e6), (0.75, 1e6)):
        close(q.quantile(level).flatten(), torch.tensor([mode]).double(), rtol=0, atol=1e-6)


def test_quantiles_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    q = make(GaussianMixture, 2, B)
    whole = q.quantile(0.2)
    for size in (1, K, 3 * K + 1):
        monkeypatch.setattr(mixtures, "MAX_ELEMENTS_PER_CHUNK", size)
        assert torch.equal(q.quantile(0.2), whole)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 1.1, math.nan, math.inf])
def test_levels_outside_are_refused(level: float) -> None:
    with pytest.raises(ValueError, match="q must be"):
        make(GaussianMixture, B).quantile(level)


@pytest.mark.parametrize("level", [True, "0.5", None, torch.tensor(0.5)])
def test_levels_must_be_numbers(level: Any) -> None:
    with pytest.raises(TypeError, match="q must be a number"):
        make(GaussianMixture, B).quantile(level)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_wrong_coverage_is_named(level: float) -> None:
    with pytest.raises(ValueError, match="coverage must be"):
        make(GaussianMixture, B).interval(level)


@pytest.mark.parametrize("coverage", [0.1, 0.5, 0.9, 0.99])
def test_intervals_cover_their_own_samples(coverage: float) -> None:
    q = make(GaussianMixture, 2, B)
    low, high = q.interval(coverage)
    close(q.cdf(low), torch.full_like(low, (1 - coverage) / 2), rtol=1e-8, atol=1e-8)
    y = q.sample((DRAWS,), generator())
    assert_mean(((low <= y) & (y <= high)).double(), torch.full_like(low, coverage))
    assert_mean((y < low).double(), torch.full_like(low, (1 - coverage) / 2))


def test_the_default_interval_is_of_ninety_percent() -> None:
    q = make(GaussianMixture, B)
    for got, level in zip(q.interval(), (0.05, 0.95), strict=True):
        close(got, q.quantile(level), rtol=1e-9, atol=1e-9)


# float32


@kinds
def test_float32_stays_float32(kind: Any) -> None:
    narrow, wide, y = make(kind, 2, B, dtype=torch.float32), make(kind, 2, B), target(kind, 2, B)
    value = y if kind is CategoricalMixture else y.float()
    for name in ("mean", "variance", "stddev", "noise_stddev", "weights_stddev"):
        got = getattr(narrow, name)
        assert got.dtype == torch.float32
        close(got.double(), getattr(wide, name), **CLOSE32)
    assert narrow.log_prob(value).dtype == torch.float32
    close(narrow.log_prob(value).double(), wide.log_prob(y), **CLOSE32)
    drawn = narrow.sample((3,), generator())
    assert drawn.dtype == (torch.int64 if kind is CategoricalMixture else torch.float32)


@pytest.mark.parametrize("level", [1e-9, 1e-4, 0.1, 0.5, 0.9, 1 - 1e-4])
def test_quantiles_in_float32(level: float) -> None:
    narrow, wide = make(GaussianMixture, B, dtype=torch.float32), make(GaussianMixture, B)
    assert narrow.quantile(level).dtype == torch.float32
    close(narrow.quantile(level).double(), wide.quantile(level), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tail", [1e-7, 1e-9, 1e-12])
def test_the_upper_tail_in_float32_is_as_good_as_the_lower(tail: float) -> None:
    """float32 has no number just below 1, but the quantile is an ordinary one."""
    loc = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float32).reshape(3, 1, 1)
    q = GaussianMixture(loc, torch.ones_like(loc))
    assert float(q.quantile(tail)) < -5
    close(q.quantile(1 - tail), -q.quantile(tail), rtol=1e-3, atol=1e-3)


# Sampling


@kinds
@leads
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3)], ids=str)
def test_samples_have_the_wanted_shape(kind: Any, lead: tuple[int, ...], shape: tuple[int, ...]) -> None:
    q = make(kind, *lead)
    y = q.sample(shape, generator())
    assert y.shape == (*shape, *lead) if kind is CategoricalMixture else (*shape, *lead, D)
    assert q.sample(torch.Size(shape), generator()).equal(y)
    first = y[(0,) * len(shape)]
    assert bool(torch.isfinite(q.log_prob(first)).all())  # a sample is a valid value


@kinds
def test_samples_follow_the_generator(kind: Any) -> None:
    q = make(kind, 30)
    before = torch.get_rng_state()
    one, two, other = (q.sample((5,), generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        again = q.sample((5,))
        torch.manual_seed(3)
        assert torch.equal(again, q.sample((5,)))
    assert not torch.equal(again, one)


@kinds
@pytest.mark.parametrize("lead", [(B,), (2, B)], ids=str)
def test_samples_have_the_right_moments(kind: Any, lead: tuple[int, ...]) -> None:
    q = make(kind, *lead)
    y = one_hot_or(q, q.sample((DRAWS,), generator(2)))
    assert_mean(y, q.mean)
    assert_mean((y - q.mean).square(), q.variance)


@pytest.mark.parametrize("kind", [GaussianMixture, BernoulliMixture])
def test_outputs_of_one_example_share_the_weight_sample_and_examples_do_not(kind: Any) -> None:
    parameter = 8 * torch.tensor([-1.0, 1.0], dtype=torch.float64).reshape(2, 1, 1).expand(2, B, D)
    q = kind(parameter, torch.ones_like(parameter)) if kind is GaussianMixture else kind(parameter)
    middle = 0.0 if kind is GaussianMixture else 0.5
    sign = (q.sample((DRAWS,), generator()) > middle).double() * 2 - 1
    assert float((sign[..., 0] * sign[..., 1]).mean()) > 0.99
    assert_mean(sign[:, 0, 0] * sign[:, 1, 0], torch.tensor(0.0).double())


# Entropy and information


@leads
def test_entropy_is_that_of_the_mean_probabilities(lead: tuple[int, ...]) -> None:
    q = make(CategoricalMixture, *lead)
    close(q.entropy(), Categorical(q.probs).entropy())


@leads
def test_mutual_information_is_what_the_weights_would_tell(lead: tuple[int, ...]) -> None:
    q = make(CategoricalMixture, *lead)
    expected = Categorical(logits=q.logits).entropy().mean(0)
    close(q.mutual_information(), q.entropy() - expected)
    assert bool((q.mutual_information() > 0).all())
    assert bool((q.mutual_information() <= q.entropy()).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mutual_information_is_zero_when_all_samples_agree(dtype: torch.dtype) -> None:
    q = CategoricalMixture(randn(1, 50, C).to(dtype).expand(K, 50, C))
    assert bool((q.mutual_information() >= 0).all())
    close(q.mutual_information(), torch.zeros(50, dtype=dtype), rtol=0, atol=1e-6)
    assert bool((q.entropy() > 0).all())


def test_mutual_information_is_all_there_is_when_samples_are_sure_and_disagree() -> None:
    q = CategoricalMixture(1e3 * torch.eye(C, dtype=torch.float64).unsqueeze(1))
    close(q.entropy(), torch.tensor([math.log(C)]).double())
    close(q.mutual_information(), torch.tensor([math.log(C)]).double())


def test_adding_a_constant_to_the_logits_changes_nothing() -> None:
    logits, y = randn(K, B, C), target(CategoricalMixture, B)
    one, two = CategoricalMixture(logits), CategoricalMixture(logits + randn(K, B, 1, seed=1))
    close(one.log_prob(y), two.log_prob(y))
    close(one.entropy(), two.entropy())


@kinds
def test_it_prints(kind: Any) -> None:
    assert kind.__name__ in repr(make(kind, B))
