"""Checks of top-p, top-k, min-p and penalties: in range, with an effect, and never for rollouts that train."""

from __future__ import annotations

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.sampling import AlteredSampling, changes

__all__ = ["check_sampling", "check_altered", "check_greedy"]

_SAMPLES_ONLY = ("top_p", "top_k", "min_p")


def check_sampling(config: RunConfig) -> None:
    """Raises ValueError for settings that would alter the distribution of training rollouts, that are out of range, or
    that have no effect because an evaluation draws no samples."""
    for name, value in changes(config.sampling).items():
        raise ValueError(
            f"sampling.{name}={value}: rollouts that train are drawn from the policy's own distribution, or the "
            "log-probabilities that the loss compares would not be those of the policy; leave it out, or set "
            f"controller.eval_sampling.{name} for evaluations"
        )
    controller = config.controller
    own, samples = controller.eval_sampling, [s for s in controller.eval_sets.values() if s.num_samples]
    check_altered("controller.eval_sampling.", own)
    if not controller.pass_at_k and all(eval_set.sampling is not None for eval_set in samples):
        check_greedy("controller.eval_sampling.", own, "set controller.pass_at_k, or num_samples of an evaluation set")
    for name, eval_set in controller.eval_sets.items():
        if eval_set.sampling is not None:
            where = f"controller.eval_sets.{name}.sampling."
            check_altered(where, eval_set.sampling)
            if not eval_set.num_samples:
                check_greedy(where, eval_set.sampling, f"set controller.eval_sets.{name}.num_samples")


def check_altered(prefix: str, altered: AlteredSampling) -> None:
    """Raises ValueError for a value out of range; `prefix` and the setting's name are how the user wrote it."""
    for name, good, must in (
        ("top_p", 0 < altered.top_p <= 1, "must be above 0 and at most 1; use 1 to keep every token"),
        ("top_k", altered.top_k >= 0, "must not be negative; use 0 to keep every token"),
        ("min_p", 0 <= altered.min_p <= 1, "must be between 0 and 1; use 0 to keep every token"),
        ("repetition_penalty", 0 < altered.repetition_penalty < float("inf"), "must be positive; use 1 for no penalty"),
        ("presence_penalty", -2 <= altered.presence_penalty <= 2, "must be between -2 and 2; use 0 for no penalty"),
        ("frequency_penalty", -2 <= altered.frequency_penalty <= 2, "must be between -2 and 2; use 0 for no penalty"),
    ):
        if not good:
            raise ValueError(f"{_shown(prefix, name)}={getattr(altered, name)}: {must}")


def check_greedy(prefix: str, altered: AlteredSampling, mend: str) -> None:
    """Raises ValueError for a setting without effect on greedy completions; `prefix` as in `check_altered`."""
    for name in _SAMPLES_ONLY:
        if name in changes(altered):
            raise ValueError(
                f"{_shown(prefix, name)}={getattr(altered, name)}: acts on samples only, a greedy completion takes "
                f"the likeliest token in any case; {mend}"
            )


def _shown(prefix: str, name: str) -> str:
    return prefix + (name.replace("_", "-") if prefix == "--" else name)
