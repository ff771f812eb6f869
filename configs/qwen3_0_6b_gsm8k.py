"""GSM8K with a Qwen3-0.6B checkpoint directory, on one GPU shared by trainer and generator.

Download the checkpoint first (`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`) and name its directory with
--model.assets. The data come from the hub, or from a local file with --task.path.
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.tasks.gsm8k import Gsm8k


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="qwen3-0.6b-gsm8k",
        task=Gsm8k.Config(),
        # Nothing starts until --model.assets names a checkpoint directory; validation needs the sizes only.
        model=rl.ModelConfig(assets="chars", flavor="0.6B", pretrained=True),
        algorithm=presets.grpo(
            tasks_per_step=64,
            loss_config={"clip_high": 0.28},
            reduction=reductions.token_mean,
            schedule=rl.ScheduleConfig(warmup_steps=10),
        ),
        controller=rl.ControllerConfig(num_steps=200, eval_every=20, eval_tasks=256, test_tasks=1319, pass_at_k=4),
        sampling=rl.SamplingConfig(max_prompt_tokens=512, max_tokens=1024),
        trainer=rl.TrainerConfig(
            optimizer=rl.AdamWConfig(lr=1e-6), max_tokens_per_microbatch=16384, activation_checkpoint="selective"
        ),
        generator=rl.GeneratorConfig(dtype="bfloat16", max_model_len=2048, kv_cache_gib=24.0),
    )
    config.trainer.training.mixed_precision_param = "bfloat16"
    return config
