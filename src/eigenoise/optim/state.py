"""An optimiser's state dict: checked whole before any of it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from eigenoise import checks
from eigenoise.likelihoods import Likelihood
from eigenoise.optim.monitoring import LOSS_NAMES, NonFinitePolicy, RunningLoss
from eigenoise.parallel.lockstep import Lockstep

KEY = "eigenoise"
FORMAT = 2
PARTS = ("format", "method", "steps", "seen", "losses", "generator", "seed", "skipped", "likelihood", "slots")


class Stateful(Protocol):
    """What makes up the state of an optimiser."""

    steps: int
    seen: float
    slots: list[Any]
    params: list[torch.Tensor]
    losses: RunningLoss
    likelihood: Likelihood
    generator: torch.Generator
    lockstep: Lockstep
    non_finite: NonFinitePolicy
    extra_state: tuple[str, ...]  # names of what the state dict has beside the usual

    @property
    def group(self) -> dict[str, Any]:
        """The one parameter group."""


def collect(optimizer: Stateful) -> dict[str, Any]:
    """All that a bit-exact resume needs beside ``param_groups``."""
    return {
        "format": FORMAT,
        "method": type(optimizer).__name__,
        "steps": optimizer.steps,
        "seen": optimizer.seen,
        "losses": optimizer.losses.state(),
        "generator": optimizer.generator.get_state(),
        "seed": optimizer.lockstep.seed,
        "skipped": optimizer.non_finite.skipped,
        "likelihood": optimizer.likelihood.state_dict(),
        "slots": {slot.name: slot.state() for slot in optimizer.slots},
    }


def restore(optimizer: Stateful, saved: Mapping[str, Any]) -> None:
    """Use what ``checked`` returned."""
    for slot in optimizer.slots:
        slot.load(saved["slots"][slot.name])
    optimizer.steps, optimizer.seen = saved["steps"], saved["seen"]
    optimizer.losses.load(saved["losses"], optimizer.params[0].device)
    optimizer.generator.set_state(saved["generator"].cpu())
    optimizer.non_finite.skipped = saved["skipped"]
    optimizer.lockstep.resume(saved["seed"], optimizer.steps + optimizer.non_finite.skipped)


def checked(optimizer: Stateful, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Our part of ``state_dict``.

    Raises:
        ValueError: if it is another method's, another model's or another version's.
    """
    method = type(optimizer).__name__
    saved = state_dict.get(KEY)
    if saved is None or saved.get("method") != method:
        got = "another library's" if saved is None else f"one of {saved.get('method')}"
        raise ValueError(f"expected a state of {method}, got {got}")
    if saved.get("format") != FORMAT:
        version = "eigenoise 0.1" if "format" not in saved else "another version of eigenoise"
        raise ValueError(
            f"the state was written by {version}, which this version cannot continue: load the model's own state dict "
            "and start a new optimiser from it"
        )
    missing = {*PARTS, *optimizer.extra_state} - set(saved)
    missing |= {f"losses.{name}" for name in LOSS_NAMES if name not in saved.get("losses", ())}
    if missing:
        raise ValueError(f"the state lacks {sorted(missing)}")
    _check_generator(saved["generator"], optimizer.generator.device)
    _check_slots(saved["slots"], {slot.name: slot.state() for slot in optimizer.slots})
    _check_group(state_dict.get("param_groups") or [{}], optimizer.group)
    return saved


def _check_generator(generator: torch.Tensor, device: torch.device) -> None:
    try:
        torch.Generator(device).set_state(generator.cpu())
    except RuntimeError as error:
        raise ValueError(
            f"expected the state of a generator of a {device.type}, got another device's: to go on with other "
            f"noise put the new optimiser's generator.get_state() into state_dict[{KEY!r}]['generator']"
        ) from error


def _check_slots(saved: Mapping[str, Mapping], slots: Mapping[str, Mapping]) -> None:
    if list(saved) != list(slots):
        raise ValueError(f"expected a state for the layers {list(slots)}, got one for {list(saved)}")
    for name, tensors in slots.items():
        if set(saved[name]) != set(tensors):
            raise ValueError(f"expected the state of {name!r} to hold {sorted(tensors)}, got {sorted(saved[name])}")
        for part, tensor in tensors.items():
            checks.shape(f"the state's {name!r} {part}", saved[name][part], tuple(tensor.shape))


def _check_group(groups: list[Mapping[str, Any]], group: Mapping[str, Any]) -> None:
    if len(groups) != 1 or set(groups[0]) != set(group) or len(groups[0]["params"]) != len(group["params"]):
        raise ValueError(
            f"expected a parameter group of {sorted(group)} for {len(group['params'])} parameters, got "
            f"{sorted(groups[0])} for {len(groups[0].get('params', []))}"
        )
