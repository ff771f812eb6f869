"""Several turns: a 0.8M-parameter Qwen3 learns to call a calculator, on two CPU cores in a minute and a half.

The warm start shows both ways to answer: three demonstrations in ten call the calculator and copy what it says, the
others repeat the problem's first number, which is wrong. So the policy that follows can call, but mostly does not.
That calling pays is learned from the reward alone: a choice between two known ways, not a new skill (docs/log.md).
"""

from torchtitan_rl.algorithm.advantages import grpo
from torchtitan_rl.algorithm.losses import ppo
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
from torchtitan_rl.tasks.calculator import Calculator


def config() -> RunConfig:
    config = RunConfig(
        name="calculator",
        task=Calculator.Config(min_digits=1, max_digits=2, tool_demonstrations=0.3),
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
            num_steps=450,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=AlgorithmConfig(
            tasks_per_step=32,
            group_size=8,
            advantage_fn=grpo,
            loss_fn=ppo,
            loss_config={"clip_low": 0.2, "clip_high": 0.2},
            reduction=token_mean,
            schedule=ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=ControllerConfig(num_steps=60, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        # Prompt 6 tokens, call 7, its value 5, answer 5: 48 leave room for two more calls.
        sampling=SamplingConfig(max_prompt_tokens=12, max_tokens=16, max_turns=4, max_rollout_tokens=48),
        trainer=TrainerConfig(optimizer=AdamWConfig(lr=5e-4, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    return config
