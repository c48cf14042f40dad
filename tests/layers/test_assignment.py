"""Which parameter gets which treatment, and that models of every make train with every method."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import eigenoise as en
from eigenoise.layers.assignment import TREATMENTS, Assignment, assign
from eigenoise.layers.matrix_layer import BareParameter

METHODS = [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam, en.BayesByBackprop]
STEPS = 4  # enough for statistics, a new basis, and steps that use it
B = 6


def kinds(model: nn.Module, **options: Any) -> dict[str, str]:
    """Parameter name to treatment, each parameter exactly once."""
    found = [(name, t.kind) for t in assign(model, **options) for name in t.layer.param_names]
    assert len(found) == len(dict(found))
    return dict(found)


def entry(model: nn.Module, name: str, **options: Any) -> Assignment:
    (one,) = (t for t in assign(model, **options) if t.layer.name == name)
    return one


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Scaled(nn.Module):
    """A Linear and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.body(x)


D, S = "diagonal", "structured"
MODULES: dict[str, tuple[nn.Module, dict[str, str]]] = {
    "Linear": (nn.Linear(2, 3), {"weight": S, "bias": S}),
    "Linear without bias": (nn.Linear(2, 3, bias=False), {"weight": S}),
    "Conv1d": (nn.Conv1d(2, 3, 2), {"weight": S, "bias": S}),
    "Conv2d": (nn.Conv2d(2, 4, 2, groups=2), {"weight": S, "bias": S}),
    "StackedLinear": (en.models.StackedLinear(2, 3, 4), {"weight": S, "bias": S}),
    "Conv3d": (nn.Conv3d(2, 3, 2), {"weight": D, "bias": D}),
    "ConvTranspose2d": (nn.ConvTranspose2d(2, 3, 2), {"weight": D, "bias": D}),
    "BatchNorm1d": (nn.BatchNorm1d(3), {"weight": D, "bias": D}),
    "BatchNorm2d": (nn.BatchNorm2d(3), {"weight": D, "bias": D}),
    "LayerNorm": (nn.LayerNorm(3), {"weight": D, "bias": D}),
    "Embedding": (nn.Embedding(5, 3), {"weight": D}),
    "own forward": (OwnForward(2, 3), {"weight": D, "bias": D}),
    "MultiheadAttention": (
        nn.MultiheadAttention(4, 2),
        {"in_proj_weight": D, "in_proj_bias": D, "out_proj.weight": D, "out_proj.bias": D},
    ),
    "weight norm": (
        weight_norm(nn.Linear(2, 3)),
        {"bias": D, "parametrizations.weight.original0": D, "parametrizations.weight.original1": D},
    ),
}


@pytest.mark.parametrize(("module", "wanted"), MODULES.values(), ids=MODULES.keys())
def test_each_kind_of_module(module: nn.Module, wanted: dict[str, str]) -> None:
    assert kinds(module) == wanted
    nested = nn.ModuleDict({"deep": nn.ModuleDict({"er": module})})
    assert kinds(nested) == {f"deep.er.{name}": kind for name, kind in wanted.items()}
    point = {name: S if kind == S else "point" for name, kind in wanted.items()}
    assert kinds(module, others="point") == point


def test_a_bare_parameter_beside_a_layer() -> None:
    assert kinds(Scaled()) == {"scale": D, "body.weight": S, "body.bias": S}
    assert kinds(Scaled(), others="point") == {"scale": "point", "body.weight": S, "body.bias": S}
    assert isinstance(entry(Scaled(), "scale").layer, BareParameter)
    assert entry(Scaled(), "scale").has_posterior
    assert not entry(Scaled(), "scale", others="point").has_posterior


def test_frozen_parameters_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    assert kinds(model) == {"1.weight": D, "2.weight": S, "2.bias": S}


def test_frozen_bias_leaves_the_weight_structured() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    assert kinds(model) == {"weight": S}
    assert entry(model, "").layer.shape == (3, 2)


def test_frozen_weight_leaves_the_bias_bare() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    model[0].weight.requires_grad_(False)
    assert kinds(model) == {"0.bias": D}
    assert isinstance(entry(model, "0.bias").layer, BareParameter)


@pytest.mark.parametrize("kind", TREATMENTS)
@pytest.mark.parametrize(
    ("name", "touched"),
    [
        ("first", {"first.weight", "first.bias"}),
        ("norm", {"norm.weight", "norm.bias"}),
        ("norm.weight", {"norm.weight"}),
        ("block", {"block.0.weight", "block.0.bias", "block.1.weight"}),
        ("block.0", {"block.0.weight", "block.0.bias"}),
    ],
)
def test_overrides(kind: str, name: str, touched: set[str]) -> None:
    model = nn.ModuleDict(
        {
            "first": nn.Linear(2, 3),
            "first_too": nn.Linear(2, 3),  # a name that only begins like another is not below it
            "norm": nn.LayerNorm(3),
            "block": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False)),
        }
    )
    plain = kinds(model)
    assert kinds(model, overrides={name: kind}) == {k: kind if k in touched else v for k, v in plain.items()}


def test_an_override_of_one_parameter_of_a_layer() -> None:
    got = kinds(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), overrides={"0.bias": "point"})
    assert set(got) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert got["0.bias"] == "point"
    assert got["0.weight"] != "point"
    assert got["1.weight"] == got["1.bias"] == S


def test_the_more_special_of_two_overrides_may_come_last() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    got = kinds(model, overrides={"0": "point", "0.1.bias": "diagonal"})
    assert got == {"0.0.weight": "point", "0.0.bias": "point", "0.1.weight": "point", "0.1.bias": "diagonal"}


# Refusals.


def tied() -> nn.Module:
    model = nn.Module()
    model.encoder, model.decoder = nn.Linear(3, 3), nn.Linear(3, 3)
    model.decoder.weight = model.encoder.weight
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3))


LINEAR = nn.Linear(2, 3)
REFUSALS: dict[str, tuple[Any, dict[str, Any], type[Exception], list[str]]] = {
    "no module": (torch.zeros(3), {}, TypeError, ["model", "nn.Module", "Tensor"]),
    "lazy": (lazy, {}, ValueError, ["'0.weight'", "run the model once"]),
    "tied": (tied, {}, ValueError, ["'encoder.weight'", "'decoder.weight'", "tied"]),
    "bfloat16": (nn.Linear(2, 3).bfloat16(), {}, TypeError, ["'weight'", "torch.bfloat16", "autocast"]),
    "float16": (nn.Linear(2, 3).half(), {}, TypeError, ["'weight'", "torch.float16", "autocast"]),
    "complex": (nn.Linear(2, 3, dtype=torch.complex64), {}, TypeError, ["'weight'", "torch.complex64"]),
    "all frozen": (nn.Linear(2, 3).requires_grad_(False), {}, ValueError, ["nothing to train"]),
    "no parameters": (nn.ReLU(), {}, ValueError, ["nothing to train"]),
    "unknown override": (Scaled(), {"overrides": {"boddy": "point"}}, ValueError, ["overrides", "'boddy'"]),
    "half a name": (Scaled(), {"overrides": {"bod": "point"}}, ValueError, ["overrides", "'bod'"]),
    "unknown kind": (Scaled(), {"overrides": {"body": "kron"}}, ValueError, ["overrides['body']", "'kron'", "'point'"]),
    "unknown others": (Scaled(), {"others": "structured"}, ValueError, ["others", "'structured'", "'diagonal'"]),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize(("model", "options", "error", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_name_the_culprit(
    model: Any, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    model = model() if callable(model) and not isinstance(model, nn.Module) else model
    with pytest.raises(error) as caught:
        assign(model, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_every_optimiser_refuses_alike(method: type) -> None:
    with pytest.raises(ValueError, match="tied"):
        method(tied(), num_data=B, likelihood=en.GaussianLikelihood())


def test_tied_parameters_may_be_frozen() -> None:
    model = tied()
    model.encoder.weight.requires_grad_(False)  # the same tensor in both places
    assert kinds(model) == {"encoder.bias": D, "decoder.bias": D}


def test_float64_and_float32_may_be_mixed() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).double())
    assert set(kinds(model).values()) == {S}


# What print(opt) says.

DESCRIPTIONS = {
    en.NoisyEKFAC: ("Eigen", "Diagonal"),
    en.NoisyKFAC: ("Kronecker", "Diagonal"),
    en.EKFAC: ("Eigen", "Diagonal"),
    en.KFAC: ("Kronecker", "Diagonal"),
    en.NoisyAdam: ("Diagonal", "Diagonal"),
    en.BayesByBackprop: ("factorised Gaussian", "factorised Gaussian"),
}


def lines_of(opt: torch.optim.Optimizer) -> Mapping[str, str]:
    """Parameter name to what repr says of it."""
    first, *rest = repr(opt).splitlines()
    assert first.startswith(f"{type(opt).__name__}(")
    return {line.split()[0]: line for line in rest if not line.startswith("  state:")}


@pytest.mark.parametrize("method", DESCRIPTIONS)
def test_repr_names_every_parameter_with_its_treatment(method: type) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[2].requires_grad_(False)
    opt = method(model, num_data=B, likelihood=en.GaussianLikelihood(), overrides={"1.bias": "point"})
    said = lines_of(opt)
    assert set(said) == {name for name, _ in model.named_parameters()}
    layer, bare = DESCRIPTIONS[method]
    for name in ("0.weight", "0.bias", "3.weight", "3.bias"):
        assert layer in said[name]
        assert "point" not in said[name] or method in (en.EKFAC, en.KFAC)  # these train the mean itself
    assert bare in said["1.weight"]
    assert "point estimate" in said["1.bias"]
    for name in ("2.weight", "2.bias"):
        assert "frozen" in said[name]
    assert "(3, 3)" in said["0.weight"]  # 2 inputs and the bias
    assert re.search(r"num_data=6\b", repr(opt))


# Models of every make train.


class Encoder(nn.Module):
    """A transformer encoder layer with a learned token embedding and position, and a frozen input layer."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(7, 8)
        self.position = nn.Parameter(0.1 * torch.randn(5, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.embed(tokens) + self.position)  # (b, t, 8)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head(self.block(x).mean(1 if self.batch_first else 0))


def cnn() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2, padding=1),
        nn.BatchNorm2d(4, affine=False),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        weight_norm(nn.Linear(4 * 16, 8)),
        nn.ReLU(),
        nn.Linear(8, 3),
    )
    model[3].requires_grad_(False)
    return model


MODELS = {
    "transformer": (lambda: Encoder(True), lambda: torch.randint(7, (B, 5)), 0),
    "transformer sequence-first": (lambda: Encoder(False), lambda: torch.randint(7, (B, 5)), 1),
    "batch-norm CNN": (cnn, lambda: torch.randn(B, 2, 6, 6), 0),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("build", "inputs", "batch_dim"), MODELS.values(), ids=MODELS.keys())
def test_models_train(method: type, build: Any, inputs: Any, batch_dim: int) -> None:
    torch.manual_seed(0)
    model, x, y = build(), inputs(), torch.randint(3, (B,))
    often = {
        en.NoisyEKFAC: {"stats_every": 2, "refresh_every": 2},
        en.NoisyKFAC: {"stats_every": 2, "refresh_every": 2},
        en.NoisyAdam: {"stats_every": 2},
    }
    likelihood = en.CategoricalLikelihood()
    opt = method(model, num_data=50, likelihood=likelihood, batch_dim=batch_dim, **often.get(method, {}))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(STEPS):
        opt.zero_grad()
        with opt.sampled_params():
            likelihood.nll(model(x), y).backward()
        opt.step()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all(), name
        assert torch.equal(p, before[name]) == (name in frozen), name
    assert torch.isfinite(opt.kl()).all()


@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_every_fisher_serves_bare_parameters(fisher: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    likelihood = en.GaussianLikelihood()
    opt = en.NoisyEKFAC(model, num_data=B, likelihood=likelihood, fisher=fisher, stats_every=1, refresh_every=1)
    x, y = torch.randn(B, 3), torch.randn(B, 2)
    for _ in range(STEPS):
        opt.zero_grad()
        with opt.sampled_params():
            likelihood.nll(model(x), y).backward()
        opt.step()
    (norm,) = (slot for slot in opt.slots if slot.name == "1.weight")
    assert norm.fisher.r.shape == (4,)
    assert not torch.equal(norm.fisher.r, torch.ones(4))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def no_ramp(method: type) -> dict[str, int]:
    return {} if method is en.BayesByBackprop else {"noise_ramp": 0}


@pytest.mark.parametrize("method", METHODS)
def test_point_estimates_are_not_sampled(method: type) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    opt = method(
        model,
        num_data=B,
        likelihood=en.GaussianLikelihood(),
        others="point",
        overrides={"2": "point"},
        **no_ramp(method),
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with opt.sampled_params():
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"0.weight", "0.bias"}
    assert set(opt.posterior) == {"0"}
