"""GSM8K with a Qwen3-4B checkpoint directory, on one 80 GB GPU that trainer and generator take turns on.

Download the checkpoint first (`hf download Qwen/Qwen3-4B --local-dir Qwen3-4B`) and name its directory with
--model.assets. The data come from the hub, or from local files with --task.path and --task.test-path.

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

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.tasks.gsm8k import Gsm8k


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="qwen3-4b-gsm8k",
        task=Gsm8k.Config(),
        # Nothing starts until --model.assets names a checkpoint directory; validation needs the sizes only.
        model=rl.ModelConfig(assets="chars", flavor="4B", pretrained=True),
        algorithm=presets.grpo(
            tasks_per_step=64,
            loss_config={"clip_high": 0.28},
            reduction=reductions.token_mean,
            schedule=rl.ScheduleConfig(warmup_steps=10),
        ),
        controller=rl.ControllerConfig(num_steps=200, eval_every=20, eval_tasks=256, test_tasks=1319, pass_at_k=4),
        sampling=rl.SamplingConfig(max_prompt_tokens=512, max_tokens=1024),
        trainer=rl.TrainerConfig(
            optimizer=rl.AdamWConfig(lr=1e-6), max_tokens_per_microbatch=8192, activation_checkpoint="selective"
        ),
        roles=rl.RolesConfig(colocation="all"),
        generator=rl.GeneratorConfig(dtype="bfloat16", max_model_len=2048, max_num_seqs=512, kv_cache_gib=48.0),
    )
    config.trainer.training.mixed_precision_param = "bfloat16"
    return config
