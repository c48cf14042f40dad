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
    with pytest.raises(ValueError, match="depth must be one of 11, 13, 16, 19, but 17 came"):
        en.models.VGG(17)
    with pytest.raises(ValueError, match="width must be"):
        en.models.VGG16(width=0.0)
    with pytest.raises(ValueError, match="classes must be at least 1"):
        en.models.VGG16(classes=0)


def test_a_transformer_encoder_gives_scores_for_sequences():
    model = en.models.TransformerEncoder(width=8, depth=2, heads=2, classes=3)
    assert model(torch.randn(4, 5, 8)).shape == (4, 3)
    with pytest.raises(ValueError, match="width must be a multiple of heads, but 8 and 3 came"):
        en.models.TransformerEncoder(width=8, heads=3)
