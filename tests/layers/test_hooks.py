"""Statistics that reach the Fishers against dense autodiff oracles, and the manners of the hooks that gather them.

Weights are without noise (EKFAC, KFAC; noisy Adam with ``kl_weight=0``), the averages forget at once and ``lr=0`` keeps
the mean, so that the state after a step is the statistic of that step alone.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import eigenoise as en
from dense import (
    categorical_fisher,
    diagonal_in_basis,
    fisher_block,
    fisher_diagonal,
    gaussian_fisher,
    layer_matrix,
    per_example_gradients,
)
from eigenoise.layers.matrix_layer import as_matrix_layer
from eigenoise.likelihoods import Likelihood

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64 against a dense reference
BF16 = 0.03  # of a statistic's largest entry: bfloat16 has 8 bits, and a few roundings add up
STANDARD_ERRORS = 5.0  # a mean over draws may be this many of its own standard errors off
DRAWS = 200
POWER = 0.2  # and that standard error must be below this part of the largest entry, or the test could not fail
B, C, TAU = 6, 3, 1.7  # examples, outputs, noise precision
FISHERS = ["sampled", "exact", "empirical"]
fishers = pytest.mark.parametrize("fisher", FISHERS)
certain = pytest.mark.parametrize("fisher", ["exact", "empirical"])  # those without randomness


# Models.


class Inplace(nn.Module):
    """In-place ReLUs straight after a convolution and after 3-D and 2-D Linear outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.tokens = nn.Conv1d(2, 3, 2), nn.Linear(3, 4)
        self.plain, self.head = nn.Linear(4, 5), nn.Linear(5, C)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.conv(x)).transpose(1, 2).contiguous()  # Linear's output is then a view
        h = self.relu(self.tokens(h)).mean(1)
        return self.head(self.relu(self.plain(h)))


class Twice(nn.Module):
    """One layer called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.body(x).tanh()).tanh())


class Uneven(Twice):
    """One layer called with batches of different sizes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh() + self.body(x[:2]).mean(0))


class Keyword(Twice):
    """Layers called by keyword."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(input=self.body(input=x).tanh())


class Uncalled(Twice):
    """A weight used without calling its layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.linear(x, self.body.weight, self.body.bias).tanh())


class Doubled(Twice):
    """Doubles the first layer's output, by itself or leaving that to a hook."""

    by_hook = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head((h if self.by_hook else 2 * h).tanh())


class Checkpointed(nn.Module):
    """A part that is, if wanted, computed again in the backward pass; with layers and bare parameters."""

    again = False

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 5))
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
        return self.head(self.norm(h).tanh())


class SequenceFirst(nn.Module):
    """Inputs (b, t, 4), of which the first layer sees (t, b, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Linear(4, 5), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens(x.transpose(0, 1)).tanh().sum(0))


class StackedByKeyword(nn.Module):
    """A stacked layer called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = en.models.StackedLinear(2, 4, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x=x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, stride=2, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 2, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, C),
    )


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C))
    model[2].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def layer_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, C))


def batch_normed() -> nn.Module:  # in training mode its examples are coupled
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh(), nn.Linear(5, C))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "mlp": (mlp, (4,), {}),
    "cnn": (cnn, (2, 4, 4), {}),
    "in-place": (Inplace, (2, 5), {}),
    "called twice": (Twice, (4,), {}),
    "keyword": (Keyword, (4,), {}),
    "partly frozen": (partly_frozen, (4,), {}),
    "sequence-first": (SequenceFirst, (5, 4), {"batch_dim": 1}),
}
every_model = pytest.mark.parametrize("kind", MODELS)
LIKELIHOODS: dict[str, tuple[Callable[[], Likelihood], Callable[[Tensor], Tensor]]] = {
    "gaussian": (lambda: en.GaussianLikelihood(precision=TAU), lambda f: gaussian_fisher(f, TAU)),
    "categorical": (en.CategoricalLikelihood, categorical_fisher),
}
each_likelihood = pytest.mark.parametrize("noise", LIKELIHOODS)


def problem(
    kind: str | Callable[[], nn.Module], noise: str = "categorical", dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, inputs (B, ...) and targets (B,) or (B, C)."""
    torch.manual_seed(0)
    make, shape, _ = MODELS[kind] if isinstance(kind, str) else (kind, (4,), {})
    model = make().to(dtype)
    x, y = torch.randn(B, *shape, dtype=dtype), torch.randint(C, (B,))
    return model, x, y if noise == "categorical" else functional.one_hot(y, C).to(dtype)


# Running and reading.


def build(
    model: nn.Module, likelihood: Likelihood | None = None, method: Callable[..., Any] = en.EKFAC, **options: Any
) -> Any:
    settings = {
        "num_data": 50,
        "lr": 0.0,
        "momentum": 0.0,
        "ema_factors": 1.0,
        "ema_scale": 1.0,
        "guard": False,  # statistics alone are looked at
        "stats_every": 1,
        "stats_fraction": 1.0,
        "init": 1.0,  # R is then what was seen, even at the first step
        "noise_ramp": 0,
        "generator": torch.Generator().manual_seed(3),
    }
    known = inspect.signature(method).parameters
    settings = {name: value for name, value in {**settings, **options}.items() if name in known}
    return method(model, likelihood=likelihood or en.CategoricalLikelihood(), **settings)


def step(opt: Any, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
    opt.zero_grad()
    with opt.sampled_params():
        (opt.likelihood.nll(opt.model(x), y) * scale).backward()
    for p in opt.model.parameters():
        if p.grad is not None:
            p.grad.div_(scale)  # as a GradScaler does
    opt.step()


def fishers_of(opt: Any) -> dict[str, Any]:
    return {slot.name: slot.fisher for slot in opt.slots}


def gather(model: nn.Module, run: Callable[[Any], None], **options: Any) -> dict[str, Tensor]:
    """A and S and the diagonal r of every layer after ``run(opt)``, once with K-FAC and once with noisy Adam."""
    found = {}
    for method, names in ((en.KFAC, ("A", "S")), (en.NoisyAdam, ("r",))):
        opt = build(model, method=method, **{"kl_weight": 0.0, "damping": 1e-3, **options})
        run(opt)
        for slot in opt.slots:
            state = slot.fisher.state()
            found.update({f"{slot.name}/{name}": state[name].clone() for name in names if name in state})
    return found


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def hooks_on(model: nn.Module) -> list[str]:
    """Names of modules and parameters that carry any hook."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    kinds += ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")
    modules = [name for name, module in model.named_modules() if any(getattr(module, kind) for kind in kinds)]
    return modules + [name for name, p in model.named_parameters() if p._backward_hooks]


def factors_oracle(
    model: nn.Module, x: Tensor, output_fisher: Callable[[Tensor], Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and S of every layer that trains: mean aaᵀ over examples and positions; sum over positions of E[ggᵀ].

    Outputs are perturbed by zeros, whose gradients are g; ``test_layers`` vouches for the layers' canonical forms.
    """
    layers = {name: as_matrix_layer(name, module) for name, module in model.named_modules()}
    layers = {name: layer for name, layer in layers.items() if layer is not None}
    calls: list[tuple[str, Tensor, Tensor]] = []
    handles = []
    for name, layer in layers.items():

        def perturb(module: Any, args: Any, kwargs: Any, output: Tensor, name: str = name) -> Tensor:
            zero = torch.zeros_like(output, requires_grad=True)
            calls.append((name, args[0] if args else kwargs["input"], zero))
            return output + zero

        handles.append(layer.module.register_forward_hook(perturb, with_kwargs=True))
    f = model(x)
    for handle in handles:
        handle.remove()
    values, vectors = torch.linalg.eigh(output_fisher(f.detach()))
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)  # (b, d, d)
    zeros = [zero for _, _, zero in calls]
    columns = [torch.autograd.grad(f, zeros, root[..., i], retain_graph=True) for i in range(f.shape[-1])]
    found = {}
    for name, layer in layers.items():
        mine = [i for i, call in enumerate(calls) if call[0] == name]
        a = torch.cat([layer.rows(calls[i][1], 0).flatten(-3, -2) for i in mine], -2).detach()
        g = torch.cat([layer.gradient_rows(column[i], 0).flatten(-3, -2) for i in mine for column in columns], -2)
        found[name] = a.mT @ a / a.shape[-2], g.mT @ g / x.shape[0]
    return found


# Exact.


@every_model
@each_likelihood
@pytest.mark.parametrize("method", [en.EKFAC, en.KFAC])
def test_factors_equal_the_oracle(kind: str, noise: str, method: Callable[..., Any]) -> None:
    model, x, y = problem(kind, noise)
    make, output_fisher = LIKELIHOODS[noise]
    opt = build(model, make(), method, fisher="exact", **MODELS[kind][2])
    step(opt, x, y)
    wanted = factors_oracle(model, x, output_fisher)
    assert fishers_of(opt).keys() == wanted.keys()
    for name, (A, S) in wanted.items():
        factors = fishers_of(opt)[name].factors
        torch.testing.assert_close(factors.inputs.moments, A, **CLOSE)
        torch.testing.assert_close(factors.out.moments, S, **CLOSE)


@every_model
@each_likelihood
def test_scale_equals_the_exact_fisher(kind: str, noise: str) -> None:
    model, x, y = problem(kind, noise)
    make, output_fisher = LIKELIHOODS[noise]
    opt = build(model, make(), fisher="exact", **MODELS[kind][2])
    step(opt, x, y)  # taken in the first basis, the identity, and carried over to the second
    blocks = {name: fisher_block(model, name, x, output_fisher) for name in fishers_of(opt)}
    for name, fisher in fishers_of(opt).items():
        plain = blocks[name].diagonal(dim1=-2, dim2=-1).reshape(fisher.R.shape)
        carried = fisher.factors.q_out.mT.square() @ plain @ fisher.factors.q_in.square()
        torch.testing.assert_close(fisher.R, carried, **CLOSE)
    step(opt, x, y)  # taken in the second, which stays
    for name, fisher in fishers_of(opt).items():
        wanted = diagonal_in_basis(blocks[name], fisher.factors.q_out, fisher.factors.q_in)
        torch.testing.assert_close(fisher.R, wanted, **CLOSE)


@every_model
@each_likelihood
def test_diagonal_equals_the_exact_fisher(kind: str, noise: str) -> None:
    model, x, y = problem(kind, noise)
    make, output_fisher = LIKELIHOODS[noise]
    options = {"kl_weight": 0.0, "damping": 1e-3, "fisher": "exact", **MODELS[kind][2]}
    opt = build(model, make(), en.NoisyAdam, **options)
    step(opt, x, y)
    for name, fisher in fishers_of(opt).items():
        wanted = fisher_block(model, name, x, output_fisher).diagonal(dim1=-2, dim2=-1).reshape(fisher.r.shape)
        torch.testing.assert_close(fisher.r, wanted, **CLOSE)


@certain
def test_a_stack_of_models_equals_each_alone(fisher: str) -> None:
    torch.manual_seed(0)
    s = 2
    together = en.models.MLP(4, [5], C, stack=s).double()
    x, y = torch.randn(s, B, 4, dtype=torch.float64), torch.randint(C, (s, B))
    got = gather(together, lambda opt: step(opt, x, y), likelihood=en.CategoricalLikelihood(stack=s), fisher=fisher)
    for i in range(s):
        alone = en.models.MLP(4, [5], C).double()
        with torch.no_grad():
            for own, stacked in zip(alone.parameters(), together.parameters(), strict=True):
                own.copy_(stacked[i])
        wanted = gather(alone, lambda opt, i=i: step(opt, x[i], y[i]), fisher=fisher)
        assert_same({name: value[i] for name, value in got.items()}, wanted)


@fishers
def test_a_stacked_layer_may_be_called_by_keyword(fisher: str) -> None:
    model, x, y = problem(StackedByKeyword)
    opt = build(model, en.CategoricalLikelihood(stack=2), fisher=fisher)
    step(opt, x, y.expand(2, -1))
    a = functional.pad(x, (0, 1), value=1.0)
    torch.testing.assert_close(opt.slots[0].fisher.factors.inputs.moments, (a.mT @ a / B).expand(2, -1, -1), **CLOSE)


# Empirical.


@every_model
@each_likelihood
@pytest.mark.parametrize("scale", [1.0, 1024.0, 0.25])
def test_empirical_equals_per_example_gradients(kind: str, noise: str, scale: float) -> None:
    model, x, y = problem(kind, noise)
    likelihood = LIKELIHOODS[noise][0]()
    opt = build(model, likelihood, fisher="empirical", **MODELS[kind][2])
    grads = per_example_gradients(model, lambda f, y: likelihood.log_prob(f, y).sum(), x, y)
    step(opt, x, y, scale)  # as above: the first basis, then the second
    for name, fisher in fishers_of(opt).items():
        G = layer_matrix(model, name, grads)  # (b, ..., p, n)
        carried = fisher.factors.q_out.mT.square() @ G.square().mean(0) @ fisher.factors.q_in.square()
        torch.testing.assert_close(fisher.R, carried, **CLOSE)
    step(opt, x, y, scale)
    for name, fisher in fishers_of(opt).items():
        rotated = fisher.factors.q_out.mT @ layer_matrix(model, name, grads) @ fisher.factors.q_in
        torch.testing.assert_close(fisher.R, rotated.square().mean(0), **CLOSE)


def test_empirical_output_factor() -> None:
    model, x, y = problem("mlp")
    opt = build(model, fisher="empirical")
    step(opt, x, y, scale=1024.0)
    f = model(x).detach()
    g = functional.one_hot(y, C) - f.softmax(-1)  # the last layer's output is f itself
    torch.testing.assert_close(opt.slots[1].fisher.factors.out.moments, g.mT @ g / B, **CLOSE)


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_scaling_the_loss_changes_nothing_else(fisher: str) -> None:
    model, x, y = problem("mlp")
    plain, scaled = (
        gather(model, lambda opt, scale=scale: step(opt, x, y, scale), fisher=fisher) for scale in (1.0, 1024.0)
    )
    assert_same(scaled, plain)


# Sampled, and bare parameters.


def assert_unbiased(draws: list[Tensor], wanted: Tensor) -> None:
    """The mean of ``draws`` is ``wanted`` within its standard error, and that is small enough to tell."""
    stacked = torch.stack(draws)
    error = stacked.std(0) / len(draws) ** 0.5
    assert error.max() < POWER * wanted.abs().max()
    off = (stacked.mean(0) - wanted).abs()
    assert (off <= STANDARD_ERRORS * error + CLOSE["atol"]).all(), (off / error).max()


@each_likelihood
@pytest.mark.parametrize("kind", ["mlp", "in-place"])
def test_sampled_is_unbiased_for_layers(kind: str, noise: str) -> None:
    model, x, y = problem(kind, noise)
    make, output_fisher = LIKELIHOODS[noise]
    opt = build(model, make(), fisher="sampled", refresh_every=10**6)
    step(opt, x, y)  # a basis to look from
    draws: dict[str, list[Tensor]] = {f"{slot.name}/{part}": [] for slot in opt.slots for part in "RS"}
    for _ in range(DRAWS):
        step(opt, x, y)
        for name, fisher in fishers_of(opt).items():
            draws[f"{name}/R"].append(fisher.R.clone())
            draws[f"{name}/S"].append(fisher.factors.out.moments.clone())
    factors = factors_oracle(model, x, output_fisher)
    for name, fisher in fishers_of(opt).items():
        block = fisher_block(model, name, x, output_fisher)
        assert_unbiased(draws[f"{name}/R"], diagonal_in_basis(block, fisher.factors.q_out, fisher.factors.q_in))
        assert_unbiased(draws[f"{name}/S"], factors[name][1])


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
@pytest.mark.parametrize(
    ("make_model", "noise"), [(layer_normed, "categorical"), (layer_normed, "gaussian"), (batch_normed, "gaussian")]
)
def test_bare_parameters_are_unbiased(make_model: Callable[[], nn.Module], noise: str, fisher: str) -> None:
    model, x, y = problem(make_model, noise)
    make, output_fisher = LIKELIHOODS[noise]
    opt = build(model, make(), en.NoisyAdam, fisher=fisher, kl_weight=0.0, damping=1e-3)
    names = ["1.weight", "1.bias"]
    draws: dict[str, list[Tensor]] = {name: [] for name in names}
    for _ in range(DRAWS):
        step(opt, x, y)
        for name in names:
            draws[name].append(fishers_of(opt)[name].r.clone())
    for name in names:
        assert_unbiased(draws[name], fisher_diagonal(model, name, x, output_fisher))


def test_the_empirical_fisher_of_bare_parameters_is_unbiased() -> None:
    model, x, y = problem(layer_normed)
    likelihood = en.CategoricalLikelihood()
    grads = per_example_gradients(model, lambda f, y: likelihood.log_prob(f, y).sum(), x, y)
    opt = build(model, likelihood, en.NoisyAdam, fisher="empirical", kl_weight=0.0, damping=1e-3)
    draws = []
    for _ in range(DRAWS):
        step(opt, x, y)
        draws.append(fishers_of(opt)["1.weight"].r.clone())
    assert_unbiased(draws, grads["1.weight"].square().mean(0))


def test_random_signs_leave_layers_exact() -> None:
    model, x, y = problem(layer_normed)
    opt = build(model, fisher="exact")
    step(opt, x, y)
    step(opt, x, y)
    for name in ("0", "3"):
        fisher = fishers_of(opt)[name]
        block = fisher_block(model, name, x, categorical_fisher)
        wanted = diagonal_in_basis(block, fisher.factors.q_out, fisher.factors.q_in)
        torch.testing.assert_close(fisher.R, wanted, **CLOSE)


@pytest.mark.parametrize("method", [en.EKFAC, en.KFAC, en.NoisyAdam])
def test_factors_and_scale_keep_their_own_rhythm(method: Callable[..., Any]) -> None:
    model, _, y = problem(layer_normed)
    opt = build(model, method=method, stats_every=2, scale_every=3)
    scale_every = 3 if method is en.EKFAC else 2
    rhythm = {"A": 2, "S": 2, "R": scale_every, "r": scale_every}
    for i in range(7):
        before = {slot.name: {k: v.clone() for k, v in slot.fisher.state().items()} for slot in opt.slots}
        step(opt, torch.randn(B, 4, dtype=torch.float64), y)
        for slot in opt.slots:
            for name, value in slot.fisher.state().items():
                if name in rhythm:
                    moved = not torch.equal(value, before[slot.name][name])
                    assert moved == (i % rhythm[name] == 0), f"{slot.name} {name} at step {i}"


# However the user arranges forward and backward passes.


def one_block(opt: Any, halves: list[tuple[Tensor, Tensor]]) -> None:
    with opt.sampled_params():
        for x, y in halves:
            (opt.likelihood.nll(opt.model(x), y) / 2).backward()


def two_blocks(opt: Any, halves: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in halves:
        with opt.sampled_params():
            (opt.likelihood.nll(opt.model(x), y) / 2).backward()


def one_backward(opt: Any, halves: list[tuple[Tensor, Tensor]]) -> None:
    with opt.sampled_params():
        losses = [opt.likelihood.nll(opt.model(x), y) for x, y in halves]
        (sum(losses) / 2).backward()


def forwards_then_losses(opt: Any, halves: list[tuple[Tensor, Tensor]]) -> None:
    with opt.sampled_params():
        outputs = [opt.model(x) for x, _ in halves]
        losses = [opt.likelihood.nll(f, y) for f, (_, y) in zip(outputs, halves, strict=True)]
        (sum(losses) / 2).backward()


def forwards_then_backwards(opt: Any, halves: list[tuple[Tensor, Tensor]]) -> None:
    with opt.sampled_params():
        for loss in [opt.likelihood.nll(opt.model(x), y) for x, y in halves]:
            (loss / 2).backward()


ARRANGEMENTS = [one_block, two_blocks, one_backward, forwards_then_losses, forwards_then_backwards]


@certain
@pytest.mark.parametrize("arrange", ARRANGEMENTS)
@pytest.mark.parametrize("kind", ["mlp", "called twice", "cnn"])
def test_two_halves_equal_the_whole(fisher: str, arrange: Callable[..., None], kind: str) -> None:
    model, x, y = problem(kind)
    halves = [(x[: B // 2], y[: B // 2]), (x[B // 2 :], y[B // 2 :])]

    def run(opt: Any) -> None:
        opt.zero_grad()
        arrange(opt, halves)
        opt.step()

    assert_same(gather(model, run, fisher=fisher), gather(model, lambda opt: step(opt, x, y), fisher=fisher))


# A part of the batch.


class Flattened(SequenceFirst):
    """The first layer sees the rows of a sequence-first input one below the other."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        rows = self.tokens(x.transpose(0, 1).reshape(t * b, -1))
        return self.head(rows.tanh().reshape(t, b, -1).sum(0))


MODELS["flattened"] = (Flattened, (5, 4), {"batch_dim": 1})


@certain
@pytest.mark.parametrize("kind", MODELS)
def test_statistics_are_those_of_the_first_examples(fisher: str, kind: str, monkeypatch) -> None:
    monkeypatch.setattr("eigenoise.optim.statistics.MIN_ROWS", 1)
    model, x, y = problem(kind)
    options = {"fisher": fisher, **MODELS[kind][2]}
    part = gather(model, lambda opt: step(opt, x, y), stats_fraction=1 / 3, **options)
    first = gather(model, lambda opt: step(opt, x[: B // 3], y[: B // 3]), **options)
    whole = gather(model, lambda opt: step(opt, x, y), **options)
    assert_same(part, first)
    assert any(not torch.allclose(first[name], whole[name]) for name in whole)


@certain
@pytest.mark.parametrize("kind", MODELS)
def test_looking_at_few_examples_at_a_time_changes_nothing(fisher: str, kind: str, monkeypatch) -> None:
    model, x, y = problem(kind)
    options = {"fisher": fisher, **MODELS[kind][2]}
    whole = gather(model, lambda opt: step(opt, x, y), **options)
    monkeypatch.setattr("eigenoise.optim.statistics.MAX_ACTIVATIONS_PER_CHUNK", 1)
    assert_same(gather(model, lambda opt: step(opt, x, y), **options), whole)


def test_factors_look_at_more_examples_where_positions_are_few(monkeypatch) -> None:
    model, x, y = problem("cnn")
    opt = build(model, fisher="exact", stats_fraction=1 / 3)
    sizes: list[tuple[int, bool]] = []  # examples, and whether R is taken from them
    take = en.fisher.Eigen.update

    def update(self, a, g, terms, *, factors, scale):
        assert factors
        sizes.append((a.shape[-3], scale))
        take(self, a, g, terms, factors=factors, scale=scale)

    monkeypatch.setattr(en.fisher.Eigen, "update", update)
    part, rest = (B // 3, True), (B - B // 3, False)
    some = [part, part, part, (4 - B // 3, False)]
    for enough, expected in ((1, [part] * 3), (1 << 20, [part, rest] * 3), (4, some)):
        sizes.clear()
        monkeypatch.setattr("eigenoise.optim.statistics.MIN_ROWS", enough)
        step(opt, x, y)
        assert sizes == expected


def test_rows_that_belong_to_no_example_are_looked_at_together(monkeypatch) -> None:
    class Places(nn.Module):
        """A target for every place of an image."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, C, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).permute(0, 2, 3, 1).flatten(0, 2)

    monkeypatch.setattr("eigenoise.optim.statistics.MAX_ACTIVATIONS_PER_CHUNK", 1)
    model = Places()
    step(build(model), torch.randn(2, 2, 4, 4), torch.randint(C, (32,)))


def test_how_much_is_looked_at_at_once(monkeypatch) -> None:
    model, x, y = problem("cnn")
    opt = build(model, fisher="exact")
    conv = fishers_of(opt)["0"]
    sizes: list[torch.Size] = []
    update = conv.update
    monkeypatch.setattr(
        conv, "update", lambda a, g, *rest, **more: (sizes.append(a.shape), update(a, g, *rest, **more))
    )
    step(opt, x, y)
    assert [size[0] for size in sizes] == [B]
    _, t, n = sizes[0]
    monkeypatch.setattr("eigenoise.optim.statistics.MAX_ACTIVATIONS_PER_CHUNK", 4 * t * n)
    step(opt, x, y)
    assert [size[0] for size in sizes[1:]] == [4, 2]


def test_bare_parameters_take_the_whole_batch() -> None:
    model, x, y = problem(layer_normed)
    part, whole = (
        gather(model, lambda opt: step(opt, x, y), fisher="exact", stats_fraction=fraction, generator=generator)
        for fraction, generator in ((0.5, torch.Generator().manual_seed(0)), (1.0, torch.Generator().manual_seed(0)))
    )
    torch.testing.assert_close(part["1.weight/r"], whole["1.weight/r"], **CLOSE)


def test_a_part_of_the_batch_is_checked() -> None:
    model, _, _ = problem("mlp")
    with pytest.raises(ValueError, match="stats_fraction must be 1 for a stack"):
        build(en.models.MLP(3, [4], 1, stack=2), en.GaussianLikelihood(stack=2), stats_fraction=0.5)
    with pytest.raises(ValueError, match="stats_fraction must be"):
        build(model, stats_fraction=0.0)
    with pytest.raises(TypeError, match="stats_fraction must be"):
        build(model, stats_fraction="some")


def test_by_default_statistics_use_as_much_of_the_batch_as_is_enough(monkeypatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, C))  # 36 places, then 1
    opt = build(model, stats_fraction="auto")
    sizes: dict[tuple[int, ...], int] = {}
    take = en.fisher.Eigen.update

    def update(self, a, g, terms, **wanted):
        sizes[self.shape] = a.shape[-3]
        take(self, a, g, terms, **wanted)

    monkeypatch.setattr(en.fisher.Eigen, "update", update)
    for b, convolution, linear in ((10, 10, 10), (100, 16, 100), (200, 25, 200), (1000, 125, 512)):
        step(opt, torch.randn(b, 1, 8, 8), torch.randint(C, (b,)))
        assert list(sizes.values()) == [convolution, linear]


@fishers
def test_gradients_may_be_changed_in_the_block(fisher: str) -> None:
    model, x, y = problem(layer_normed)

    def run(opt: Any) -> None:
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        opt.step()

    assert_same(gather(model, run, fisher=fisher), gather(model, lambda opt: step(opt, x, y), fisher=fisher))


def monitored_before(opt: Any, x: Tensor, y: Tensor) -> None:
    with opt.sampled_params():
        f = opt.model(x)
        monitor, loss = opt.likelihood.nll(f, y), opt.likelihood.nll(f, y)
        assert monitor.item() == loss.item()
        loss.backward()


def monitored_after(opt: Any, x: Tensor, y: Tensor) -> None:
    with opt.sampled_params():
        f = opt.model(x)
        loss, monitor = opt.likelihood.nll(f, y), opt.likelihood.nll(f, y)
        assert monitor.item() == loss.item()
        loss.backward()


def forward_without_grad(opt: Any, x: Tensor, y: Tensor) -> None:
    with opt.sampled_params():
        with torch.no_grad():
            opt.likelihood.nll(opt.model(-x), y)
        opt.likelihood.nll(opt.model(x), y).backward()
        with torch.no_grad():
            opt.likelihood.nll(opt.model(3 * x), y)


def loss_never_backpropagated(opt: Any, x: Tensor, y: Tensor) -> None:
    with opt.sampled_params():
        unused = opt.likelihood.nll(opt.model(-x), y)
        opt.likelihood.nll(opt.model(x), y).backward()
        assert unused.requires_grad


def output_never_used(opt: Any, x: Tensor, y: Tensor) -> None:
    with opt.sampled_params():
        f = opt.model(-x)
        opt.likelihood.nll(opt.model(x), y).backward()
        assert f.requires_grad


def block_without_training(opt: Any, x: Tensor, y: Tensor) -> None:
    with opt.sampled_params():
        assert opt.likelihood.nll(opt.model(-x), y).requires_grad
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(x), y).backward()


EXTRAS = [monitored_before, monitored_after, forward_without_grad, loss_never_backpropagated]
EXTRAS += [output_never_used, block_without_training]


@certain
@pytest.mark.parametrize("arrange", EXTRAS)
def test_what_is_not_backpropagated_adds_nothing(fisher: str, arrange: Callable[..., None]) -> None:
    model, x, y = problem("mlp")

    def run(opt: Any) -> None:
        opt.zero_grad()
        arrange(opt, x, y)
        opt.step()

    assert_same(gather(model, run, fisher=fisher), gather(model, lambda opt: step(opt, x, y), fisher=fisher))


@fishers
def test_without_a_backward_pass_there_is_nothing_to_step_from(fisher: str) -> None:
    model, x, y = problem("mlp")
    opt = build(model, fisher=fisher)
    with opt.sampled_params():
        opt.likelihood.nll(model(x), y)
    assert not any(slot.fisher.pending() for slot in opt.slots)
    with pytest.raises(RuntimeError, match="no training loss"):
        opt.step()


@certain
def test_evaluation_mode(fisher: str) -> None:
    model, x, y = problem(lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, C)))
    plain = nn.Sequential(model[0], nn.Identity(), model[2], model[3])
    model.eval()
    wanted = gather(plain, lambda opt: step(opt, x, y), fisher=fisher)
    assert_same(gather(model, lambda opt: step(opt, x, y), fisher=fisher), wanted)


@fishers
def test_checkpointing_changes_nothing(fisher: str) -> None:
    model, x, y = problem(Checkpointed)
    wanted = gather(model, lambda opt: step(opt, x, y), fisher=fisher)
    model.again = True
    assert_same(gather(model, lambda opt: step(opt, x, y), fisher=fisher), wanted)


@certain
def test_a_users_own_forward_hook(fisher: str) -> None:
    model, x, y = problem(Doubled)
    wanted = gather(model, lambda opt: step(opt, x, y), fisher=fisher)
    model.by_hook = True
    handle = model.body.register_forward_hook(lambda module, args, output: 2 * output)
    assert_same(gather(model, lambda opt: step(opt, x, y), fisher=fisher), wanted)
    assert list(model.body._forward_hooks) == [handle.id]  # ours are gone, the user's is not


@certain
@pytest.mark.parametrize("inside", ["forward", "forward and backward", "everything"])
@pytest.mark.parametrize("kind", ["mlp", "in-place"])
def test_autocast(fisher: str, inside: str, kind: str) -> None:
    model, x, y = problem(kind, dtype=torch.float32)

    def mixed(*parts: str) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if inside in parts else contextlib.nullcontext()

    def run(opt: Any) -> None:
        opt.zero_grad()
        with mixed("everything"):
            with opt.sampled_params():
                with mixed("forward", "forward and backward"):
                    loss = opt.likelihood.nll(model(x), y)
                    if inside == "forward and backward":
                        loss.backward()
                if inside != "forward and backward":
                    loss.backward()
            opt.step()

    wanted = gather(model, lambda opt: step(opt, x, y), fisher=fisher)
    got = gather(model, run, fisher=fisher)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == torch.float32
        off = (got[name] - value).abs().max() / value.abs().max()
        assert off < BF16, f"{name} is {off} off"
    assert all(p.isfinite().all() for p in model.parameters())


# Clear errors.


@fishers
def test_a_weight_used_without_its_layer_is_refused(fisher: str) -> None:
    model, x, y = problem(Uncalled)
    with pytest.raises(RuntimeError, match=r"'body'.*overrides"):
        step(build(model, fisher=fisher), x, y)
    step(build(model, fisher=fisher, overrides={"body": "diagonal"}), x, y)  # the remedy it names


@fishers
def test_a_forward_pass_outside_the_block_is_refused(fisher: str) -> None:
    model, x, y = problem(lambda: nn.Sequential(nn.Linear(4, C)))
    opt = build(model, fisher=fisher)
    f = model(x)

    def train() -> None:
        with opt.sampled_params():
            opt.likelihood.nll(f, y).backward()
        opt.step()

    with pytest.raises(RuntimeError, match=r"outside sampled_params\(\)"):
        train()


# Manners.


@fishers
def test_hooks_are_on_only_when_statistics_are_due(fisher: str) -> None:
    model, x, y = problem("mlp")
    opt = build(model, fisher=fisher, stats_every=2)
    assert hooks_on(model) == []
    for i in range(4):
        opt.zero_grad()
        with opt.sampled_params():
            assert hooks_on(model) == (["0", "2"] if i % 2 == 0 else [])
            opt.likelihood.nll(model(x), y).backward()
        assert hooks_on(model) == []
        opt.step()
        assert hooks_on(model) == []


@fishers
def test_no_hooks_in_a_block_without_gradients(fisher: str) -> None:
    model, x, _ = problem("mlp")
    opt = build(model, fisher=fisher)
    with torch.no_grad(), opt.sampled_params():
        assert hooks_on(model) == []
        model(x)


@fishers
@pytest.mark.parametrize("moment", ["before the forward pass", "before the backward pass", "after the backward pass"])
def test_no_hooks_after_an_exception(fisher: str, moment: str) -> None:
    model, x, y = problem(layer_normed)
    opt = build(model, fisher=fisher)

    def fail() -> None:
        with opt.sampled_params():
            if moment == "before the forward pass":
                raise KeyboardInterrupt
            loss = opt.likelihood.nll(model(x), y)
            if moment == "after the backward pass":
                loss.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert hooks_on(model) == []


@fishers
def test_a_failed_backward_pass_leaves_no_hooks(fisher: str) -> None:
    model, x, y = problem(layer_normed)
    opt = build(model, fisher=fisher)

    def break_down(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    def fail() -> None:
        with opt.sampled_params():
            f = model(x)
            loss = opt.likelihood.nll(f, y)
            f.register_hook(break_down)
            loss.backward()

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert hooks_on(model) == []


@fishers
def test_an_exception_does_not_spoil_the_next_step(fisher: str) -> None:
    model, x, y = problem("mlp")
    opt = build(model, fisher=fisher)

    def fail() -> None:
        with opt.sampled_params():
            opt.likelihood.nll(model(100 * x), y).backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    step(opt, x, y)
    a = functional.pad(x, (0, 1), value=1.0)
    torch.testing.assert_close(opt.slots[0].fisher.factors.inputs.moments, a.mT @ a / B, **CLOSE)


@fishers
def test_nothing_is_left_behind(fisher: str) -> None:
    model, x, y = problem("mlp")
    first = build(model, fisher=fisher)
    step(first, x, y)
    first.close()
    assert hooks_on(model) == []
    with pytest.raises(RuntimeError, match="closed"), first.sampled_params():
        model(x)
    second = build(model, first.likelihood, fisher=fisher)  # the likelihood is free again
    step(second, x, y)
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None
    assert hooks_on(model) == []


LEARNERS = [(en.EKFAC, {"fisher": fisher, "stats_every": 1}) for fisher in FISHERS]
LEARNERS += [(en.NoisyAdam, {"stats_every": 10}), (en.BayesByBackprop, {})]


@pytest.mark.parametrize(("method", "options"), LEARNERS)
def test_steps_do_not_gather_memory(method: Callable[..., Any], options: dict[str, Any]) -> None:
    model, x, y = problem(layer_normed)
    likelihood = en.CategoricalLikelihood()
    opt = method(model, num_data=50, likelihood=likelihood, **options)

    def train() -> int:
        """Two iterations, each with one more loss that is never backpropagated; how many tensors live afterwards.

        Nothing may wait for the collector of cycles: memory that does is missing on a full device.
        """
        for _ in range(2):
            opt.zero_grad()
            with opt.sampled_params():
                f = model(x)
                assert likelihood.nll(model(-x), y).requires_grad
                likelihood.nll(f, y).backward()
            opt.step()
        del f
        return sum(issubclass(type(item), Tensor) for item in gc.get_objects())

    gc.collect()
    gc.freeze()  # look only at what is made from here on
    gc.disable()
    try:
        train()  # let everything that is built lazily be built
        before = train()
        assert train() == before
    finally:
        gc.enable()
        gc.unfreeze()


@fishers
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_trained_model_can_be_copied(fisher: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model, x, y = problem(layer_normed)
    opt = build(model, fisher=fisher, lr=0.1)
    before = model(x).detach()
    step(opt, x, y)
    step(opt, x, y)
    other = copied(model)
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
    assert not torch.equal(other(x), before)
    step(build(other, fisher=fisher), x, y)  # and the copy can be trained


# Sequence-first models.


class Flattened(nn.Module):
    """A layer that sees every position of every example as a row of its own."""

    def __init__(self, sequence_first: bool = False, flatten: bool = True):
        super().__init__()
        self.lin, self.sequence_first, self.flatten = nn.Linear(3, 2), sequence_first, flatten

    def forward(self, x):
        rows = x.flatten(0, 1) if self.flatten else x
        out = self.lin(rows)
        out = out.unflatten(0, x.shape[:2]) if self.flatten else out
        return torch.tanh(out).mean(0 if self.sequence_first else 1)


def test_predictions_of_a_sequence_first_model_do_not_depend_on_chunks():
    torch.manual_seed(0)
    model = Flattened(sequence_first=True, flatten=False)
    opt = en.NoisyEKFAC(model, num_data=5, likelihood=en.GaussianLikelihood(), batch_dim=1)
    x = torch.randn(6, 5, 3)
    whole, parts = (en.predict(model, opt, x, chunk_size=size).mean for size in (100, 2))
    assert whole.shape == (5, 2)
    torch.testing.assert_close(parts, whole)
