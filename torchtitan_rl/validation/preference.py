"""Checks of the preference phase: its loss, its reference, what has no effect."""

from __future__ import annotations

from torchtitan_rl.algorithm import pair_losses
from torchtitan_rl.config.resolve import named
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.validation.algorithm import check_arguments, check_function, check_schedule, no_breakpoints
from torchtitan_rl.validation.functions import probe_pair_loss

__all__ = ["check_preference"]


def check_preference(config: RunConfig) -> None:
    """Raises ValueError for the first mistake in `config.preference`, and for a role that the phase lacks."""
    preference = config.preference
    if preference is None:
        return
    if preference.role == "policy":
        if config.roles.reference is None and not preference.reference_free:
            raise ValueError(
                "preference: there is no reference to take log-ratios to; set roles.reference, or "
                "preference.reference_free=True"
            )
    else:
        if config.roles.configured().get(preference.role) is None:
            raise ValueError(
                f"preference.role={preference.role!r}: this run has no such role; set roles.{preference.role}, or use "
                "'policy'"
            )
        for name, neutral in (("reference_free", False), ("length_normalized", False), ("sft_coef", 0.0)):
            if (value := getattr(preference, name)) != neutral:
                raise ValueError(
                    f"preference.{name}={value}: is about log-probabilities, and preference.role={preference.role!r} "
                    f"gives values; use {neutral}"
                )
    check_schedule("preference.schedule", preference.schedule)
    loss_fn = pair_losses.loss_of(preference)
    check_function("preference.loss_fn", loss_fn, pair_losses)
    check_arguments("preference.loss_config", loss_fn, preference.loss_config)
    with no_breakpoints():
        probe_pair_loss(f"preference.loss_fn={named(loss_fn)}", loss_fn, preference.loss_config)
