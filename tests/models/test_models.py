"""The networks: shapes, sizes and bad arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eigenoise as en


@pytest.mark.parametrize(
    ("make", "convolutions"),
    [(en.models.VGG11, 8), (en.models.VGG13, 10), (en.models.VGG16, 13), (en.models.VGG19, 16)],
)
@pytest.mark.parametrize("batch_norm", [True, False])
def test_vgg_has_the_papers_layers(make, convolutions, batch_norm):
    model = make(width=0.5, batch_norm=batch_norm)
    convs = [m for m in model if isinstance(m, nn.Conv2d)]
    assert len(convs) == convolutions
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model) == (convolutions if batch_norm else 0)
    assert all((m.bias is None) == batch_norm for m in convs)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_vgg16_has_the_papers_widths():
    widths = [m.out_channels for m in en.models.VGG16() if isinstance(m, nn.Conv2d)]
    assert widths == [32, 32, 64, 64, 128, 128, 128, 256, 256, 256, 256, 256, 256]


def test_vgg_refuses_what_it_cannot_be():
    with pytest.raises(ValueError, match="depth must be one of 11, 13, 16, 19, got 17"):
        en.models.VGG(17)
    with pytest.raises(ValueError, match="width must be"):
        en.models.VGG16(width=0.0)
    with pytest.raises(ValueError, match="classes must be at least 1"):
        en.models.VGG16(classes=0)


def test_resnet20_has_as_many_weights_as_its_authors_say():
    model = en.models.ResNet20()
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 19
    assert 0.26e6 < sum(p.numel() for p in model.parameters()) < 0.28e6  # "0.27M"
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    features = model[:-3](torch.randn(1, 3, 32, 32))
    assert features.shape == (1, 64, 8, 8)
    assert en.models.ResNet20(width=0.25, in_channels=1, classes=3)(torch.randn(2, 1, 32, 32)).shape == (2, 3)
    with pytest.raises(ValueError, match="width must be"):
        en.models.ResNet20(width=-1.0)


def test_a_resnet_trains():
    model, likelihood = en.models.ResNet20(width=0.125), en.CategoricalLikelihood()
    opt = en.NoisyEKFAC(model, num_data=64, likelihood=likelihood, stats_every=2, refresh_every=4, lr=0.02)
    x, y = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    losses = []
    for _ in range(12):
        with opt.sampled_params():
            opt.zero_grad()
            loss = likelihood.nll(model(x), y)
            loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_a_transformer_encoder_gives_scores_for_sequences():
    model = en.models.TransformerEncoder(width=8, depth=2, heads=2, classes=3)
    assert model(torch.randn(4, 5, 8)).shape == (4, 3)
    with pytest.raises(ValueError, match="width must be a multiple of heads, got width 8 and 3 heads"):
        en.models.TransformerEncoder(width=8, heads=3)


@pytest.mark.parametrize(
    "model", [en.models.MLP(3, [4, 5], 2), en.models.VGG11(width=0.1), en.models.TransformerEncoder(width=8, depth=2)]
)
def test_a_slice_of_a_network_is_a_network(model):
    part = model[1:]
    assert type(part) is nn.Sequential
    assert list(part) == list(model)[1:]
    assert model[0] is next(iter(model))
