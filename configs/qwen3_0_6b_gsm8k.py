"""GSM8K with a Qwen3-0.6B checkpoint directory, on one 80 GB GPU that trainer and generator are on at the same time.

Download the checkpoint first (`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`) and name its directory with
--model.assets. The data come from the hub, or from local files with --task.path and --task.test-path.

By the estimate (`torchtitan-rl show`; not measured on a GPU) the two need 67 GiB of the 80 GB card's 79, so nothing
has to leave it: 21 the trainer (float32 parameters, gradients and moments 9, activations of 16,384 tokens and the rest
12), 43 the generator. A token of KV cache is 28 layers x 2 x 8 heads x 128 numbers x 2 bytes = 112 KiB, so 40 GiB hold
374,000 tokens: all 512 rollouts of a step at 730 tokens each. A 141 GB card holds all of them at their longest with
--generator.kv-cache-gib 84; a 40 GB card carries the run with --roles.colocation all --generator.kv-cache-gib 20
--trainer.max-tokens-per-microbatch 8192 (25 GiB).
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
        generator=rl.GeneratorConfig(dtype="bfloat16", max_model_len=2048, max_num_seqs=512, kv_cache_gib=40.0),
    )
    config.trainer.training.mixed_precision_param = "bfloat16"
    return config
