"""An optimiser's state dict: checked whole before any of it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eigenoise import checks
from eigenoise.optim import losses

KEY = "eigenoise"
PARTS = ("steps", "losses", "generator", "seed", "skipped", "likelihood", "slots")


def checked(
    state_dict: Mapping[str, Any],
    method: str,
    tensors: Mapping[str, Mapping[str, Tensor]],
    group: Mapping[str, Any],
    device: torch.device,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Our part of ``state_dict``.

    Args:
        state_dict: what a user brought.
        method: the optimiser's name, which must be the same.
        tensors: the optimiser's own tensors by slot and name, whose names and shapes must be the same.
        group: the optimiser's one parameter group, whose hyperparameters and number of parameters must be the same.
        device: of the optimiser's generator.
        more: names of parts that the method has beside the usual ones.

    Raises:
        ValueError: if it is another method's or another model's.
    """
    own = state_dict.get(KEY)
    if own is None or own["method"] != method:
        came = "another library's" if own is None else f"one of {own['method']}"
        raise ValueError(f"the state must be one of {method}, but it is {came}")
    missing = {*PARTS, *more} - set(own)
    missing |= {f"losses.{name}" for name in losses.PARTS if name not in own.get("losses", ())}
    if missing:
        raise ValueError(f"the state lacks {sorted(missing)}")
    try:
        torch.Generator(device).set_state(own["generator"].cpu())
    except RuntimeError as error:
        raise ValueError(
            f"the state's generator must be one of a {device.type}, but it is another device's: to go on with other "
            f"noise put the new optimiser's generator.get_state() into state_dict[{KEY!r}]['generator']"
        ) from error
    if list(own["slots"]) != list(tensors):
        raise ValueError(f"the state is for the layers {list(own['slots'])}, but the model has {list(tensors)}")
    for slot, expected in tensors.items():
        if set(own["slots"][slot]) != set(expected):
            raise ValueError(
                f"the state of {slot!r} must hold {sorted(expected)}, but it holds {sorted(own['slots'][slot])}"
            )
        for name, tensor in expected.items():
            checks.shape(f"the state's {slot!r} {name}", own["slots"][slot][name], tuple(tensor.shape))
    groups = state_dict.get("param_groups") or [{}]
    if len(groups) != 1 or set(groups[0]) != set(group) or len(groups[0]["params"]) != len(group["params"]):
        raise ValueError(
            f"the state's parameter group must hold {sorted(group)} for {len(group['params'])} parameters, but it "
            f"holds {sorted(groups[0])} for {len(groups[0].get('params', []))}"
        )
    return own
