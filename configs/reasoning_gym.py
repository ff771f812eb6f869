"""Tasks of the `reasoning-gym` package with a Hugging Face checkpoint directory, on a GPU.

Install the package first (`scripts/setup.sh reasoning-gym`). Set the checkpoint with --model.assets DIR: a Qwen3-0.6B
directory, or another one with --model.flavor None.
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.tasks.reasoning_gym import ReasoningGym


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="reasoning-gym",
        task=ReasoningGym.Config(datasets={"chain_sum": {"min_terms": 2, "max_terms": 4}, "basic_arithmetic": {}}),
        # Nothing starts until --model.assets names a checkpoint directory; validation needs the sizes only.
        model=rl.ModelConfig(assets="chars", flavor="0.6B", pretrained=True),
        algorithm=presets.grpo(
            tasks_per_step=32,
            loss_config={"clip_high": 0.28},
            reduction=reductions.token_mean,
            schedule=rl.ScheduleConfig(warmup_steps=5),
        ),
        controller=rl.ControllerConfig(num_steps=200, eval_every=20, eval_tasks=128, test_tasks=256, pass_at_k=4),
        sampling=rl.SamplingConfig(max_prompt_tokens=1024, max_tokens=1024),
        trainer=rl.TrainerConfig(
            optimizer=rl.AdamWConfig(lr=1e-6), max_tokens_per_microbatch=16384, activation_checkpoint="selective"
        ),
        generator=rl.GeneratorConfig(dtype="bfloat16", max_model_len=2048, kv_cache_gib=16.0),
    )
    config.trainer.training.mixed_precision_param = "bfloat16"
    return config
