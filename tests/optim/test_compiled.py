"""Compiled models train as eager ones do."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import eigenoise as en

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, while it compiles
]


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(way, method):
    model = network()
    called = torch.compile(model) if way == "torch.compile" else model
    if way == "model.compile":
        model.compile(backend="aot_eager")  # the other way goes through the machine's own compiler
    generator = torch.Generator().manual_seed(2)
    opt = method(called, num_data=50, likelihood="classification", stats_every=3, refresh_every=6, generator=generator)
    x, y = torch.randn(20, 5, generator=torch.Generator().manual_seed(3)), torch.arange(20) % 3
    for _ in range(8):
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(called(x), y).backward()
        opt.step()
    predicted = en.predict(called, opt, x, samples=3).probs
    return [*(p.detach().clone() for p in network_of(called).parameters()), predicted]


def network_of(model):
    return getattr(model, "_orig_mod", model)


@pytest.mark.parametrize("way", ["torch.compile", "model.compile"])
def test_a_compiled_model_trains_as_an_eager_one(way):
    for ours, theirs in zip(trained(way, en.NoisyEKFAC), trained("eager", en.NoisyEKFAC), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
