"""Checks of a run's `sampling` section and of evaluations' sampling: limits of rollouts; top-p, top-k, min-p and
penalties with an effect, and never for rollouts that train."""

from __future__ import annotations

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.sampling import AlteredSampling
from torchtitan_rl.types.completions import changes

__all__ = ["check_greedy", "check_limits", "check_sampling", "check_stop_tokens"]

_SAMPLES_ONLY = ("top_p", "top_k", "min_p")


def check_limits(config: RunConfig) -> None:
    """Raises ValueError for a `sampling.max_rollout_tokens` that leaves no room after a prompt, or that a trainer or a
    generator has no room for."""
    sampling, limit = config.sampling, config.sampling.max_rollout_tokens
    if limit and limit <= sampling.max_prompt_tokens:
        raise ValueError(
            f"sampling.max_rollout_tokens={limit}: leaves nothing after a prompt of sampling.max_prompt_tokens="
            f"{sampling.max_prompt_tokens}; raise it, or use 0 for max_prompt_tokens + max_tokens"
        )
    contexts = {"generator.max_model_len": config.generator.max_model_len}
    for role, (trainer, _) in config.trainers().items():
        contexts[f"{'trainer' if role == 'policy' else f'roles.{role}.trainer'}.training.seq_len"] = (
            trainer.training.seq_len
        )
    for where, context in contexts.items():
        if limit > context:
            raise ValueError(
                f"sampling.max_rollout_tokens={limit}: exceeds {where}={context}; lower it or raise that one"
            )


def check_stop_tokens(stop_token_ids: list[int], vocab_size: int) -> None:
    """Raises ValueError for a token that the model does not have."""
    for token in stop_token_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"sampling.stop_token_ids={stop_token_ids}: {token} is no token of the model, whose vocabulary has 0 "
                f"to {vocab_size - 1}; leave it out"
            )


def check_sampling(config: RunConfig) -> None:
    """Raises ValueError for settings that would alter the distribution of training rollouts, or that have no effect
    because an evaluation draws no samples."""
    for name, value in changes(config.sampling).items():
        raise ValueError(
            f"sampling.{name}={value}: rollouts that train are drawn from the policy's own distribution, or the "
            "log-probabilities that the loss compares would not be those of the policy; leave it out, or set "
            f"controller.eval_sampling.{name} for evaluations"
        )
    controller = config.controller
    own, samples = controller.eval_sampling, [s for s in controller.eval_sets.values() if s.num_samples]
    if not controller.pass_at_k and all(eval_set.sampling is not None for eval_set in samples):
        check_greedy("controller.eval_sampling.", own, "set controller.pass_at_k, or num_samples of an evaluation set")
    for name, eval_set in controller.eval_sets.items():
        if eval_set.sampling is not None:
            where = f"controller.eval_sets.{name}.sampling."
            if not eval_set.num_samples:
                check_greedy(where, eval_set.sampling, f"set controller.eval_sets.{name}.num_samples")


def check_greedy(prefix: str, altered: AlteredSampling, mend: str) -> None:
    """Raises ValueError for a setting without effect on greedy completions. `prefix` and the setting's name
    are how the user wrote it."""
    for name in _SAMPLES_ONLY:
        if name in changes(altered):
            raise ValueError(
                f"{_shown(prefix, name)}={getattr(altered, name)}: acts on samples only, a greedy completion takes "
                f"the likeliest token in any case; {mend}"
            )


def _shown(prefix: str, name: str) -> str:
    return prefix + (name.replace("_", "-") if prefix == "--" else name)
