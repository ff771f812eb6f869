"""The optimizer's state as checkpoints hold it: of every parameter, whether it has taken a step or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["complete_state", "of_stepped"]


def complete_state(optimizers) -> dict[str, Any]:
    """`optimizers.state_dict()`, which names every parameter: a parameter without state gets moments and a step count
    of zero, as its first step would begin from. Parameters, gradients and the state of the others stay as they are.

    torch's own function does nothing for an optimizer that has a gradient or any state. Adapters that do not train have
    no state, and a gradient may wait for its step when a state is saved.
    """
    for optimizer in optimizers:
        _create_missing(optimizer)
    return optimizers.state_dict()


def of_stepped(state: dict[str, Any], saved: Iterable[str]) -> dict[str, Any]:
    """The part of a `complete_state` that a checkpoint has: without parameters of which nothing is in `saved`, names
    such as `optimizer.state.norm.weight.exp_avg`. Checkpoints of earlier versions lack those without a step."""
    parameters = {name.removeprefix("optimizer.").rpartition(".")[0] for name in saved}
    return {n: value for n, value in state.items() if not n.startswith("state.") or n.rpartition(".")[0] in parameters}


def _create_missing(optimizer: torch.optim.Optimizer) -> None:
    """Lets the optimizer create what is missing, in a step of size zero along zero gradients."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [parameter for parameter in parameters if parameter not in optimizer.state]
    if not missing:
        return
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = None
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    for parameter in missing:
        optimizer.state[parameter]["step"].zero_()
