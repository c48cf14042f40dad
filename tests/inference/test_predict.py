"""The Monte Carlo predictive: what it returns, and that it leaves everything else as it found it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import eigenoise as en
from arguments import accepted
from eigenoise.distributions.mixtures import BernoulliMixture, CategoricalMixture, GaussianMixture
from seeded import generator, randn

CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64, the same sums in another order
N_IN, N, K = 3, 12, 4
METHODS: dict[str, Callable[..., Any]] = {
    "NoisyAdam": en.NoisyAdam,
    "NoisyKFAC": en.NoisyKFAC,
    "NoisyKFAC factored": functools.partial(en.NoisyKFAC, damping_form="factored"),
    "NoisyEKFAC": en.NoisyEKFAC,
    "BayesByBackprop": en.BayesByBackprop,
}
NOISE_FREE: dict[str, Callable[..., Any]] = {"KFAC": en.KFAC, "EKFAC": en.EKFAC}
methods = pytest.mark.parametrize("method", METHODS)
sources = pytest.mark.parametrize("source", ["optimizer", "posterior"])


def close(got: Tensor, wanted: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got, wanted, **(tolerance or CLOSE))


def network(outputs: int = 1) -> nn.Sequential:
    """Everything that could betray a wrong mode: batch norm, dropout, buffers."""
    torch.manual_seed(1)
    layers = (nn.Linear(N_IN, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, outputs))
    return nn.Sequential(*layers).double()


def build(method: str, model: nn.Module | None = None, likelihood: Any = None, **options: Any) -> Any:
    model = network() if model is None else model
    likelihood = en.GaussianLikelihood() if likelihood is None else likelihood
    options = {"num_data": N, "likelihood": likelihood, "generator": generator(5), **options}
    return {**METHODS, **NOISE_FREE}[method](model, **options)


def backward(opt: Any, seed: int = 0, y: Tensor | None = None) -> None:
    y = randn(N, 1, seed=100 + seed) if y is None else y
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(randn(N, N_IN, seed=seed)), y).backward()


def train(opt: Any, steps: int = 3, y: Tensor | None = None) -> Any:
    for seed in range(steps):
        opt.zero_grad()
        for _ in range(opt.samples):
            backward(opt, seed, y)
        opt.step()
    return opt


def source_of(opt: Any, source: str) -> Any:
    return opt if source == "optimizer" else opt.posterior


def same(one: Any, two: Any) -> bool:
    """Equal to the last bit, through dicts and lists."""
    if isinstance(one, Tensor):
        return isinstance(two, Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return one == two


def everything(opt: Any) -> dict[str, Any]:
    """All that a prediction must leave as it is."""
    model = opt.model
    what = {
        "modes": [module.training for module in model.modules()],
        "model": model.state_dict(),
        "gradients": [p.grad for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "global generator": torch.get_rng_state(),
        "generator": opt.generator.get_state(),
        "optimizer": opt.state_dict(),
    }
    return copy.deepcopy(what)


# What it returns


@methods
@sources
def test_it_is_the_mixture_over_weight_samples_in_evaluation_mode(method: str, source: str) -> None:
    opt = train(build(method, likelihood=en.GaussianLikelihood(2.0)))
    model, x = opt.model, randn(6, N_IN, seed=9)
    what = source_of(opt, source)
    q = en.predict(model, what, x, samples=K, generator=generator(3))
    draws, noise = [], generator(3)
    model.eval()
    for _ in range(K):
        block = what.sampled_params(noise) if source == "optimizer" else what.sampled_params(model, noise)
        with torch.no_grad(), block:
            draws.append(model(x))
    assert isinstance(q, GaussianMixture)
    assert torch.equal(q.loc, torch.stack(draws))
    close(q.scale, torch.full_like(q.loc, 2.0**-0.5))
    assert bool((q.weights_stddev > 0).all())
    assert not q.loc.requires_grad


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "kind"),
    [
        (en.CategoricalLikelihood(), 3, torch.arange(N) % 3, CategoricalMixture),
        (en.BernoulliLikelihood(), 2, (torch.arange(2 * N).reshape(N, 2) % 3 == 0).double(), BernoulliMixture),
        (en.HeteroscedasticGaussianLikelihood(), 4, randn(N, 2), GaussianMixture),
    ],
    ids=["classes", "yes or no", "heteroscedastic"],
)
@sources
def test_other_likelihoods(likelihood: Any, outputs: int, y: Tensor, kind: type, source: str) -> None:
    opt = train(build("NoisyEKFAC", network(outputs), likelihood), y=y)
    q = en.predict(opt.model, source_of(opt, source), randn(7, N_IN, seed=9), samples=K)
    assert type(q) is kind
    assert q.batch_shape == (7,)
    assert bool((q.weights_stddev > 0).all())
    if kind is not GaussianMixture:
        assert bool(((q.probs > 0) & (q.probs < 1)).all())
    if kind is CategoricalMixture:
        close(q.probs.sum(-1), torch.ones(7, dtype=torch.float64))
        assert bool((q.mutual_information() > 0).all())


@pytest.mark.parametrize("name", NOISE_FREE)
def test_without_noise_the_optimiser_predicts_with_the_mean_and_its_posterior_with_spread(name: str) -> None:
    opt = train(build(name))
    x = randn(6, N_IN, seed=9)
    plain, laplace = (en.predict(opt.model, what, x, samples=K) for what in (opt, opt.posterior))
    opt.model.eval()
    with torch.no_grad():
        mean = opt.model(x)
    assert torch.equal(plain.loc, mean.expand(K, 6, 1))
    close(plain.weights_stddev, torch.zeros(6, 1, dtype=torch.float64))
    assert bool((plain.noise_stddev > 0).all())
    assert bool((laplace.weights_stddev > 0).all())


@methods
@sources
def test_equal_calls_give_equal_results(method: str, source: str) -> None:
    opt = train(build(method))
    x, what = randn(6, N_IN, seed=9), source_of(opt, source)
    one, two = (en.predict(opt.model, what, x, samples=K) for _ in range(2))
    assert torch.equal(one.loc, two.loc)
    assert torch.equal(one.scale, two.scale)  # the noise precision is drawn as well
    other = en.predict(opt.model, what, x, samples=K, generator=generator(1))
    assert not torch.equal(one.loc, other.loc)
    assert not torch.equal(one.scale, other.scale)
    noise = generator(1)
    again, later = (en.predict(opt.model, what, x, samples=K, generator=noise) for _ in range(2))
    assert torch.equal(again.loc, other.loc)
    assert not torch.equal(later.loc, other.loc)  # a generator that is passed goes on


@pytest.mark.parametrize("samples", [1, 3])
def test_as_many_samples_as_wanted(samples: int) -> None:
    opt = train(build("NoisyEKFAC"))
    assert en.predict(opt.model, opt, randn(6, N_IN), samples=samples).loc.shape == (samples, 6, 1)


# Chunks


@pytest.mark.parametrize("chunk_size", [1, 4, 10, 11, 1000])
@sources
def test_chunks_do_not_change_the_result(chunk_size: int, source: str) -> None:
    opt = train(build("NoisyEKFAC"))
    x, what = randn(10, N_IN, seed=9), source_of(opt, source)
    whole, parts = (en.predict(opt.model, what, x, samples=K, chunk_size=size) for size in (1024, chunk_size))
    close(parts.loc, whole.loc)
    assert torch.equal(parts.scale, whole.scale)


def test_all_chunks_see_the_same_weights() -> None:
    opt = train(build("NoisyEKFAC"))
    x = randn(1, N_IN).expand(9, N_IN)
    loc = en.predict(opt.model, opt, x, samples=K, chunk_size=2).loc
    close(loc, loc[:, :1].expand(K, 9, 1))
    assert len(loc[:, 0].unique()) == K


def test_a_chunk_is_no_larger_than_asked() -> None:
    opt, sizes = build("NoisyEKFAC"), []
    handle = opt.model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    en.predict(opt.model, opt, randn(10, N_IN), samples=2, chunk_size=4)
    handle.remove()
    assert sizes == [4, 4, 2] * 2


# Stacks

STACK = 3


def stacked() -> Any:
    torch.manual_seed(2)
    model = en.models.MLP(N_IN, [4], 1, stack=STACK).double()
    opt = en.NoisyEKFAC(model, num_data=N, likelihood=en.GaussianLikelihood(stack=STACK), generator=generator(5))
    for seed in range(3):
        opt.zero_grad()
        with opt.sampled_params():
            x, y = randn(STACK, N, N_IN, seed=seed), randn(STACK, N, 1, seed=100 + seed)
            opt.likelihood.nll(model(x), y).backward()
        opt.step()
    return opt


@sources
@pytest.mark.parametrize("chunk_size", [2, 4, 1024])
def test_a_stack_predicts_for_each_member(source: str, chunk_size: int) -> None:
    opt = stacked()
    x, what = randn(STACK, 8, N_IN, seed=9), source_of(opt, source)
    whole = en.predict(opt.model, what, x, samples=K)
    q = en.predict(opt.model, what, x, samples=K, chunk_size=chunk_size)
    assert q.mean.shape == (STACK, 8, 1)
    assert q.log_prob(randn(STACK, 8, 1)).shape == (STACK, 8)
    close(q.loc, whole.loc)
    scales = whole.scale[..., 0, 0]
    assert len(scales.unique()) == K * STACK  # each member has its own q(τ)
    changed = x.clone()
    changed[1] += 1.0
    other = en.predict(opt.model, what, changed, samples=K)
    assert [torch.equal(other.loc[:, i], whole.loc[:, i]) for i in range(STACK)] == [True, False, True]


@sources
@pytest.mark.parametrize("chunk_size", [3, 4, 5, 1024])
def test_one_batch_for_all_members(source: str, chunk_size: int) -> None:
    """``(b, n)`` shows the same batch to every member, whatever the chunks."""
    opt = stacked()
    x, what = randn(8, N_IN, seed=9), source_of(opt, source)
    q = en.predict(opt.model, what, x, samples=K, chunk_size=chunk_size)
    wanted = en.predict(opt.model, what, x.expand(STACK, 8, N_IN), samples=K)
    assert q.mean.shape == (STACK, 8, 1)
    close(q.loc, wanted.loc)
    close(q.scale, wanted.scale)


# What it leaves alone


@methods
@sources
@pytest.mark.parametrize("own", [None, 7], ids=["default generator", "own generator"])
def test_it_leaves_everything_as_it_was(method: str, source: str, own: int | None) -> None:
    opt = train(build(method))
    model = opt.model
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model.train()
    model[1].eval()
    model[3].training = False
    what = source_of(opt, source)
    before = everything(opt)
    gradient = model[0].weight.grad
    for _ in range(2):
        en.predict(model, what, randn(6, N_IN), samples=K, generator=None if own is None else generator(own))
    after = everything(opt)
    assert {name for name in before if not same(before[name], after[name])} == set()
    assert model[0].weight.grad is gradient
    assert [module.training for module in model] == [True, False, True, False, True]
    assert torch.is_grad_enabled()


@sources
def test_it_leaves_everything_as_it_was_after_an_exception(source: str) -> None:
    opt = train(build("NoisyEKFAC"))
    opt.model[1].eval()
    what = source_of(opt, source)
    before = everything(opt)
    calls = []

    def fail(module: nn.Module, args: Any) -> None:
        calls.append(module.training)
        if len(calls) == 3:
            raise KeyError("the third")

    handle = opt.model[4].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="the third"):
        en.predict(opt.model, what, randn(6, N_IN), samples=K)
    handle.remove()
    assert calls == [False] * 3
    after = everything(opt)
    assert {name for name in before if not same(before[name], after[name])} == set()
    en.predict(opt.model, what, randn(6, N_IN), samples=K)  # and it can be called again


def test_the_result_is_detached_even_if_the_input_is_not() -> None:
    opt = build("NoisyEKFAC")
    x = randn(6, N_IN).requires_grad_()
    assert not en.predict(opt.model, opt, x, samples=K).mean.requires_grad


MOMENTS = ["between samples", "before the step", "before zero_grad"]


@functools.cache
def trained_while(name: str, when: str | None, **options: Any) -> dict[str, Any]:
    """Everything after two steps of two samples each, with predictions at the moment ``when``."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(N_IN, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    make = {**METHODS, **NOISE_FREE}[name]
    opt = build(name, model, **accepted(make, samples=2, **options))

    def look(moment: str) -> None:
        if moment == when:
            for what in (opt, opt.posterior):
                en.predict(model, what, randn(6, N_IN), samples=2)

    for seed in range(2):
        look("before zero_grad")
        opt.zero_grad()
        backward(opt, seed)
        look("between samples")
        backward(opt, seed)
        look("before the step")
        opt.step()
    return everything(opt)


@pytest.mark.parametrize("name", [*METHODS, *NOISE_FREE])
@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("antithetic", [False, True], ids=["independent", "antithetic"])
def test_predicting_does_not_change_the_training(name: str, when: str, antithetic: bool) -> None:
    plain, watched = (trained_while(name, moment, antithetic=antithetic) for moment in (None, when))
    assert {key for key in plain if not same(plain[key], watched[key])} == set()


@pytest.mark.parametrize("name", ["NoisyAdam", "NoisyEKFAC"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("when", MOMENTS)
def test_predicting_does_not_change_the_statistics(name: str, fisher: str, when: str) -> None:
    plain, watched = (trained_while(name, moment, fisher=fisher, stats_every=1) for moment in (None, when))
    assert {key for key in plain if not same(plain[key], watched[key])} == set()


# Wrong arguments


@sources
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(0, N_IN), ValueError, r"x must hold at least one input, got the shape \(0, 3\)"),
        (torch.tensor(1.0), ValueError, r"x must hold at least one input, got the shape \(\)"),
        (np.zeros((2, N_IN)), TypeError, r"got ndarray; pass a tensor \(torch\.as_tensor\(x\)\)"),
        ([[0.0] * N_IN], TypeError, "x must hold batches that are tensors or begin with one, got float"),
        (None, TypeError, "x must be a tensor or an iterable of batches, got NoneType"),
    ],
    ids=["empty", "no axis", "numpy", "list", "none"],
)
def test_wrong_inputs(source: str, x: Any, error: type[Exception], message: str) -> None:
    opt = build("NoisyEKFAC")
    with pytest.raises(error, match=message):
        en.predict(opt.model, source_of(opt, source), x)


def test_an_empty_batch_for_a_stack() -> None:
    opt = stacked()
    with pytest.raises(ValueError, match=r"x must hold at least one input, got the shape \(3, 0, 3\)"):
        en.predict(opt.model, opt, torch.zeros(STACK, 0, N_IN))


def test_one_example_without_a_batch_axis_is_refused() -> None:
    """Its output (d,) would be taken for something else."""
    torch.manual_seed(0)
    opt = build("NoisyEKFAC", en.models.MLP(N_IN, [4], 1).double())
    with pytest.raises(ValueError, match=r"batch|shape"):
        en.predict(opt.model, opt, randn(N_IN), samples=K)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"samples": 0}, ValueError, "samples must be at least 1, got 0"),
        ({"samples": -1}, ValueError, "samples must be at least 1, got -1"),
        ({"samples": 2.0}, TypeError, "samples must be an int, got float"),
        ({"samples": True}, TypeError, "samples must be an int, got bool"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"chunk_size": None}, TypeError, "chunk_size must be an int, got NoneType"),
    ],
)
def test_wrong_numbers(options: dict[str, Any], error: type[Exception], message: str) -> None:
    opt = build("NoisyEKFAC")
    with pytest.raises(error, match=message):
        en.predict(opt.model, opt, randn(2, N_IN), **options)


@pytest.mark.parametrize("source", [None, "NoisyEKFAC", torch.optim.SGD([torch.zeros(1)], lr=0.1), {}])
def test_wrong_sources(source: Any) -> None:
    with pytest.raises(
        TypeError, match=f"source must be an optimiser of eigenoise or a Posterior, got {type(source).__name__}"
    ):
        en.predict(network(), source, randn(2, N_IN))


def test_a_posterior_without_likelihood_needs_one() -> None:
    opt = train(build("NoisyEKFAC"))
    whole = opt.posterior
    bare = en.Posterior(whole.entries, whole.rest)
    x = randn(6, N_IN)
    with pytest.raises(ValueError, match="carries no likelihood: pass likelihood="):
        en.predict(opt.model, bare, x)
    got = en.predict(opt.model, bare, x, likelihood=opt.likelihood, samples=K)
    wanted = en.predict(opt.model, whole, x, samples=K)
    assert torch.equal(got.loc, wanted.loc)
    assert torch.equal(got.scale, wanted.scale)


def test_a_likelihood_that_is_passed_wins() -> None:
    opt = train(build("NoisyEKFAC"))
    q = en.predict(opt.model, opt, randn(6, N_IN), samples=K, likelihood=en.GaussianLikelihood(4.0))
    close(q.scale, torch.full_like(q.loc, 0.5))


def test_it_cannot_be_called_on_a_sample() -> None:
    opt = train(build("NoisyEKFAC"))
    before = everything(opt)
    with opt.sampled_params(generator()), pytest.raises(RuntimeError, match="cannot be nested"):
        en.predict(opt.model, opt, randn(6, N_IN))
    after = everything(opt)
    assert {key for key in before if not same(before[key], after[key])} == set()


# Loaders.


def test_a_loader_gives_what_its_inputs_give() -> None:
    opt = train(build("NoisyEKFAC"))
    x, y = randn(10, N_IN), randn(10, 1, seed=3)
    whole = en.predict(opt.model, opt, x, samples=K)
    dataset = torch.utils.data.TensorDataset(x, y)
    for batches in (torch.utils.data.DataLoader(dataset, batch_size=4), list(x.split(3)), iter(x.split(5))):
        got = en.predict(opt.model, opt, batches, samples=K)
        close(got.mean, whole.mean)
    close(opt.predict(x, samples=K).mean, whole.mean)
    with pytest.raises(ValueError, match="x must hold at least one batch"):
        en.predict(opt.model, opt, [], samples=K)
    with pytest.raises(TypeError, match="got dict"):
        en.predict(opt.model, opt, {"x": x}, samples=K)
