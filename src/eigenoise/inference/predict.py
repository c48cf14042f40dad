"""The Monte Carlo predictive: a mixture over weight samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from eigenoise import checks
from eigenoise.distributions.mixtures import Predictive
from eigenoise.inference.batch_norm import RUNNING, inputs_of, settling
from eigenoise.inference.forward import evaluating
from eigenoise.inference.posterior import Posterior
from eigenoise.inference.turns import PATIENCE, exclusive
from eigenoise.likelihoods import Likelihood
from eigenoise.likelihoods.base import at_least_float32
from eigenoise.parallel.ddp import unwrapped


@runtime_checkable
class WeightSampler(Protocol):
    """What ``predict`` needs of an optimiser."""

    model: nn.Module
    likelihood: Likelihood
    batch_dim: int
    noisy: bool  # whether weights are sampled in training
    parallel: int | None  # weight samples in one block, or None for one

    def sampled_params(self, generator: torch.Generator | None = None) -> AbstractContextManager[None]:
        """A block within which the model holds weights W ~ q."""


def predict(
    model: nn.Module,
    source: WeightSampler | Posterior,
    x: Tensor | Iterable[Any],
    *,
    samples: int = 32,
    likelihood: Likelihood | None = None,
    chunk_size: int = 1024,
    batch_norm: Tensor | Iterable[Any] | str | None = None,
    generator: torch.Generator | None = None,
) -> Predictive:
    """p(y | x, D) ≈ (1/k) Σ p(y | f_w(x)), w ~ q.

    ``KFAC`` and ``EKFAC`` train without noise and predict with the mean; pass their ``posterior`` for the Laplace
    approximation around it, which is often too wide for a network that never saw noise.

    The model is put into evaluation mode for the while; gradients, training mode and random number generators are left
    as they were.

    Args:
        model: the trained model.
        source: its optimiser, or a ``Posterior``, for instance a loaded one.
        x: inputs ``(b, ...)``, or ``(s, b, ...)`` for a stack of models; the optimiser's ``batch_dim`` says where the
            batch is in a sequence. Or an iterable of batches, such as a ``DataLoader``, each a tensor or a tuple that
            begins with it; it is run through once.
        samples: k, the number of weight samples.
        likelihood: what the outputs mean; by default the one that ``source`` carries.
        chunk_size: inputs that go through the model at once.
        batch_norm: training batches, such as the training loader, to recompute batch norm's averages from for each
            weight sample (the first 8 are used); ``"running"`` uses the running averages as they are, which mix many
            samples. None: what ``Posterior.settle_batch_norm`` kept, else the running averages with a warning.
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
    model, _ = unwrapped(model)
    if not isinstance(source, (WeightSampler, Posterior)):
        raise TypeError(f"source must be an optimiser of eigenoise or a Posterior, got {type(source).__name__}")
    if isinstance(source, WeightSampler) and source.model is not model:
        raise ValueError("model must be the one that the optimiser trains; for another pass optimizer.posterior")
    likelihood = likelihood or source.likelihood
    if likelihood is None:
        raise ValueError("this posterior carries no likelihood: pass likelihood=")
    parallel = source.parallel if isinstance(source, WeightSampler) else None
    batches = inputs_of("x", x)
    axis = _batch_axis(source, likelihood, batches[0])
    chunks = [chunk for batch in batches for chunk in _chunks(batch, chunk_size, axis)]
    device = next(model.parameters()).device
    kept = source.batch_norm if isinstance(source, Posterior) and batch_norm is None else None
    if kept is not None:
        kept.check(samples, generator)
        batch_norm, generator = RUNNING, kept.generator()
    generator = generator or torch.Generator(device).manual_seed(0)
    noisy = isinstance(source, Posterior) or source.noisy

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
    settled = settling(model, batch_norm, noisy)
    with exclusive(model, PATIENCE), evaluating(model), torch.no_grad(), around, settled as settle:
        for i in range(-(-samples // (parallel or 1))):
            with block():
                settle() if kept is None else kept.write(model, i)
                parts = [_output(model, chunk.to(device)) for chunk in chunks]
            # A stack's output has its batch last but one; a sequence-first model's may be pooled to (b, d).
            out_axis = -2 if likelihood.stack is not None else min(axis, parts[0].ndim - 2)
            outputs.append(torch.cat(parts, out_axis))
    f = torch.stack(outputs) if parallel is None else torch.cat(outputs)
    return likelihood.predictive(at_least_float32(f[:samples]), generator)


def _batch_axis(source: WeightSampler | Posterior, likelihood: Likelihood, x: Tensor) -> int:
    if likelihood.stack is not None:
        return x.ndim - 2
    batch_dim = source.batch_dim if isinstance(source, WeightSampler) else 0
    return batch_dim if x.ndim > 2 else 0


def _chunks(x: Tensor, chunk_size: int, axis: int) -> tuple[Tensor, ...]:
    if x.ndim == 0 or x.shape[axis] == 0:
        raise ValueError(f"x must hold at least one input, got the shape {tuple(x.shape)}")
    return x.split(chunk_size, axis)


def _output(model: nn.Module, x: Tensor) -> Tensor:
    f = model(x)
    if not isinstance(f, Tensor):
        raise TypeError(
            f"the model's output must be a tensor, got {type(f).__name__}: wrap the model in a module that takes one "
            "tensor and returns the logits or means"
        )
    if f.ndim < 2:
        raise ValueError(
            f"the model's output must have a batch axis and a target axis, got {tuple(f.shape)} for inputs "
            f"{tuple(x.shape)}; give x a batch axis with x.unsqueeze(0), or the output a target axis"
        )
    return f
