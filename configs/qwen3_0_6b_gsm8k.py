"""GSM8K with a Qwen3-0.6B checkpoint directory, on one GPU shared by trainer and generator.

Download the checkpoint first (`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`) and name its directory with
--model.assets. The data come from the hub, or from a local file with --task.path.
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
from torchtitan_rl.tasks.gsm8k import Gsm8k


def config() -> RunConfig:
    config = RunConfig(
        name="qwen3-0.6b-gsm8k",
        task=Gsm8k.Config(),
        # Nothing starts until --model.assets names a checkpoint directory; validation needs the sizes only.
        model=ModelConfig(assets="chars", flavor="0.6B", pretrained=True),
        algorithm=AlgorithmConfig(
            tasks_per_step=64,
            group_size=8,
            advantage_fn=grpo,
            loss_fn=ppo,
            loss_config={"clip_low": 0.2, "clip_high": 0.28},
            reduction=token_mean,
            schedule=ScheduleConfig(warmup_steps=10),
        ),
        controller=ControllerConfig(num_steps=200, eval_every=20, eval_tasks=256, test_tasks=1319, pass_at_k=4),
        sampling=SamplingConfig(max_prompt_tokens=512, max_tokens=1024),
        trainer=TrainerConfig(
            optimizer=AdamWConfig(lr=1e-6), max_tokens_per_microbatch=16384, activation_checkpoint="selective"
        ),
        generator=GeneratorConfig(dtype="bfloat16", max_model_len=2048, kv_cache_gib=24.0),
    )
    config.trainer.training.mixed_precision_param = "bfloat16"
    return config
