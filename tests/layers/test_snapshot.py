"""A model that is no longer the one that an optimiser was built for is refused, whatever was done to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import eigenoise as en


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 2))
    model[2][0].bias.requires_grad_(False)
    return model


def replace_layer(model):
    model[0] = nn.Linear(3, 5)


def replace_inner_layer(model):
    model[2][0] = nn.Linear(5, 5)


def add_layer(model):
    model[2].append(nn.Linear(5, 5))


def remove_layer(model):
    del model[2]


def replace_parameter(model):
    model[3].weight = nn.Parameter(torch.zeros(2, 5))


def add_parameter(model):
    model[0].register_parameter("scale", nn.Parameter(torch.ones(5)))


def freeze(model):
    model[0].weight.requires_grad_(False)


def unfreeze(model):
    model[2][0].bias.requires_grad_(True)


def cast(model):
    model.float() if torch.get_default_dtype() == torch.float64 else model.double()


def assign_state(model):
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


CHANGES = {
    replace_layer: "'0' was replaced",
    replace_inner_layer: "'2.0' was replaced",
    add_layer: "'2' was added|'1' was added|'2.2' was added",
    remove_layer: "'2' was (replaced|removed)",
    replace_parameter: "'3.weight' was replaced",
    add_parameter: "'scale' was added",
    freeze: "'0.weight' was frozen",
    unfreeze: "'2.0.bias' was unfrozen",
    cast: "when the optimiser was built, got",
    assign_state: "was replaced",
    lambda model: prune.l1_unstructured(model[0], "weight", 0.5): "'0.weight' was removed",
    lambda model: parametrizations.weight_norm(model[0]): "'0.weight' was removed",
}


@pytest.mark.parametrize("what", ["train", "step", "predict", "posterior", "kl"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused(change, what):
    model = network()
    opt = en.NoisyEKFAC(model, num_data=20, likelihood="classification")
    x, y = torch.randn(8, 3), torch.randint(2, (8,))

    def train():
        with opt.sampled_params():
            opt.likelihood.nll(model(x), y).backward()

    train()
    if what != "step":
        opt.step()
    change(model)
    calls = {
        "train": train,
        "step": opt.step,
        "predict": lambda: opt.predict(x),
        "posterior": lambda: opt.posterior,
        "kl": opt.kl,
    }
    with pytest.raises(RuntimeError, match=rf"({CHANGES[change]}).*build a new optimiser"):
        calls[what]()


def test_what_leaves_the_parameters_alone_is_no_change():
    model = network()
    opt = en.NoisyEKFAC(model, num_data=20, likelihood="classification")
    model.register_forward_hook(lambda *_: None)
    model.register_buffer("seen", torch.zeros(()))
    model.load_state_dict(model.state_dict())
    model.eval().train()
    with torch.no_grad():
        model[0].weight.clamp_(-1, 1)
        model[0].weight.data = model[0].weight.data.clone()
    opt.predict(torch.randn(4, 3))
