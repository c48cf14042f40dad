"""Networks: MLPs, single or stacked, VGG and ResNet for small images, a transformer encoder."""

from eigenoise.models.encoder import TransformerEncoder
from eigenoise.models.mlp import MLP
from eigenoise.models.resnet import ResNet20
from eigenoise.models.stacked import SampledLinear, StackedLinear
from eigenoise.models.vgg import VGG, VGG11, VGG13, VGG16, VGG19

__all__ = [
    "MLP",
    "VGG",
    "VGG11",
    "VGG13",
    "VGG16",
    "VGG19",
    "ResNet20",
    "SampledLinear",
    "StackedLinear",
    "TransformerEncoder",
]
