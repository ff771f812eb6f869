"""What one batch asks of every role: microbatches, tokens, completions."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.microbatches import plan_microbatches

__all__ = ["RoleWork", "BatchWork", "batch_work"]


@dataclass(kw_only=True, slots=True)
class RoleWork:
    """What a trainer mesh computes for one batch; every rank has the same number of microbatches."""

    trained: int = 0
    """Microbatches with a forward and a backward."""
    trained_tokens: int = 0
    """Tokens in them, of the data-parallel rank that has most."""
    scored: int = 0
    """Microbatches with a forward alone."""
    scored_tokens: int = 0


@dataclass(kw_only=True, slots=True)
class BatchWork:
    """One batch: from one publication to the next."""

    roles: dict[str, RoleWork]
    num_completions: int
    prompt_tokens: int
    completion_tokens: int
    """Tokens of each prompt and of each completion."""
    optimizer_steps: int


def batch_work(config: RunConfig, completion_tokens: int = 0, *, device: str = "cuda") -> BatchWork:
    """A settled config's batch of single-turn rollouts, every prompt at `sampling.max_prompt_tokens`, every completion
    at `completion_tokens` (0: at `sampling.max_tokens`), on trainers of `device`. Filters leave nothing out."""
    algorithm, sampling = config.algorithm, config.sampling
    completion = completion_tokens or sampling.max_tokens
    length = sampling.max_prompt_tokens + completion - 1  # the last token is a target only
    tasks, size = algorithm.tasks_per_step, algorithm.tasks_per_minibatch or algorithm.tasks_per_step
    minibatches = [min(size, tasks - start) * algorithm.group_size for start in range(0, tasks, size)]
    roles: dict[str, RoleWork] = {}
    for role, (trainer, _) in config.trainers().items():
        work = roles[role] = RoleWork()
        if role in ("policy", "critic"):
            for number in minibatches * algorithm.num_epochs:
                count, tokens = _microbatches(trainer, [length] * number, device)
                work.trained, work.trained_tokens = work.trained + count, work.trained_tokens + tokens
                if role == "policy" and algorithm.recompute_logprobs_per_minibatch:
                    work.scored, work.scored_tokens = work.scored + count, work.scored_tokens + tokens
        if role != "policy" or algorithm.scores_each_batch:
            count, tokens = _microbatches(trainer, [length] * sum(minibatches), device)
            work.scored, work.scored_tokens = work.scored + count, work.scored_tokens + tokens
    return BatchWork(
        roles=roles,
        num_completions=sum(minibatches),
        prompt_tokens=sampling.max_prompt_tokens,
        completion_tokens=completion,
        optimizer_steps=algorithm.steps_per_batch,
    )


def _microbatches(trainer: TrainerConfig, lengths: list[int], device: str) -> tuple[int, int]:
    """(number of microbatches, tokens of the fullest rank), as the client will plan them."""
    parallel = trainer.parallelism
    ranks = parallel.data_parallel_replicate_degree * parallel.data_parallel_shard_degree
    plan = plan_microbatches(lengths, ranks, platform.microbatch_tokens(trainer.max_tokens_per_microbatch, device))
    return len(plan[0]), max(sum(lengths[index] for batch in share for index in batch) for share in plan)
