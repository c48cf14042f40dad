"""What all Bayesian optimisers share: blocks of sampled weights, one step from their gradients, a posterior to look at.

``BayesianOptimizer`` keeps the books. A subclass says how one layer's posterior is kept (its slots) and how a step is
made (``_update``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eigenoise import checks
from eigenoise.inference.turns import PATIENCE, exclusive
from eigenoise.layers.assignment import Assignment, assign, describe
from eigenoise.likelihoods import Likelihood, as_likelihood
from eigenoise.linalg import full_precision
from eigenoise.optim import state
from eigenoise.optim.blocks import Blocks, Sampling
from eigenoise.optim.closure import run_closure
from eigenoise.optim.evaluation import PosteriorAccess
from eigenoise.optim.kl_weight import resolve_kl_weight
from eigenoise.optim.monitoring import ConstantGuess, NonFinitePolicy, RunningLoss, nonfinite_error
from eigenoise.optim.prior_variance import check_prior_names, check_prior_var
from eigenoise.optim.weight_swap import Slot
from eigenoise.parallel.ddp import original_module, refuse_join, refuse_wrapping_later, unwrapped
from eigenoise.parallel.lockstep import Lockstep
from eigenoise.parallel.ranks import Ranks


class BayesianOptimizer(PosteriorAccess, Optimizer):
    """A ``torch.optim.Optimizer`` that fits a posterior over a model's weights.

    Args:
        model: any ``nn.Module``, perhaps compiled. Wrapped in ``DistributedDataParallel``, each process draws noise of
            its own, and all make the same step from what all have seen.
        likelihood: what the model's output means, or ``"regression"`` or ``"classification"``.
        hyper: hyperparameters that schedules may change, put into ``param_groups``.
        make_slot: builds the slot of one assignment.
        sampling: how weights are sampled in training.
        noisy: whether weights are sampled in training at all.
        others: what parameters outside supported layers get: ``"diagonal"``, a diagonal posterior, or ``"point"``.
        overrides: the same choice for a module's or parameter's name and everything below it.
        batch_dim: the axis that counts examples in sequences, 1 for sequence-first models.
        not_finite: what ``step`` does when a number is NaN or infinite: ``"raise"`` or ``"skip"``.
    """

    extra_state: tuple[str, ...] = ()  # names of what ``state_dict`` has beside the usual

    def __init__(
        self,
        model: nn.Module,
        *,
        likelihood: Likelihood | str,
        hyper: Mapping[str, Any],
        make_slot: Callable[[Assignment], Slot],
        sampling: Sampling,
        noisy: bool,
        others: str,
        overrides: Mapping[str, str] | None,
        batch_dim: int,
        not_finite: str,
    ):
        self.non_finite = NonFinitePolicy(not_finite)
        self.likelihood = as_likelihood(likelihood)
        self.noisy, self.sampling, self.samples = noisy, sampling, sampling.samples
        hyper = {key: value.item() if isinstance(value, np.generic) else value for key, value in hyper.items()}
        if isinstance(hyper["prior_var"], Mapping):
            hyper["prior_var"] = dict(hyper["prior_var"])
        self.batch_dim = checks.integer("batch_dim", batch_dim, low=0)
        self.model, self.ranks = unwrapped(model)
        self._wrapped = original_module(model)
        self.assignments = assign(self.model, others, overrides)
        num_data = checks.integer("num_data", hyper["num_data"])
        hyper["kl_weight"] = resolve_kl_weight(hyper["kl_weight"], self.likelihood, num_data, self._weights())
        self._check_hyper(hyper)
        check_prior_names(hyper["prior_var"], [assignment.layer for assignment in self.assignments])
        self.slots: list[Any] = [make_slot(assignment) for assignment in self.assignments]
        self.parallel = sampling.samples if sampling.parallel else None
        self.blocks = Blocks(self.model, self.slots, sampling)
        self.params = self.blocks.swap.params
        device = self.params[0].device
        generator = sampling.generator
        if generator is not None and generator.device.type != device.type:
            raise ValueError(f"generator must be on the model's device, {device}, got one on {generator.device}")
        self.generator = generator or torch.Generator(device).manual_seed(int(torch.randint(2**62, ())))
        self.steps = 0
        self.lockstep = Lockstep(self.ranks, self.generator)
        self.closure_sample: int | None = None
        self.cleared = False  # whether gradients were cleared since the last step
        self._checked: list[Any] = []  # hyperparameters known to be good
        self._losses: list[Tensor] = []  # backpropagated since the last step
        self._batch_terms = 0  # likelihood terms of these losses
        self.seen = 0.0  # likelihood terms of all steps
        self.losses = RunningLoss(self.likelihood.stack or 1)
        self.constant_guess: ConstantGuess | None = ConstantGuess(self.likelihood)
        super().__init__(self._group_params(), dict(hyper))
        self._closed = False
        if self.model is original_module(model):
            refuse_wrapping_later(self.model, self.blocks)

    @property
    def skipped(self) -> int:
        """Steps that were not made because a number was not finite."""
        return self.non_finite.skipped

    @property
    def blocks_per_step(self) -> int:
        """How many ``sampled_params()`` blocks come before each ``step()``."""
        return self.blocks.per_step

    @property
    def group(self) -> dict[str, Any]:
        """The one parameter group."""
        return self.param_groups[0]

    def _weights(self) -> int:
        """How many weights have a posterior, in one of the models of a stack."""
        shapes = [torch.Size(each.layer.shape) for each in self.assignments if each.has_posterior]
        return sum(shape.numel() for shape in shapes) // (self.likelihood.stack or 1)

    @property
    def prior_vars(self) -> dict[str, float]:
        """η of each layer by its name."""
        return {slot.name: slot.prior_var(self.group) for slot in self.slots}

    # What a subclass says.

    @abstractmethod
    def _update(self, loss: Tensor, terms: float) -> None:
        """Make the step: move every slot's ``mean``, which ``step`` has read and will write back.

        Args:
            loss: the mean over all processes.
            terms: B, likelihood terms of the step, in all processes together.

        It must call ``_stop_at_nan`` before it changes anything if ``loss`` or a gradient is not finite.
        """

    def _group_params(self) -> list[Tensor]:
        return list(self.params)

    def _shared(self, ranks: Ranks) -> list[Tensor]:
        """Tensors of this rank that all ranks are to have the mean of before the step."""
        return []

    def _begin_block(self, generator: torch.Generator) -> AbstractContextManager:
        """A block begins; the samples are in the model. What it returns is around the block."""
        return nullcontext()

    def _end_block(self, trained: bool) -> None:
        """The block ends; the mean is back in the model."""

    def _on_loss(self, f: Tensor, loss: Tensor) -> Callable[[], None] | None:
        """A training loss was computed; what to do when it is backpropagated."""
        return None

    def _discard(self) -> None:
        """Forget what was gathered for the next step."""

    def _check_hyper(self, hyper: Mapping[str, Any]) -> None:
        """Raise unless the hyperparameters make sense; called at construction and when they have changed."""
        checks.integer("num_data", hyper["num_data"])
        checks.number("lr", hyper["lr"])
        checks.number("kl_weight", hyper["kl_weight"])
        check_prior_var(hyper["prior_var"])

    # Sampling.

    @contextmanager
    def sampled_params(self, generator: torch.Generator | None = None) -> Iterator[None]:
        """Within the block the model holds weights W ~ q; the mean is back afterwards, even after an exception.

        Args:
            generator: draw from this one, leave the optimiser's own as it is, and use no ramp: for predictions.

        Raises:
            RuntimeError: if blocks are nested or the optimiser is closed.
        """
        if self._closed:
            raise RuntimeError("this optimiser is closed")
        if self.ranks is not None and generator is None:
            refuse_join(self._wrapped)
        self._recheck_hyper()
        source = generator or self.generator
        draw = partial(self._draw, source, None if generator is not None else self.noise_ramp)
        block = self.blocks.run(draw, partial(self._begin_block, source), self._end_block, mirror=generator is None)
        patience = None if generator is None else PATIENCE  # a prediction does not wait for ever
        with exclusive(self.model, patience), block, self.likelihood.observed_by(self._observe):
            yield

    def _draw(self, generator: torch.Generator, ramp: float | None) -> None:
        for slot in self.slots:
            slot.draw(generator, self.group, ramp)

    @property
    def noise_ramp(self) -> float:
        """The factor on the noise's standard deviation in the next training block, from 0 at the first step to 1."""
        return 1.0 if self.steps >= self.sampling.ramp else self.steps / self.sampling.ramp

    def _observe(self, f: Tensor, y: Any, loss: Tensor, learn: Callable[[], None]) -> None:
        """Called by the likelihood for every training loss; what follows happens only if it is backpropagated."""
        if self.constant_guess is not None:
            self.constant_guess.record(f, y, self.steps)
        take_in = self._on_loss(f, loss)
        value, terms = loss.detach(), self.likelihood.terms(f)  # the hook must not hold the graph that holds the hook

        def backpropagated(scale: Tensor) -> None:
            self.blocks.trained = True
            self._losses.append(value)
            self._batch_terms += terms
            learn()
            if take_in is not None:
                take_in()

        loss.register_hook(backpropagated)

    # Stepping.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and whatever else was gathered for a step that was never made.

        Raises:
            RuntimeError: inside the second or a later sample of a step, whose earlier gradients it would drop.
        """
        if self.blocks.inside and self.blocks.count % self.blocks.per_step and self.closure_sample is None:
            raise RuntimeError(
                f"zero_grad() inside weight sample {self.blocks.count + 1} of {self.blocks.per_step} would drop the "
                "gradients of the earlier ones: call it before the first sampled_params() block"
            )
        self.cleared = True
        if not self.closure_sample:  # what the earlier samples of a closure gave is summed apart
            self._forget()
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for param in self.group["params"]:
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
        with exclusive(self.model):
            return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self.blocks.refuse_inside("step()")
        self._recheck_hyper()
        result = None if closure is None else run_closure(self, closure)
        self.blocks.check_ready()
        loss = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).mean()
        self.blocks.read_means()
        terms = self._batch_terms / self.sampling.samples  # several samples see the same examples
        if self.ranks is not None:
            gradients = (param.grad for param in self.params if param.grad is not None)
            hyper = {key: value for key, value in self.group.items() if key != "params"}
            means = (slot.mean for slot in self.slots)
            loss, terms = self.lockstep.synchronise(loss, terms, self.steps, hyper, gradients, means)
            self.ranks.average_(self._shared(self.ranks))
            self.ranks.add_up(self.likelihood.averages())
        try:
            with full_precision(loss.device):
                self._update(loss, terms)
        except checks.NotFiniteError as error:
            self.non_finite.record_error(error)
            self.lockstep.reseed(self.steps + self.skipped)
            return result
        self.non_finite.record_step()
        self.blocks.swap.write_means()
        self.likelihood.update(self.group["num_data"], self.sampling.samples)
        self.losses.add(loss, self.steps, self.constant_guess)
        self.steps += 1
        self.seen += terms
        self.lockstep.reseed(self.steps + self.skipped)
        self._forget()
        self.cleared = False
        return result

    def _recheck_hyper(self) -> None:
        """Check hyperparameters that a schedule has changed."""
        values = [value for key, value in self.group.items() if key != "params"]
        if values != self._checked:
            self._check_hyper(self.group)
            check_prior_names(self.group["prior_var"], [slot.layer for slot in self.slots])
            self._checked = values

    def _stop_at_nan(self, loss: Tensor) -> None:
        """Forget what was gathered for this step and raise, naming what is not finite."""
        gradients = [p.grad for p in self.params if p.grad is not None]
        error = nonfinite_error(self.steps, loss, gradients, self.losses.diagnosis())
        self._forget()
        raise error

    def _forget(self) -> None:
        """Start gathering for the next step."""
        if self._losses:  # something was gathered
            self.likelihood.discard()
            self._discard()
        self.blocks.forget()
        self._losses, self._batch_terms = [], 0

    # Keeping and showing.

    def __repr__(self) -> str:
        """The hyperparameters and how each parameter is treated."""
        about = ", ".join(f"{k}={v}" for k, v in self.group.items() if k != "params" and v is not None)
        kinds = {slot.name: (slot.layer, slot.describe()) for slot in self.slots}
        return "\n".join([f"{type(self).__name__}({about})", *describe(self.model, kinds), *self._notes()])

    def _notes(self) -> list[str]:
        """Further lines for ``print``."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs beside the model's own state dict; plain tensors, numbers and dicts."""
        self.blocks.refuse_inside("state_dict()")
        return {**super().state_dict(), state.KEY: state.collect(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave; the dict is left as it is, and the model keeps the weights it has.

        Raises:
            ValueError: if it is another method's, another model's or another version's, before anything changes.
        """
        self.blocks.refuse_inside("load_state_dict()")
        saved = state.checked(self, state_dict)
        self._check_hyper(state_dict["param_groups"][0])
        self.likelihood.load_state_dict(saved["likelihood"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        state.restore(self, saved)
        self._forget()

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
        """Let go of the model: the optimiser can no longer be used. The mean stays in place."""
        self.blocks.refuse_inside("close()")
        self._forget()
        self._closed = True
