"""Networks nobody thought of: random layers, shapes, batches and dtypes against dense autodiff Fishers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import dense
import eigenoise as en

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
CLOSE = {torch.float64: {"rtol": 1e-7, "atol": 1e-10}, torch.float32: {"rtol": 2e-3, "atol": 1e-5}}
found = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def convolutions(draw):
    """A convolution of one or two dimensions with whatever torch knows, and the shape of its input."""
    dims = draw(st.integers(1, 2))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    into, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(dims))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding = tuple(draw(st.integers(0, 2)) for _ in range(dims))
    if draw(st.integers(0, 4)) == 0 and stride == (1,) * dims:
        padding = "same"
    size = tuple(draw(st.integers(d * (k - 1) + 2, 7)) for k, d in zip(kernel, dilation, strict=True))
    kind = nn.Conv1d if dims == 1 else nn.Conv2d
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": mode}
    return kind(into, out, kernel, bias=draw(st.booleans()), **options), (into, *size)


@st.composite
def networks(draw):
    """A convolution or Linear layer, an activation, and a Linear layer; with an input."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    batch, outputs = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        first, shape = draw(convolutions())
    else:
        first, shape = nn.Linear(width := draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.booleans())), None
        shape = (*(draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))), width)
    activation = draw(st.sampled_from([nn.Tanh(), nn.SiLU(), nn.ReLU(inplace=True), nn.Identity()]))
    first = first.to(dtype)
    x = torch.randn(batch, *shape, dtype=dtype)
    with torch.no_grad():
        size = first(x)[0].numel()
    model = nn.Sequential(first, activation, nn.Flatten(), nn.Linear(size, outputs, draw(st.booleans())))
    return model.to(dtype), x, torch.randn(batch, outputs, dtype=dtype)


def step(opt, x, y):
    opt.zero_grad()
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(x), y).backward()
    opt.step()


@found
@given(networks())
def test_r_is_the_diagonal_of_the_exact_fisher_in_the_basis(problem):
    model, x, y = problem
    likelihood = en.GaussianLikelihood(precision=1.7)
    options = {"stats_every": 1, "refresh_every": 2, "ema_factors": 1.0, "ema_scale": 1.0, "init": 1.0}
    opt = en.EKFAC(model, num_data=9, likelihood=likelihood, lr=0.0, fisher="exact", **options)
    for _ in range(2):  # the second is taken in the basis that the first found
        step(opt, x, y)
    for slot in opt.slots:
        block = dense.fisher_block(model, slot.name, x, lambda f: dense.gaussian_fisher(f, 1.7))
        factors = slot.fisher.factors
        wanted = dense.diagonal_in_basis(block, factors.q_out, factors.q_in)
        torch.testing.assert_close(slot.fisher.R, wanted.reshape(slot.fisher.R.shape), **CLOSE[x.dtype])


@found
@given(networks(), st.sampled_from([en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam, en.BayesByBackprop]))
def test_a_block_leaves_the_mean_and_a_step_moves_it_to_finite_places(problem, method):
    model, x, y = problem
    opt = method(model, num_data=9, likelihood=en.GaussianLikelihood())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with opt.sampled_params():
        model(x)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    for _ in range(3):
        step(opt, x, y)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert torch.isfinite(opt.kl()).all()
    again = method(model, num_data=9, likelihood=en.GaussianLikelihood())
    again.load_state_dict(opt.state_dict())
    torch.testing.assert_close(again.kl(), opt.kl(), rtol=1e-4, atol=1e-6)
    assert en.predict(model, opt, x, samples=3).mean.shape == y.shape
