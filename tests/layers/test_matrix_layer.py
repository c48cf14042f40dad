"""Layers as matrices, against autograd and per-example gradients of torch.func."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense import per_example_gradients, to_matrix
from eigenoise.layers.matrix_layer import (
    BareParameter,
    ConvLayer,
    Grouping,
    LinearLayer,
    MatrixLayer,
    StackedLinearLayer,
    as_matrix_layer,
)
from eigenoise.models import StackedLinear

CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64, sums of at most a few hundred terms

B = 3
Case = tuple[Any, ...]  # module class, its arguments, the input's shape, the axis that counts examples or None


def linear(shape: tuple[int, ...], batch_dim: int | None = 0, **options: Any) -> Case:
    return nn.Linear, {"in_features": 4, "out_features": 3, **options}, shape, batch_dim


def conv1d(shape: tuple[int, ...] = (B, 4, 7), batch_dim: int | None = 0, **options: Any) -> Case:
    return nn.Conv1d, {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}, shape, batch_dim


def conv2d(shape: tuple[int, ...] = (B, 4, 6, 5), batch_dim: int | None = 0, **options: Any) -> Case:
    return nn.Conv2d, {"in_channels": 4, "out_channels": 6, "kernel_size": (3, 2), **options}, shape, batch_dim


def stacked(shape: tuple[int, ...], batch_dim: int, **options: Any) -> Case:
    return StackedLinear, {"stack": 2, "in_features": 4, "out_features": 3, **options}, shape, batch_dim


CASES = {
    "linear 1-D": linear((4,), None),
    "linear 2-D": linear((B, 4)),
    "linear 2-D no bias": linear((B, 4), bias=False),
    "linear 3-D": linear((B, 5, 4)),
    "linear 3-D no bias": linear((B, 5, 4), bias=False),
    "linear 4-D": linear((B, 2, 5, 4)),
    "linear 3-D sequence-first": linear((5, B, 4), 1),
    "linear 4-D sequence-first": linear((5, B, 2, 4), 1),
    "conv1d": conv1d(),
    "conv1d no bias": conv1d(bias=False),
    "conv1d stride padding": conv1d(stride=2, padding=1),
    "conv1d same dilation": conv1d(padding="same", dilation=2),
    "conv1d valid": conv1d(padding="valid"),
    "conv1d reflect": conv1d(padding=2, padding_mode="reflect"),
    "conv1d circular even kernel": conv1d(padding="same", padding_mode="circular", kernel_size=4),
    "conv1d groups": conv1d(groups=2, padding=1, dilation=2),
    "conv1d depthwise": conv1d(groups=4, out_channels=4),
    "conv1d unbatched": conv1d((4, 7), None, padding=1),
    "conv1d unbatched circular": conv1d((4, 7), None, padding=1, padding_mode="circular", groups=2),
    "conv2d": conv2d(),
    "conv2d no bias": conv2d(bias=False),
    "conv2d one by one": conv2d(kernel_size=1),
    "conv2d stride": conv2d(stride=(2, 1)),
    "conv2d stride that leaves a rest": conv2d(stride=(4, 3)),
    "conv2d padding": conv2d(padding=(1, 2)),
    "conv2d same": conv2d(padding="same"),
    "conv2d same dilation": conv2d(padding="same", dilation=(2, 1)),
    "conv2d valid": conv2d(padding="valid", stride=2),
    "conv2d reflect": conv2d(padding=(2, 1), padding_mode="reflect"),
    "conv2d reflect same": conv2d(padding="same", padding_mode="reflect", bias=False),
    "conv2d circular": conv2d(padding=(1, 2), padding_mode="circular", stride=2),
    "conv2d replicate": conv2d(padding=1, padding_mode="replicate"),
    "conv2d dilation": conv2d(dilation=(2, 3)),
    "conv2d groups": conv2d(groups=2, padding=1),
    "conv2d groups no bias": conv2d(groups=2, bias=False, stride=2),
    "conv2d depthwise": conv2d(groups=4, out_channels=8, padding_mode="circular", padding=1),
    "conv2d unbatched": conv2d((4, 6, 5), None, stride=2, padding=1),
    "conv2d unbatched groups": conv2d((4, 6, 5), None, groups=2, padding="same"),
    "stacked (s, b, n)": stacked((2, B, 4), 1),
    "stacked (s, b, n) no bias": stacked((2, B, 4), 1, bias=False),
    "stacked (b, n)": stacked((B, 4), 0),
}
KINDS = {nn.Linear: LinearLayer, nn.Conv1d: ConvLayer, nn.Conv2d: ConvLayer, StackedLinear: StackedLinearLayer}
# torch's own remark on an even kernel, whose "same" padding is uneven; that is the case we want
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def build(case: Case) -> tuple[Any, MatrixLayer, Tensor, int | None]:
    """Module, its matrix layer, an input and the axis that counts the input's examples."""
    kind, options, shape, batch_dim = case
    torch.manual_seed(0)
    module = kind(**options).double()
    layer = as_matrix_layer("some.layer", module)
    assert isinstance(layer, MatrixLayer)
    return module, layer, torch.randn(shape, dtype=torch.float64), batch_dim


def parameters_of(module: Any) -> list[nn.Parameter]:
    return [p for p in (module.weight, module.bias) if p is not None and p.requires_grad]


@case
def test_kind_names_and_shape(case: Case) -> None:
    module, layer, _, _ = build(case)
    assert type(layer) is KINDS[type(module)]
    assert layer.name == "some.layer"
    assert layer.param_names == ["some.layer.weight", "some.layer.bias"][: 1 + (module.bias is not None)]
    assert [id(p) for p in layer.params] == [id(p) for p in parameters_of(module)]
    assert layer.shape == tuple(to_matrix(module, *parameters_of(module)).shape)
    assert layer.stack == (module.stack if isinstance(module, StackedLinear) else None)


@case
def test_views_round_trip_and_share_memory(case: Case) -> None:
    module, layer, _, _ = build(case)
    matrix = torch.zeros(layer.shape, dtype=torch.float64)
    views = layer.views(matrix)
    assert [v.shape for v in views] == [p.shape for p in layer.params]
    for view, param in zip(views, layer.params, strict=True):
        assert view.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
        view.copy_(param.detach())
    torch.testing.assert_close(matrix, to_matrix(module, *parameters_of(module)).detach(), rtol=0, atol=0)
    matrix.mul_(2)
    for view, param in zip(views, layer.params, strict=True):
        torch.testing.assert_close(view, 2 * param.detach(), rtol=0, atol=0)


@case
def test_products_sum_to_autograd(case: Case) -> None:
    module, layer, x, batch_dim = build(case)
    output = module(x)
    cotangent = torch.randn_like(output)
    wanted = to_matrix(module, *torch.autograd.grad(output, parameters_of(module), cotangent))
    a, g = layer.rows(x, batch_dim), layer.gradient_rows(cotangent, batch_dim)
    *lead, p, n = layer.shape
    assert a.shape == (*lead, *a.shape[-3:-1], n)
    assert g.shape == (*lead, *a.shape[-3:-1], p)
    torch.testing.assert_close((g.mT @ a).sum(-3), wanted, **CLOSE)


@case
def test_sums_over_positions_are_per_example_gradients(case: Case) -> None:
    module, layer, x, batch_dim = build(case)
    cotangent = torch.randn_like(module(x))
    a, g = layer.rows(x, batch_dim), layer.gradient_rows(cotangent, batch_dim)
    got = (g.mT @ a).movedim(-3, 0)  # (b, ..., p, n)
    if batch_dim is None:  # one example without a batch axis
        x, cotangent, batch_dim = x.unsqueeze(0), cotangent.unsqueeze(0), 0
    if isinstance(module, StackedLinear) and x.ndim == 2:
        x, batch_dim = x.expand(module.stack, *x.shape), 1
    grads = per_example_gradients(module, lambda f, y: (f * y).sum(), x, cotangent, batch_dim)
    wanted = to_matrix(module, *grads.values())
    assert got.shape[0] == x.shape[batch_dim]
    torch.testing.assert_close(got, wanted, **CLOSE)


@case
def test_frozen_bias_has_no_column(case: Case) -> None:
    kind, options, *rest = case
    module, layer, x, batch_dim = build((kind, {**options, "bias": True}, *rest))
    with_bias = layer.shape
    module.bias.requires_grad_(False)
    frozen = as_matrix_layer("some.layer", module)
    assert frozen is not None
    assert frozen.shape == (*with_bias[:-1], with_bias[-1] - 1)
    assert frozen.param_names == ["some.layer.weight"]
    assert len(frozen.params) == len(frozen.views(torch.zeros(frozen.shape))) == 1
    torch.testing.assert_close(frozen.rows(x, batch_dim), layer.rows(x, batch_dim)[..., :-1], rtol=0, atol=0)
    output = module(x)
    cotangent = torch.randn_like(output)
    wanted = to_matrix(module, *torch.autograd.grad(output, [module.weight], cotangent))
    got = (frozen.gradient_rows(cotangent, batch_dim).mT @ frozen.rows(x, batch_dim)).sum(-3)
    torch.testing.assert_close(got, wanted, **CLOSE)


def test_the_bias_column_is_the_last() -> None:
    _, layer, x, _ = build(CASES["conv2d groups"])
    a = layer.rows(x, 0)
    torch.testing.assert_close(a[..., -1], torch.ones_like(a[..., -1]), rtol=0, atol=0)
    matrix = torch.zeros(layer.shape)
    matrix[..., -1] = 1
    weight, bias = layer.views(matrix)
    assert not weight.any()
    assert bias.all()


def test_a_root_module_names_its_parameters_without_a_dot() -> None:
    layer = as_matrix_layer("", nn.Linear(2, 3))
    assert layer is not None
    assert layer.param_names == ["weight", "bias"]


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class NamedLinear(nn.Linear):
    """Computes what Linear does."""


class StandardisedConv(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight / weight.std(), bias)


class StackedRelu(StackedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize(
    "module",
    [
        ScaledLinear(2, 3),
        StandardisedConv(2, 3, 2),
        StackedRelu(2, 2, 3),
        nn.Bilinear(2, 2, 3),
        nn.Conv3d(2, 3, 2),
        nn.ConvTranspose1d(2, 3, 2),
        nn.ConvTranspose2d(2, 3, 2),
        nn.LayerNorm(3),
        nn.BatchNorm1d(3),
        nn.Embedding(5, 3),
        nn.LSTM(2, 3),
        nn.ReLU(),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
        nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        nn.Linear(2, 3).requires_grad_(False),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_matrix_layer(module: nn.Module) -> None:
    assert as_matrix_layer("module", module) is None


def test_a_subclass_that_computes_the_same_is_one() -> None:
    assert isinstance(as_matrix_layer("module", NamedLinear(2, 3)), LinearLayer)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_a_bare_parameter_is_its_own_matrix(shape: tuple[int, ...]) -> None:
    param = nn.Parameter(torch.randn(shape))
    bare = BareParameter("scale", param)
    matrix = torch.zeros(bare.shape)
    (view,) = bare.views(matrix)
    view.copy_(param.detach())
    assert bare.params[0] is param
    assert bare.param_names == ["scale"]
    assert bare.stack is None
    torch.testing.assert_close(matrix, param.detach(), rtol=0, atol=0)


# Which rows belong to which example.


def grouped(way: Grouping, examples: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers that count the rows of an input, as ``activations`` groups them."""
    layer = as_matrix_layer("", nn.Linear(1, 1, bias=False))
    numbers = torch.arange(float(torch.Size(shape).numel())).reshape(*shape, 1)
    assert layer is not None
    for start, stop in ((0, examples), (1, 2)):
        part = layer.narrow(numbers, examples, way, start, stop)
        whole = layer.activations(numbers, examples, way)[start:stop]
        torch.testing.assert_close(layer.activations(part, stop - start, way), whole, rtol=0, atol=0)
        torch.testing.assert_close(layer.gradients(part, stop - start, way), whole, rtol=0, atol=0)
    return layer.activations(numbers, examples, way).squeeze(-1)


@pytest.mark.parametrize(
    ("shape", "way", "rows"),
    [
        ((2,), Grouping(0), [[0], [1]]),
        ((4,), Grouping(0), [[0, 1], [2, 3]]),
        ((4,), Grouping(0, inner=True), [[0, 2], [1, 3]]),
        ((2, 3), Grouping(0), [[0, 1, 2], [3, 4, 5]]),
        ((3, 2), Grouping(1), [[0, 2, 4], [1, 3, 5]]),
        ((3, 4), Grouping(1), [[0, 4, 8, 1, 5, 9], [2, 6, 10, 3, 7, 11]]),
        ((3, 4), Grouping(1, inner=True), [[0, 4, 8, 2, 6, 10], [1, 5, 9, 3, 7, 11]]),
        ((2, 3), Grouping(None), [[0, 1, 2], [3, 4, 5]]),
        ((2, 3), Grouping(None, inner=True), [[0, 2, 4], [1, 3, 5]]),
    ],
)
def test_rows_are_grouped_by_examples(shape, way, rows) -> None:
    got = grouped(way, 2, shape)
    assert [sorted(row) for row in got.tolist()] == [sorted(row) for row in rows]


def test_all_ways_that_sizes_allow_are_offered() -> None:
    layer = as_matrix_layer("", nn.Linear(2, 2))
    assert layer is not None
    assert layer.groupings(torch.zeros(4, 2), 4) == [Grouping(0)]
    assert layer.groupings(torch.zeros(8, 2), 4) == [Grouping(0), Grouping(0, inner=True)]
    assert layer.groupings(torch.zeros(5, 4, 2), 4) == [
        Grouping(1), Grouping(None), Grouping(None, inner=True),
    ]  # fmt: skip
    assert layer.groupings(torch.zeros(7, 2), 4) == []
    assert layer.groupings(torch.zeros(2), 1) == []
    conv = as_matrix_layer("", nn.Conv2d(2, 2, 1))
    assert conv is not None
    assert conv.groupings(torch.zeros(8, 2, 3, 3), 4) == [Grouping(0), Grouping(0, inner=True)]
    assert conv.groupings(torch.zeros(2, 3, 3), 4) == []


def test_without_a_grouping_all_rows_are_one_example() -> None:
    layer = as_matrix_layer("", nn.Linear(2, 3))
    assert layer is not None
    assert layer.activations(torch.zeros(4, 5, 2), 4, None).shape == (1, 20, 3)
    assert layer.gradients(torch.zeros(4, 5, 3), 4, None).shape == (1, 20, 3)
