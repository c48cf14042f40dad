"""Networks: multilayer perceptrons, alone or in a stack, and VGG for small images."""

from eigenoise.models.mlp import MLP
from eigenoise.models.stacked import SampledLinear, StackedLinear
from eigenoise.models.vgg import VGG, VGG11, VGG13, VGG16, VGG19

__all__ = ["MLP", "VGG", "VGG11", "VGG13", "VGG16", "VGG19", "SampledLinear", "StackedLinear"]
