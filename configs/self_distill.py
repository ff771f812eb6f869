"""Self-distillation: the quickstart's model learns to sort letters without a reward.

The warm start shows two forms, a wrong order as in the quickstart and, in prompts with a hint (`szyci:yzisc=`), copying
the hint. Sorting is in neither. Then the policy answers plain prompts, and the policy as it was after the warm start
scores each of those tokens under a prompt with the right answer as the hint.
"""

from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.algorithm.reductions import token_mean
from torchtitan_rl.config import (
    AdamWConfig,
    AlgorithmConfig,
    ControllerConfig,
    GeneratorConfig,
    ModelConfig,
    Qwen3Shape,
    RunConfig,
    SamplingConfig,
    ScheduleConfig,
    SupervisedConfig,
    TrainerConfig,
)
from torchtitan_rl.tasks.letter_sort import LetterSort, hinted
from torchtitan_rl.types import Rollout
from torchtitan_rl.workflows.self_distill import self_distill
from torchtitan_rl.workflows.single_turn import single_turn


def answer_as_hint(rollout: Rollout) -> str:
    """What the teacher reads in place of `szyci=`."""
    return hinted(rollout.task.prompt.removesuffix("="), rollout.task.answer)


def config() -> RunConfig:
    config = RunConfig(
        name="self_distill",
        task=LetterSort.Config(min_letters=4, max_letters=6),
        model=ModelConfig(
            assets="chars",
            shape=Qwen3Shape(
                vocab_size=64,
                dim=128,
                n_layers=4,
                n_heads=4,
                n_kv_heads=2,
                head_dim=32,
                hidden_dim=384,
                max_seq_len=512,
            ),
        ),
        supervised=SupervisedConfig(
            task=LetterSort.Config(min_letters=4, max_letters=6, hinted_demonstrations=0.5),
            num_steps=300,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=AlgorithmConfig(
            tasks_per_step=32,
            group_size=8,
            loss_fn=importance_sampling,
            reduction=token_mean,
            workflow=self_distill(single_turn, prompt=answer_as_hint),
            precomputed_advantages="require",
            schedule=ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=ControllerConfig(num_steps=160, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=TrainerConfig(optimizer=AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    return config
