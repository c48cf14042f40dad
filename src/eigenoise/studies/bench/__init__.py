"""What a training step costs, as a ratio to SGD with momentum on the same model in the same run."""
