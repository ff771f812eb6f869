"""GSM8K with a Qwen3-4B checkpoint directory, on one 80 GB GPU that trainer and generator take turns on.

Download the checkpoint first (`hf download Qwen/Qwen3-4B --local-dir Qwen3-4B`) and name its directory with
--model.assets. The data come from the hub, or from a local file with --task.path.

By the estimate (`torchtitan-rl show`; not measured on a GPU) the 80 GB card's 79 GiB carry it with 14 to spare:

- the optimizer step is the most: 4.02B parameters x 16 bytes (float32 parameters, gradients, two moments) = 60 GiB;
- forward and backward: 30 GiB of parameters and gradients, 19 of activations of 8,192 tokens and the rest. The moments
  are in host memory then, because every batch is one optimizer step and there is no warm start; with either the
  estimate is 85 GiB, and --trainer.activation-checkpoint full brings it to 72;
- sampling: 8 GiB of weights and 48 of KV cache. A token is 36 layers x 2 x 8 heads x 128 numbers x 2 bytes = 144 KiB,
  so the cache holds 349,000: all 512 rollouts of a step at 680 tokens each.

What waits is in pinned host memory: 60 GiB of the trainer's and 8 of weights, more where torch rounds a tensor up to a
power of two. Beside the generator (--roles.colocation none) the trainer would need a second GPU. A 141 GB card has room
for all rollouts at their longest and larger microbatches: --generator.kv-cache-gib 108
--trainer.max-tokens-per-microbatch 16384 (120 GiB).
"""

from torchtitan_rl.actors.config import AdamWConfig, GeneratorConfig, TrainerConfig
from torchtitan_rl.algorithm.advantages import grpo
from torchtitan_rl.algorithm.config import AlgorithmConfig
from torchtitan_rl.algorithm.losses import ppo
from torchtitan_rl.algorithm.reductions import token_mean
from torchtitan_rl.algorithm.schedules import ScheduleConfig
from torchtitan_rl.config import ControllerConfig, RolesConfig, RunConfig, SamplingConfig
from torchtitan_rl.model.config import ModelConfig
from torchtitan_rl.tasks.gsm8k import Gsm8k


def config() -> RunConfig:
    config = RunConfig(
        name="qwen3-4b-gsm8k",
        task=Gsm8k.Config(),
        # Nothing starts until --model.assets names a checkpoint directory; validation needs the sizes only.
        model=ModelConfig(assets="chars", flavor="4B", pretrained=True),
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
            optimizer=AdamWConfig(lr=1e-6), max_tokens_per_microbatch=8192, activation_checkpoint="selective"
        ),
        roles=RolesConfig(colocation="all"),
        generator=GeneratorConfig(dtype="bfloat16", max_model_len=2048, max_num_seqs=512, kv_cache_gib=48.0),
    )
    config.trainer.training.mixed_precision_param = "bfloat16"
    return config
