"""How all Bayesian optimisers step: blocks of sampled weights, gradients gathered in them, one move of the mean.

``SamplingOptimizer`` keeps the books; a subclass says how noise is drawn and how a step is made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eigenoise import checks
from eigenoise.layers.assignment import Treatment, treat
from eigenoise.likelihoods import Likelihood
from eigenoise.linalg.kronecker import full_precision
from eigenoise.optim.blocks import Blocks
from eigenoise.optim.finite import Skips, what_is_not
from eigenoise.optim.losses import RunningLoss
from eigenoise.optim.weight_swap import Slot
from eigenoise.parallel.ddp import refuse_wrapping_later, unwrapped
from eigenoise.parallel.lockstep import Lockstep
from eigenoise.parallel.ranks import Ranks


class SamplingOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` over a model whose weights are random.

    Args:
        model: any ``nn.Module``. Wrapped in ``DistributedDataParallel``, each process draws noise of its own, and all
            make the same step from what all have seen.
        num_data: N, the number of likelihood terms in the training set, of all processes together.
        likelihood: what the model's output means; its ``nll`` is the loss.
        hyper: hyperparameters that schedules may change, put into ``param_groups``.
        samples: weight samples in one step: so many ``sampled_params()`` blocks come before each ``step()``, each with
            the loss of the whole batch, and ``step()`` takes their mean.
        parallel: draw all samples of a step in one block, as one more leading axis in front of the stack; for models
            of ``StackedLinear`` layers alone.
        antithetic: every second sample of a step mirrors the one before.
        others: what parameters outside Linear and convolution layers get: ``"diagonal"``, a diagonal posterior, or
            ``"point"``, a point estimate.
        overrides: the same choice for a module's or parameter's name and everything below it.
        batch_dim: the axis of a Linear's input that counts examples, 1 for sequence-first models.
        generator: source of all noise; by default one seeded from torch's global generator. With several processes it
            is seeded anew at every step, from the first one's seed and for each process differently.
        not_finite: what ``step`` does when the loss, a gradient or a statistic is NaN or infinite: ``"raise"``, or
            ``"skip"`` the step, warn once and count it in ``skipped``; 20 in a row are an error all the same. Running
            averages of batch norm have seen the batch all the same; ``settle_batch_norm`` takes them anew.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_data: int,
        likelihood: Likelihood,
        hyper: Mapping[str, Any],
        samples: int = 1,
        parallel: bool = False,
        antithetic: bool = False,
        others: str = "diagonal",
        overrides: Mapping[str, str] | None = None,
        batch_dim: int = 0,
        generator: torch.Generator | None = None,
        not_finite: str = "raise",
    ):
        self.skips = Skips(not_finite)
        if not isinstance(likelihood, Likelihood):
            raise TypeError(
                f"likelihood must be one of eigenoise's likelihoods, but a {type(likelihood).__name__} came; "
                "for instance eigenoise.GaussianLikelihood()"
            )
        self.samples = checks.integer("samples", samples)
        if antithetic and samples % 2:
            raise ValueError(f"antithetic samples come in pairs: samples must be even, but {samples} came")
        hyper = {"num_data": num_data, **hyper}
        hyper = {key: value.item() if isinstance(value, np.generic) else value for key, value in hyper.items()}
        self._check_hyper(hyper)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, but a {type(generator).__name__} came")
        bare = model
        model, self.ranks = unwrapped(model)
        treatments = treat(model, others, overrides, batch_dim)
        self.model = model
        self.likelihood = likelihood
        self.batch_dim = batch_dim
        self.treatments = {t.layer.name: t for t in treatments}
        self.parallel = self.samples if parallel else None
        self.slots: list[Any] = [self._make_slot(t) for t in treatments]
        self.blocks_per_step = 1 if parallel else self.samples
        self.blocks = Blocks(self.slots, antithetic, self.parallel)
        self.params = self.blocks.swap.params
        device = self.params[0].device
        if generator is not None and generator.device.type != device.type:
            raise ValueError(f"generator must be on the model's device, {device}, but it is on {generator.device}")
        self.generator = generator or torch.Generator(device).manual_seed(int(torch.randint(2**62, ())))
        self.steps = 0
        self.lockstep = Lockstep(self.ranks, self.generator)
        self._in_closure = False
        self._checked: list[Any] = []  # hyperparameters known to be good
        self._losses: list[Tensor] = []  # backpropagated since the last step
        self.losses = RunningLoss(likelihood.stack or 1)
        super().__init__(self._group_params(), dict(hyper))
        self._closed = False
        if bare is model:
            refuse_wrapping_later(model, self.blocks)

    @property
    def skipped(self) -> int:
        """Steps that were not made because a number was not finite."""
        return self.skips.count

    # What a subclass says.

    noisy: bool  # whether weights are sampled in training

    @abstractmethod
    def _make_slot(self, treatment: Treatment) -> Slot:
        """The slot, with whatever state the method keeps, for one entry."""

    @abstractmethod
    def _draw(self, generator: torch.Generator, training: bool) -> None:
        """Fill every slot's ``sample`` from its ``mean``, in a block that may be for ``training`` or cannot be."""

    @abstractmethod
    def _apply(self, loss: Tensor) -> None:
        """Make the step: move every slot's ``mean``, which ``step`` has read and will write back.

        It must call ``_stop_at_nan`` before it changes anything if ``loss`` or a gradient is not finite.
        """

    def _group_params(self) -> list[Tensor]:
        return list(self.params)

    def _share(self, ranks: Ranks) -> list[Tensor]:
        """Tensors of this rank that all ranks are to have the mean of before the step."""
        return []

    def _begin_block(self, generator: torch.Generator) -> None:
        """A training or prediction block begins; the samples, drawn from ``generator``, are in the model."""

    def _end_block(self, trained: bool) -> None:
        """The block ends; the mean is back in the model."""

    def _on_loss(self, f: Tensor) -> Callable[[Tensor], None] | None:
        """A training loss was computed; what to do when it is backpropagated, given its gradient."""
        return None

    def _discard(self) -> None:
        """Forget what was gathered for the next step."""

    def _check_hyper(self, hyper: Mapping[str, Any]) -> None:
        """Raise unless the hyperparameters make sense; called at construction and at every step."""
        checks.integer("num_data", hyper["num_data"])
        checks.number("lr", hyper["lr"])
        checks.number("kl_weight", hyper["kl_weight"])
        checks.number("prior_var", hyper["prior_var"], open_low=True)

    # Sampling.

    @contextmanager
    def sampled_params(self, generator: torch.Generator | None = None) -> Iterator[None]:
        """Within the block the model holds weights W ~ q; the mean is back afterwards, even after an exception.

        Args:
            generator: draw from this one and leave the optimiser's own as it is.

        Raises:
            RuntimeError: if blocks are nested or the optimiser is closed.
        """
        if self._closed:
            raise RuntimeError("this optimiser is closed")
        self._recheck_hyper()
        source, training = generator or self.generator, generator is None and torch.is_grad_enabled()
        draw, begin = partial(self._draw, source, training), partial(self._begin_block, source)
        block = self.blocks.run(draw, begin, self._end_block, mirror=generator is None)
        with block, self.likelihood.observed_by(self._observe):
            yield

    def _observe(self, f: Tensor, loss: Tensor, learn: Callable[[], None]) -> None:
        """Called by the likelihood for every training loss; what follows happens only if it is backpropagated."""
        then = self._on_loss(f)
        value = loss.detach()  # the hook must not hold the graph that holds the hook

        def backpropagated(scale: Tensor) -> None:
            self.blocks.trained = True
            self._losses.append(value)
            learn()
            if then is not None:
                then(scale)

        loss.register_hook(backpropagated)

    # Stepping.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and whatever else was gathered for a step that was never made.

        Raises:
            RuntimeError: inside the second or a later sample of a step, whose earlier gradients it would drop.
        """
        if self.blocks.inside and self.blocks.count % self.blocks_per_step and not self._in_closure:
            raise RuntimeError(
                f"zero_grad() inside weight sample {self.blocks.count + 1} of {self.blocks_per_step} would drop the "
                "gradients of the earlier ones: call it before the first sampled_params() block"
            )
        if not self._in_closure:
            self._forget()
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for param in self.param_groups[0]["params"]:
            param.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the gradients of the ``sampled_params()`` blocks since the last.

        Args:
            closure: computes the loss, backpropagates and returns it; it is called once for each weight sample, within
                a block of its own. Without it, the blocks must have been run before.

        Returns:
            The mean of the closure's losses, or None.

        Raises:
            RuntimeError: if there is nothing to step from, or step is called within a block.
            NotFiniteError: if the loss, a gradient or a statistic is not finite, unless such steps are to be skipped;
                the mean stays as it was.
        """
        self.blocks.refuse_inside("step()")
        self._recheck_hyper()
        result = None if closure is None else self._run(closure)
        self._check_ready()
        loss = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).mean()
        self.blocks.swap.read()
        gradients = (param.grad for param in self.params if param.grad is not None)
        loss = self.lockstep.meet(loss, self.steps, gradients, (slot.mean for slot in self.slots))
        if self.ranks is not None:
            self.ranks.average_(self._share(self.ranks))
            self.ranks.add_up(self.likelihood.averages())
        try:
            with full_precision(loss.device):
                self._apply(loss)
        except checks.NotFiniteError as error:
            self.skips.meet(error)
            self.lockstep.reseed(self.steps + self.skipped)
            return result
        self.skips.made()
        self.blocks.swap.restore()
        self.likelihood.update(self.param_groups[0]["num_data"], self.samples)
        self.losses.add(loss, self.steps)
        self.steps += 1
        self.lockstep.reseed(self.steps + self.skipped)
        self._forget()
        return result

    def _recheck_hyper(self) -> None:
        """Check hyperparameters that a schedule has changed."""
        group = self.param_groups[0]
        values = [value for key, value in group.items() if key != "params"]
        if values != self._checked:
            self._check_hyper(group)
            self._checked = values

    def _run(self, closure: Callable[[], Any]) -> Any:
        """Call ``closure`` for each weight sample; it may clear gradients itself, so they are summed here."""
        self.zero_grad()
        params = self.param_groups[0]["params"]
        total: list[Tensor | None] = [None] * len(params)
        losses = []
        for _ in range(self.blocks_per_step):
            for param in params:
                param.grad = None
            self._in_closure = True
            try:
                with torch.enable_grad(), self.sampled_params():
                    losses.append(closure())
            finally:
                self._in_closure = False
            grads = [None if param.grad is None else param.grad.clone() for param in params]  # DDP may reuse its memory
            total = [g if t is None else t if g is None else t + g for t, g in zip(total, grads, strict=True)]
        for param, grad in zip(params, total, strict=True):
            param.grad = grad
        return None if losses[0] is None else sum(losses) / len(losses)

    def _check_ready(self) -> None:
        if not self.blocks.count:
            raise RuntimeError(
                "step() found no training loss: call likelihood.nll(model(x), y).backward() inside sampled_params()"
            )
        if self.blocks.count % self.blocks_per_step:
            raise RuntimeError(
                f"step() needs {self.blocks_per_step} sampled_params() blocks, one for each sample, but "
                f"{self.blocks.count} ran"
            )
        if all(p.grad is None for p in self.params):
            raise RuntimeError("step() found no gradients: call backward() inside sampled_params(), then step()")

    def _stop_at_nan(self, loss: Tensor) -> None:
        """Forget what was gathered for this step and raise, naming what is not finite."""
        gradients = [p.grad for p in self.params if p.grad is not None]
        error = what_is_not(self.steps, loss, gradients, self.losses.trouble())
        self._forget()
        raise error

    def _forget(self) -> None:
        """Start gathering for the next step."""
        if self._losses:  # something was gathered
            self.likelihood.discard()
            self._discard()
        self.blocks.forget()
        self._losses = []

    # Belonging to one model.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One group holds the whole model; ``overrides`` and ``requires_grad_`` say what is treated how."""
        if hasattr(self, "_closed"):
            raise ValueError("the optimiser covers the whole model in one group: build a new one for another model")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, as it belongs to its model: copy the model, build a "
            "new optimiser for it, and use state_dict() and load_state_dict()"
        )

    def close(self) -> None:
        """Let go of the model: no hook remains, and the optimiser can no longer be used. The mean stays in place."""
        self.blocks.refuse_inside("close()")
        self.blocks.swap.show()
        self._forget()
        self._closed = True
