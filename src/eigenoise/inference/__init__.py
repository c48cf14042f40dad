"""The posterior over a model's weights and what is asked of it: predictions, the ELBO, metrics."""
