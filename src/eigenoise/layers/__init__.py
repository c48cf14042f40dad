"""How layers are matrices, how their activations and output gradients are captured, and which layer gets what."""
