"""The posterior over a whole model: against the Fisher it comes from, on disk and back, and in other models."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal, kl_divergence

import eigenoise as en
from eigenoise.distributions.matrix_normal import EigenMatrixNormal, MatrixNormal
from eigenoise.inference import posterior as posterior_files
from eigenoise.inference.posterior import Entry
from eigenoise.likelihoods import GaussianLikelihood
from eigenoise.models import StackedLinear
from seeded import generator, randn

CLOSE = {"rtol": 1e-8, "atol": 1e-10}  # float64 against dense inverses
STANDARD_ERRORS = 5.0  # a sample moment may be this many of its own standard errors off
DRAWS = 500
N, B, STACK = 20, 6, 2
PRIOR_VAR, KL_WEIGHT = 0.7, 0.4
METHODS: dict[str, tuple[Callable[..., Any], type]] = {
    "NoisyAdam": (en.NoisyAdam, Independent),
    "NoisyKFAC": (en.NoisyKFAC, EigenMatrixNormal),
    "NoisyKFAC factored": (functools.partial(en.NoisyKFAC, damping_form="factored"), MatrixNormal),
    "NoisyEKFAC": (en.NoisyEKFAC, EigenMatrixNormal),
    "KFAC": (en.KFAC, EigenMatrixNormal),
    "EKFAC": (en.EKFAC, EigenMatrixNormal),
    "BayesByBackprop": (en.BayesByBackprop, Independent),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # with the shape of an input
    "mlp": (lambda: en.models.MLP(3, [4], 2), (3,)),
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2, bias=False), nn.Flatten(), nn.Linear(12, 2)), (2, 3, 3)),
    "groups": (lambda: nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(6, 2)), (4, 2, 2)),
    "depthwise": (lambda: nn.Sequential(nn.Conv1d(4, 4, 2, groups=4), nn.Flatten(), nn.Linear(8, 2)), (4, 3)),
    "norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    "stack": (lambda: en.models.MLP(3, [4], 2, stack=STACK), (3,)),
}
every_method = pytest.mark.parametrize("method", METHODS)
every_model = pytest.mark.parametrize("name", MODELS)


def close(got: Tensor, wanted: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got, wanted, **(tolerance or CLOSE))


def build(name: str, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name][0]().double()


def lead(name: str) -> tuple[int, ...]:
    return (STACK, B) if name == "stack" else (B,)


def train(opt: Any, name: str, steps: int = 3) -> Any:
    for seed in range(steps):
        opt.zero_grad()
        with opt.sampled_params():
            x, y = randn(*lead(name), *MODELS[name][1], seed=seed), randn(*lead(name), 2, seed=50 + seed)
            opt.likelihood.nll(opt.model(x), y).backward()
        opt.step()
    return opt


def trained(method: str, name: str, model: nn.Module | None = None, likelihood: Any = None, **options: Any) -> Any:
    """An optimiser after a few steps, with extrinsic damping that must not show in the posterior."""
    likelihood = likelihood or GaussianLikelihood(stack=STACK if name == "stack" else None)
    if method != "BayesByBackprop":
        options = {"damping": 0.3, "stats_every": 1, **options}
    options = {"kl_weight": KL_WEIGHT, "prior_var": PRIOR_VAR, "generator": generator(5), **options}
    model = build(name) if model is None else model
    return train(METHODS[method][0](model, num_data=N, likelihood=likelihood, **options), name)


@functools.cache
def trained_once(method: str, name: str) -> Any:
    """One optimiser for all tests that only look."""
    return trained(method, name)


def matrix(module: nn.Module) -> Tensor:
    """A layer's weight with the bias as last column, ``(..., p, n)``."""
    weight, bias = module.weight.detach(), module.bias
    if not isinstance(module, StackedLinear):
        weight = weight.flatten(1)
    groups = getattr(module, "groups", 1)
    if groups > 1:
        weight = weight.unflatten(0, (groups, -1))
    if bias is None:
        return weight
    return torch.cat([weight, bias.detach().reshape(weight.shape[:-1]).unsqueeze(-1)], -1)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, StackedLinear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def dense_covariance(q: Distribution) -> Tensor:
    """Covariance of the flattened event, ``(..., d, d)``."""
    if isinstance(q, (EigenMatrixNormal, MatrixNormal)):
        return q.covariance_matrix
    return torch.diag_embed(q.variance.flatten(-len(q.event_shape)))


def dense_kl(q: Distribution, prior_var: float) -> Tensor:
    """KL to N(0, prior_var·I) with dense algebra, one number for each leading index."""
    covariance, mean = dense_covariance(q), q.mean.flatten(-len(q.event_shape))
    d = mean.shape[-1]
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) + mean.square().sum(-1)
    return 0.5 * (trace / prior_var - d + d * math.log(prior_var) - torch.linalg.slogdet(covariance).logabsdet)


def parts(q: Distribution) -> list[Tensor]:
    """The tensors that make up a distribution."""
    if isinstance(q, EigenMatrixNormal):
        return [q.loc, q.q_out, q.q_in, q.eigen_variance]
    return [q.loc, q.cov_out, q.cov_in] if isinstance(q, MatrixNormal) else [q.base_dist.loc, q.base_dist.scale]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def assert_same_posterior(one: en.Posterior, two: en.Posterior) -> None:
    assert list(one) == list(two)
    for name in one:
        assert type(one[name]) is type(two[name])
        assert one[name].batch_shape == two[name].batch_shape
        assert one[name].event_shape == two[name].event_shape
        assert one.entries[name].params == two.entries[name].params
        for a, b in zip(parts(one[name]), parts(two[name]), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
    assert same(one.rest, two.rest)


# What it holds


@every_method
@every_model
def test_each_layer_has_the_distribution_of_its_method(method: str, name: str) -> None:
    opt = trained_once(method, name)
    posterior, wanted = opt.posterior, layers(opt.model)
    bare = ["1.weight", "1.bias"] if name == "norm" else []
    assert sorted(posterior) == sorted([*wanted, *bare])
    assert len(posterior) == len(wanted) + len(bare)
    for layer in wanted:
        assert type(posterior[layer]) is METHODS[method][1]
        assert len(posterior[layer].event_shape) == 2
    for parameter in bare:
        assert isinstance(posterior[parameter], Independent)
        assert isinstance(posterior[parameter].base_dist, Normal)
        assert posterior[parameter].event_shape == (4,)


@every_method
@every_model
def test_the_mean_is_the_model_and_the_bias_the_last_column(method: str, name: str) -> None:
    opt = trained_once(method, name)
    posterior, parameters = opt.posterior, dict(opt.model.named_parameters())
    for layer, module in layers(opt.model).items():
        assert torch.equal(posterior[layer].mean, matrix(module))
    assert posterior.mean.keys() == parameters.keys()
    for key, value in posterior.mean.items():
        assert value.shape == parameters[key].shape
        assert torch.equal(value, parameters[key])
        assert not value.requires_grad
    buffers = {key for key in opt.model.state_dict() if key not in parameters}
    assert posterior.rest.keys() == buffers
    assert bool(buffers) == (name == "norm")


@every_method
@every_model
def test_the_covariance_is_that_of_the_fisher(method: str, name: str) -> None:
    """Eq. 10: (λ/N)·(F + γ_in·I)⁻¹ with γ_in = λ/(Nη)."""
    opt = trained_once(method, name)
    posterior = opt.posterior
    for slot in opt.slots:
        got = dense_covariance(posterior[slot.name])
        if method == "BayesByBackprop":
            wanted = torch.diag_embed(slot.std.square().flatten(-len(posterior[slot.name].event_shape)))
        elif slot.name in layers(opt.model):
            wanted = KL_WEIGHT / N * torch.linalg.inv(slot.fisher.dense(KL_WEIGHT / (N * PRIOR_VAR)))
        else:
            wanted = torch.diag(KL_WEIGHT / N / (slot.fisher.r + KL_WEIGHT / (N * PRIOR_VAR)))
        close(got, wanted)
        spread = got.diagonal(dim1=-2, dim2=-1)
        assert bool((spread > 0).all())
        if method != "BayesByBackprop":
            assert bool((spread < PRIOR_VAR).all())  # data can only narrow the prior
            assert float(spread.max() / spread.min()) > 1.01  # the Fisher has seen something


@every_method
@every_model
def test_kl_adds_up(method: str, name: str) -> None:
    opt = trained_once(method, name)
    posterior = opt.posterior
    own = (-1,) if name == "stack" else ()  # everything is summed but the members of a stack
    shape = (STACK,) if name == "stack" else ()

    def over_layers(kl: Callable[[Distribution], Tensor]) -> Tensor:
        each = [kl(q) for q in posterior.values()]
        return sum((value if own else value.sum() for value in each), torch.zeros(()).double())

    def registered(q: Distribution) -> Tensor:
        prior = Normal(torch.zeros_like(q.mean), PRIOR_VAR**0.5)
        return kl_divergence(q, Independent(prior, len(q.event_shape)))

    got = posterior.kl(PRIOR_VAR)
    assert got.shape == opt.kl().shape == shape
    close(got, over_layers(registered))
    close(got, over_layers(lambda q: dense_kl(q, PRIOR_VAR)))
    close(got, opt.kl())
    close(posterior.kl(3.0), over_layers(lambda q: dense_kl(q, 3.0)))


@pytest.mark.parametrize(
    ("prior_var", "error"), [(0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError), (True, TypeError)]
)
def test_kl_needs_a_prior(prior_var: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="prior_var must be"):
        trained_once("NoisyEKFAC", "linear").posterior.kl(prior_var)


@every_method
def test_the_posterior_is_what_training_samples_from(method: str) -> None:
    """Weights drawn by the optimiser and by the posterior have its mean and covariance."""
    opt = trained_once(method, "linear")
    posterior, model = opt.posterior, opt.model
    q = posterior[""]
    d = q.mean.numel()
    draws: dict[str, list[Tensor]] = {"posterior": [], "optimizer": []}
    noise = generator(3)
    for _ in range(DRAWS):
        sample = posterior.sample(noise)
        draws["posterior"].append(torch.cat([sample["weight"], sample["bias"].unsqueeze(-1)], -1))
        if method not in ("KFAC", "EKFAC"):
            with opt.sampled_params(noise):
                draws["optimizer"].append(matrix(model).clone())
    for source, drawn in draws.items():
        if drawn:
            centred = (torch.stack(drawn) - q.mean).reshape(-1, d)
            products = centred[:, :, None] * centred[:, None, :]
            for values, wanted in ((centred, torch.zeros(d).double()), (products, dense_covariance(q))):
                error = values.std(0) / DRAWS**0.5
                assert bool(((values.mean(0) - wanted).abs() <= STANDARD_ERRORS * error).all()), source


@every_model
def test_samples_follow_the_generator(name: str) -> None:
    posterior = trained_once("NoisyEKFAC", name).posterior
    before = torch.get_rng_state()
    one, two, other = (posterior.sample(generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(one, two)
    assert one.keys() == posterior.mean.keys()
    for key, value in one.items():
        assert value.shape == posterior.mean[key].shape
        assert not torch.equal(value, other[key])


def test_point_estimates_and_frozen_parameters_are_in_the_rest() -> None:
    model = build("norm")
    model[0].weight.requires_grad_(False)
    posterior = trained("NoisyEKFAC", "norm", model, others="point", overrides={"3": "point"}).posterior
    assert dict(posterior) == {}
    assert same(posterior.rest, snapshot(model))
    model = build("norm")
    model[0].requires_grad_(False)
    posterior = trained("NoisyEKFAC", "norm", model, others="point").posterior
    assert list(posterior) == ["3"]
    assert same({**posterior.rest, **posterior.mean}, snapshot(model))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    posterior = trained_once("NoisyEKFAC", "mlp").posterior
    with pytest.raises(KeyError, match=r"no posterior for '1'; there is one for '0', '2'"):
        _ = posterior["1"]
    assert "1" not in posterior
    assert "2" in posterior


def test_it_prints() -> None:
    text = repr(trained_once("NoisyEKFAC", "mlp").posterior)
    assert "0: EigenMatrixNormal(4, 4)" in text
    assert "2: EigenMatrixNormal(2, 5)" in text


def test_it_cannot_be_asked_for_within_a_block() -> None:
    opt = trained("NoisyEKFAC", "mlp")
    with opt.sampled_params(), pytest.raises(RuntimeError, match="posterior inside sampled_params"):
        _ = opt.posterior


def test_without_spread_the_message_names_the_weight_of_the_kl() -> None:
    opt = trained("NoisyEKFAC", "mlp", kl_weight=0.0)
    with pytest.raises(ValueError, match="kl_weight"):
        _ = opt.posterior


# Apart from training


@every_method
@pytest.mark.parametrize("name", ["norm", "groups", "stack"])
def test_training_on_does_not_change_it(method: str, name: str) -> None:
    opt = trained(method, name)
    posterior = opt.posterior
    kept = copy.deepcopy(posterior)
    train(opt, name, steps=2)
    assert_same_posterior(posterior, kept)
    for one, two in zip(posterior.values(), opt.posterior.values(), strict=True):
        assert not torch.equal(one.mean, two.mean)
    one, two, later = (p.likelihood.state_dict() for p in (posterior, kept, opt.posterior))
    assert same(one, two)
    assert not same(one, later)


@every_method
def test_writing_into_it_does_not_change_the_training(method: str) -> None:
    opt = trained(method, "norm")
    model, state = snapshot(opt.model), copy.deepcopy(opt.state_dict()["eigenoise"]["slots"])
    posterior = opt.posterior
    for q in posterior.values():
        for part in parts(q):
            part.mul_(2.0)
    for value in posterior.rest.values():
        value.zero_()
    assert same(snapshot(opt.model), model)
    after = opt.state_dict()["eigenoise"]["slots"]
    assert all(same(after[slot], state[slot]) for slot in state)


# In a model


@every_method
@every_model
def test_a_block_holds_the_sample_and_then_what_was_there(method: str, name: str) -> None:
    posterior, model = trained_once(method, name).posterior, build(name, seed=9)
    before, pointers = snapshot(model), [p.data_ptr() for p in model.parameters()]
    with posterior.installed(model):
        assert same(snapshot(model), {key: {**posterior.rest, **posterior.mean}[key] for key in before})
        with posterior.sampled_params(model, generator(2)):
            assert same({k: p.detach() for k, p in model.named_parameters()}, ordered(posterior, model, 2))
        assert same(snapshot(model), {key: {**posterior.rest, **posterior.mean}[key] for key in before})
    assert same(snapshot(model), before)
    assert [p.data_ptr() for p in model.parameters()] == pointers


def ordered(posterior: en.Posterior, model: nn.Module, seed: int) -> dict[str, Tensor]:
    sample = posterior.sample(generator(seed))
    return {key: sample[key] for key, _ in model.named_parameters()}


@pytest.mark.parametrize("block", ["installed", "sampled_params"])
def test_what_was_there_is_back_after_an_exception(block: str) -> None:
    posterior, model = trained_once("NoisyEKFAC", "norm").posterior, build("norm", seed=9)
    before = snapshot(model)
    seen = []

    def fail() -> None:
        seen.append(snapshot(model))
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"), getattr(posterior, block)(model):
        fail()
    assert not same(seen[0], before)
    assert same(snapshot(model), before)


def test_it_can_be_loaded_into_a_model_for_good() -> None:
    opt = trained_once("NoisyEKFAC", "norm")
    model = build("norm", seed=9)
    opt.posterior.load_into(model)
    assert same(snapshot(model), snapshot(opt.model))
    assert all(p.requires_grad for p in model.parameters())


OTHER_MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "wider": (lambda: en.models.MLP(3, [5], 2), r"0\.weight.*\(4, 3\).*\(5, 3\)"),
    "other outputs": (lambda: en.models.MLP(3, [4], 1), r"2\.weight.*\(2, 4\).*\(1, 4\)"),
    "no bias": (lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)), r"0\.bias"),
    "other names": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), r"2\.weight"),
    "stack": (lambda: en.models.MLP(3, [4], 2, stack=STACK), r"0\.weight"),
    "one more layer": (lambda: nn.Sequential(*en.models.MLP(3, [4], 2), nn.Linear(2, 2)), r"3\.weight"),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
@pytest.mark.parametrize("use", ["installed", "load_into", "predict"])
def test_another_model_is_refused_by_name_and_left_alone(other: str, use: str) -> None:
    posterior, (make, message) = trained_once("NoisyEKFAC", "mlp").posterior, OTHER_MODELS[other]
    model = make().double()
    before = snapshot(model)
    uses: dict[str, Callable[[], Any]] = {
        "installed": lambda: posterior.installed(model).__enter__(),
        "load_into": lambda: posterior.load_into(model),
        "predict": lambda: en.predict(model, posterior, randn(B, 3)),
    }
    with pytest.raises(ValueError, match=message):
        uses[use]()
    assert same(snapshot(model), before)


class Tied(nn.Module):
    """Two frozen layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.two.weight = self.one.weight
        self.one.requires_grad_(False)
        self.two.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(self.one(x)))


def test_frozen_weights_may_be_tied(tmp_path: Path) -> None:
    opt = trained("NoisyEKFAC", "mlp", Tied())
    opt.posterior.save(tmp_path / "q")
    loaded, x = en.Posterior.load(tmp_path / "q"), randn(B, 3)
    wanted = en.predict(opt.model, opt, x, samples=3)
    got = en.predict(Tied(), loaded, x, samples=3)
    close(got.loc, wanted.loc)


# On disk


@every_method
@every_model
def test_a_round_trip_is_exact(method: str, name: str, tmp_path: Path) -> None:
    opt = trained_once(method, name)
    posterior, path = opt.posterior, tmp_path / "q.safetensors"
    posterior.save(path)
    loaded = en.Posterior.load(path)
    assert_same_posterior(loaded, posterior)
    assert type(loaded.likelihood) is GaussianLikelihood
    assert loaded.likelihood.config() == opt.likelihood.config()
    assert same(loaded.likelihood.state_dict(), opt.likelihood.state_dict())
    assert os.listdir(tmp_path) == ["q.safetensors"]
    fresh, x = build(name, seed=9), randn(*lead(name), *MODELS[name][1], seed=77)
    before = snapshot(fresh)
    wanted = en.predict(opt.model, posterior, x, samples=3)
    got = en.predict(fresh, loaded, x, samples=3)
    assert torch.equal(got.loc, wanted.loc)
    assert torch.equal(got.scale, wanted.scale)
    assert same(snapshot(fresh), before)


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (lambda: en.GaussianLikelihood(3.0), randn(B, 2)),
        (lambda: en.GaussianLikelihood(update="adam", prior=(6.0, 6.0), lr=0.02), randn(B, 2)),
        (lambda: en.HeteroscedasticGaussianLikelihood(), randn(B, 1)),
        (lambda: en.CategoricalLikelihood(), torch.arange(B) % 2),
        (lambda: en.BernoulliLikelihood(), torch.ones(B, 2, dtype=torch.float64)),
    ],
    ids=["known", "adam", "heteroscedastic", "categorical", "bernoulli"],
)
def test_the_likelihood_is_restored(likelihood: Callable[[], Any], y: Tensor, tmp_path: Path) -> None:
    model = build("mlp")
    opt = en.NoisyEKFAC(model, num_data=N, likelihood=likelihood())
    with opt.sampled_params():
        opt.likelihood.nll(model(randn(B, 3)), y).backward()
    opt.step()
    opt.posterior.save(tmp_path / "q")
    loaded = en.Posterior.load(tmp_path / "q")
    assert type(loaded.likelihood) is type(opt.likelihood)
    assert loaded.likelihood.config() == opt.likelihood.config()
    assert same(loaded.likelihood.state_dict(), opt.likelihood.state_dict())
    x = randn(B, 3, seed=4)
    wanted, got = en.predict(model, opt.posterior, x), en.predict(build("mlp", seed=9), loaded, x)
    assert type(got) is type(wanted)
    assert torch.equal(got.log_prob(y), wanted.log_prob(y))


def test_float32_stays_float32(tmp_path: Path) -> None:
    model = build("norm").float()
    opt = en.NoisyEKFAC(model, num_data=N, likelihood=GaussianLikelihood())
    opt.posterior.save(tmp_path / "q")
    loaded = en.Posterior.load(tmp_path / "q")
    assert_same_posterior(loaded, opt.posterior)
    assert {part.dtype for q in loaded.values() for part in parts(q)} == {torch.float32}
    assert loaded.rest["1.num_batches_tracked"].dtype == torch.int64


def test_without_likelihood(tmp_path: Path) -> None:
    posterior = trained_once("NoisyEKFAC", "mlp").posterior
    en.Posterior(posterior.entries, posterior.rest).save(tmp_path / "q")
    loaded = en.Posterior.load(tmp_path / "q")
    assert loaded.likelihood is None
    assert_same_posterior(loaded, posterior)


def test_a_posterior_can_be_made_by_hand(tmp_path: Path) -> None:
    q = Independent(Normal(randn(2, 4), randn(2, 4, seed=1).exp()), 2)
    posterior = en.Posterior({"": Entry(q, (("weight", (2, 3)), ("bias", (2,))))}, {})
    posterior.save(tmp_path / "q")
    loaded = en.Posterior.load(tmp_path / "q")
    assert_same_posterior(loaded, posterior)
    model = build("linear")
    loaded.load_into(model)
    assert torch.equal(matrix(model), q.mean)


def test_paths_may_be_words_and_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    posterior = trained_once("NoisyEKFAC", "mlp").posterior
    posterior.save("q")
    assert_same_posterior(en.Posterior.load("q"), posterior)
    assert os.listdir(tmp_path) == ["q"]


def test_the_file_is_safetensors_with_readable_metadata(tmp_path: Path) -> None:
    opt = trained_once("NoisyEKFAC", "norm")
    opt.posterior.save(tmp_path / "q")
    with safe_open(tmp_path / "q", framework="pt") as file:
        meta = json.loads(file.metadata()["eigenoise"])
        names = set(file.keys())
        assert torch.equal(file.get_tensor("q/0/loc"), matrix(opt.model[0]))
        assert torch.equal(file.get_tensor("rest/1.running_mean"), opt.model[1].running_mean)
    assert meta["format"] == 2
    assert meta["eigenoise"] == en.__version__
    assert set(meta["layout"]) == {"0", "3", "1.weight", "1.bias"}
    assert meta["likelihood"]["kind"] == "GaussianLikelihood"
    assert {"likelihood/a", "likelihood/b"} < names


def test_a_likelihood_of_ones_own_is_refused(tmp_path: Path) -> None:
    """It could not be read back: saying so beats losing it."""
    mine = type("Mine", (GaussianLikelihood,), {})
    posterior = trained("NoisyEKFAC", "mlp", likelihood=mine()).posterior
    with pytest.raises(ValueError, match=r"the likelihood must be one of .*, got 'Mine'"):
        posterior.save(tmp_path / "q")
    assert os.listdir(tmp_path) == []


# When saving fails


@pytest.fixture
def existing(tmp_path: Path) -> Path:
    """A posterior saved before."""
    path = tmp_path / "q"
    trained_once("NoisyAdam", "linear").posterior.save(path)
    return path


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("odd"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("moment", ["midway", "at the end"])
@pytest.mark.parametrize("present", [True, False])
def test_a_failure_leaves_what_was_there(
    error: BaseException, moment: str, present: bool, existing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = existing.read_bytes()
    path = existing if present else existing.with_name("new")
    posterior = trained_once("NoisyEKFAC", "mlp").posterior

    def fail_midway(tensors: Any, filename: Any, metadata: Any = None) -> None:
        Path(filename).write_bytes(b"half a file")
        raise error

    def fail_at_the_end(*_: Any) -> None:
        raise error

    if moment == "midway":
        monkeypatch.setattr(safetensors.torch, "save_file", fail_midway)
    else:
        monkeypatch.setattr(os, "replace", fail_at_the_end)
    with pytest.raises(type(error)):
        posterior.save(path)
    monkeypatch.undo()
    assert existing.read_bytes() == before
    assert os.listdir(existing.parent) == ["q"]
    posterior.save(path)
    assert_same_posterior(en.Posterior.load(path), posterior)


def test_saving_into_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        trained_once("NoisyEKFAC", "mlp").posterior.save(tmp_path / "none" / "q")
    assert os.listdir(tmp_path) == []


def test_saving_replaces(existing: Path) -> None:
    posterior = trained_once("NoisyEKFAC", "mlp").posterior
    posterior.save(existing)
    assert_same_posterior(en.Posterior.load(existing), posterior)
    assert os.listdir(existing.parent) == ["q"]


# When loading fails


def test_no_file_and_no_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"no posterior file at {path}"):
            en.Posterior.load(path)


def refuse(path: Path, message: str = "") -> None:
    with pytest.raises(ValueError, match=f"{path} is not a posterior that this version can read.*{message}"):
        en.Posterior.load(path)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_truncated_file(existing: Path, keep: int) -> None:
    existing.write_bytes(existing.read_bytes()[:keep])
    refuse(existing)


@pytest.mark.parametrize("size", [7, 64, 4096])
def test_random_bytes(tmp_path: Path, size: int) -> None:
    path = tmp_path / "q"
    path.write_bytes(bytes(torch.randint(256, (size,), generator=generator(size)).tolist()))
    refuse(path)


def test_a_pickle(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "q")
    refuse(tmp_path / "q")


@pytest.mark.parametrize("about", [None, "", "no JSON", "[1]", "{}"])
def test_safetensors_of_something_else(tmp_path: Path, about: str | None) -> None:
    metadata = {"format": "pt"} if about is None else {"eigenoise": about}
    safetensors.torch.save_file({"weight": torch.ones(2)}, tmp_path / "q", metadata)
    refuse(tmp_path / "q")


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["eigenoise"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(meta, tensors)
    text = json.dumps(meta)
    about = {"eigenoise": text, "sha256": posterior_files._digest(text, tensors)}  # as someone would who means harm
    safetensors.torch.save_file(tensors, path, about)


def layer(**changes: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda meta, _: meta["layout"]["0"].update(changes)


def likely(**changes: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda meta, _: meta["likelihood"].update(changes)


TAMPERED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = {
    "format of the future": (lambda meta, _: meta.update(format=999), "its format is 999, this version reads 2"),
    "format as a word": (lambda meta, _: meta.update(format="2"), "its format is '2'"),
    "format of yes": (lambda meta, _: meta.update(format=True), "its format is True"),
    "format of 0.1": (lambda meta, _: meta.update(format=1), "its format is 1, this version reads 2"),
    "no format": (lambda meta, _: meta.pop("format"), "format"),
    "no layout": (lambda meta, _: meta.pop("layout"), "layout"),
    "layout a list": (lambda meta, _: meta.update(layout=[1]), ""),
    "unknown layer": (lambda meta, _: meta["layout"].update(ghost=meta["layout"]["0"]), "ghost"),
    "unknown kind": (layer(kind="triangular"), "triangular"),
    "another kind": (layer(kind="matrix"), "cov_out"),
    "no params": (layer(params=[]), "'0'"),
    "too few numbers": (layer(params=[["0.weight", [4, 2]], ["0.bias", [4]]]), "'0'"),
    "numbers that add up but do not fit": (layer(params=[["0.weight", [2, 7]], ["0.bias", [2]]]), "'0'"),
    "too many parts": (layer(params=[["0.weight", [4, 3]], ["0.bias", [2]], ["0.more", [2]]]), "'0'"),
    "a stack of many": (layer(stack=10**8), r"stack of 100000000 models, but its matrix is \(4, 4\)"),
    "a stack of words": (layer(stack="x"), "must be whole numbers"),
    "a stack of yes": (layer(stack=True), "must be whole numbers"),
    "negative sizes": (layer(params=[["0.weight", [-4, -3]], ["0.bias", [4]]]), "must be whole numbers"),
    "axes of words": (layer(event_dims="2"), "event_dims"),
    "a likelihood of many": (lambda meta, _: meta["likelihood"]["config"].update(stack=10**8), "its weights are not"),
    "params no pairs": (layer(params=[1, 2]), ""),
    "a tensor missing": (lambda _, tensors: tensors.pop("q/0/q_in"), "q/0/q_in"),
    "a tensor of another shape": (lambda _, tensors: tensors.update({"q/0/q_in": torch.eye(3)}), "q_in"),
    "a tensor of another dtype": (lambda _, t: t.update({"q/0/q_in": torch.eye(4, dtype=torch.int64)}), "q_in"),
    "no basis": (lambda _, tensors: tensors["q/0/q_in"].mul_(2), "q_in"),
    "no variance": (lambda _, tensors: tensors["q/0/variance"].neg_(), "variance"),
    "no number": (lambda _, tensors: tensors["q/0/loc"].fill_(math.nan), "loc"),
    "no likelihood": (lambda meta, _: meta.pop("likelihood"), "likelihood"),
    "unknown likelihood": (likely(kind="Popen"), "the likelihood must be one of"),
    "abstract likelihood": (likely(kind="Likelihood"), "the likelihood must be one of"),
    "unknown option": (likely(config={"shell": True}), "shell"),
    "wrong option": (likely(config={"lr": -1.0}), "lr"),
    "state missing": (lambda _, tensors: tensors.pop("likelihood/a"), "'a'"),
    "state of another shape": (lambda _, tensors: tensors.update({"likelihood/b": torch.ones(2)}), "b must have"),
}


def test_files_are_checked_whatever_torchs_default_is(tmp_path: Path) -> None:
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)  # as compiling a model does
    try:
        test_a_file_that_was_tampered_with("no variance", tmp_path)
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


def test_no_flipped_bit_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "q"
    trained_once("NoisyEKFAC", "norm").posterior.save(path)
    content, chance = path.read_bytes(), random.Random(0)
    for place in chance.sample(range(8 * len(content)), 400):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        refuse(path)


def test_json_that_is_too_deep(tmp_path: Path) -> None:
    metadata = {"eigenoise": '{"format": 2, "notes": ' + "[" * 100_000 + "]" * 100_000 + "}"}
    safetensors.torch.save_file({"weight": torch.ones(2)}, tmp_path / "q", metadata)
    refuse(tmp_path / "q")


@pytest.mark.parametrize("change", TAMPERED)
def test_a_file_that_was_tampered_with(change: str, tmp_path: Path) -> None:
    path = tmp_path / "q"
    trained_once("NoisyEKFAC", "mlp").posterior.save(path)
    rewrite(path, lambda meta, tensors: None)
    en.Posterior.load(path)  # rewriting by itself does no harm
    rewrite(path, TAMPERED[change][0])
    refuse(path, TAMPERED[change][1])


def test_the_kl_of_what_a_stack_shares_is_counted_once():
    model = nn.Sequential(en.models.StackedLinear(4, 3, 5), nn.LayerNorm(5), en.models.StackedLinear(4, 5, 1))
    opt = en.NoisyEKFAC(model, num_data=50, likelihood=en.GaussianLikelihood(stack=4), prior_var=0.5)
    with opt.sampled_params():
        opt.likelihood.nll(model(torch.randn(4, 8, 3)), torch.randn(4, 8, 1)).backward()
    opt.step()
    torch.testing.assert_close(opt.posterior.kl(0.5), opt.kl())
