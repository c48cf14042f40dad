"""The Monte Carlo predictive: a mixture over weight samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from eigenoise import checks
from eigenoise.likelihoods import Likelihood
from eigenoise.posterior import Posterior
from eigenoise.swap import evaluating
from eigenoise.variational import VariationalOptimizer


def predict(
    model: nn.Module,
    source: VariationalOptimizer | Posterior,
    x: Tensor,
    *,
    samples: int = 32,
    likelihood: Likelihood | None = None,
    chunk_size: int = 1024,
    generator: torch.Generator | None = None,
) -> Distribution:
    """p(y | x, D) ≈ (1/k) Σ p(y | f_w(x)), w ~ q.

    The model is put into evaluation mode for the while; gradients, training mode and random number generators are left
    as they were.

    Args:
        model: the trained model.
        source: its optimiser, or a ``Posterior``, for instance a loaded one.
        x: inputs ``(b, ...)``, or ``(s, b, ...)`` for a stack of models.
        samples: k, the number of weight samples.
        likelihood: what the outputs mean; by default the one that ``source`` carries.
        chunk_size: inputs that go through the model at once.
        generator: of the samples; by default a fresh one with a fixed seed, so that equal calls give equal results.

    Returns:
        A distribution over targets with ``mean``, ``stddev`` and its parts ``noise_stddev`` and ``weights_stddev``,
        ``log_prob``, ``sample``, and ``quantile`` and ``interval`` or ``probs`` and ``entropy``.

    Raises:
        ValueError: if sizes do not fit or ``x`` is empty.
        TypeError: if an argument is of the wrong kind.
    """
    checks.integer("samples", samples)
    checks.integer("chunk_size", chunk_size)
    if not isinstance(source, (VariationalOptimizer, Posterior)):
        raise TypeError(f"source must be an optimiser of eigenoise or a Posterior, but a {type(source).__name__} came")
    if isinstance(source, VariationalOptimizer) and source.model is not model:
        raise ValueError("model must be the one that the optimiser trains; for another pass optimizer.posterior")
    likelihood = likelihood or source.likelihood
    if likelihood is None:
        raise ValueError("this posterior carries no likelihood: pass likelihood=")
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, but a {type(x).__name__} came; use torch.as_tensor(x)")
    out_axis = 0 if likelihood.stack is None else 1
    axis = out_axis if x.ndim > 2 else 0
    if x.ndim == 0 or x.shape[axis] == 0:
        raise ValueError(f"x must hold at least one input, but its shape is {tuple(x.shape)}")
    device = next(model.parameters()).device
    generator = generator or torch.Generator(device).manual_seed(0)

    around: AbstractContextManager = nullcontext()
    block: Callable[[], AbstractContextManager]
    if isinstance(source, Posterior):
        posterior = source
        around = posterior.installed(model)
        block = lambda: posterior.sampled_params(model, generator)  # noqa: E731
    else:
        optimizer = source
        block = lambda: optimizer.sampled_params(generator)  # noqa: E731
    outputs = []
    with evaluating(model), torch.no_grad(), around:
        for _ in range(samples):
            with block():
                outputs.append(torch.cat([_output(model, part) for part in x.split(chunk_size, axis)], out_axis))
    return likelihood.predictive(torch.stack(outputs), generator)


def _output(model: nn.Module, x: Tensor) -> Tensor:
    f = model(x)
    if f.ndim < 2:
        raise ValueError(
            f"the model's output must have a batch axis and a target axis, but {tuple(f.shape)} came for inputs "
            f"{tuple(x.shape)}; give x a batch axis with x.unsqueeze(0), or the output a target axis"
        )
    return f
