"""Tasks of the `reasoning-gym` package with a Hugging Face checkpoint directory, on a GPU.

Set the checkpoint with --model.assets DIR, for example a Qwen3-0.6B directory.
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
    RunConfig,
    SamplingConfig,
    ScheduleConfig,
    TrainerConfig,
)
from torchtitan_rl.tasks.reasoning_gym import ReasoningGym


def config() -> RunConfig:
    config = RunConfig(
        name="reasoning-gym",
        task=ReasoningGym.Config(datasets={"chain_sum": {"min_terms": 2, "max_terms": 4}, "basic_arithmetic": {}}),
        # Nothing starts until --model.assets names a checkpoint directory; validation needs the sizes only.
        model=ModelConfig(assets="chars", flavor="0.6B", pretrained=True),
        algorithm=AlgorithmConfig(
            tasks_per_step=32,
            group_size=8,
            advantage_fn=grpo,
            loss_fn=ppo,
            loss_config={"clip_low": 0.2, "clip_high": 0.28},
            reduction=token_mean,
            schedule=ScheduleConfig(warmup_steps=5),
        ),
        controller=ControllerConfig(num_steps=200, eval_every=20, eval_tasks=128, test_tasks=256, pass_at_k=4),
        sampling=SamplingConfig(max_prompt_tokens=1024, max_tokens=1024),
        trainer=TrainerConfig(
            optimizer=AdamWConfig(lr=1e-6), max_tokens_per_microbatch=16384, activation_checkpoint="selective"
        ),
        generator=GeneratorConfig(dtype="bfloat16", max_model_len=2048, kv_cache_gib=16.0),
    )
    config.trainer.training.mixed_precision_param = "bfloat16"
    return config
