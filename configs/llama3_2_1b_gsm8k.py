"""GSM8K with a Llama 3.2 1B Instruct directory, on one 80 GB GPU that trainer and generator are on at the same time.

Download the checkpoint first (`hf download meta-llama/Llama-3.2-1B-Instruct --local-dir Llama-3.2-1B-Instruct`) and
name its directory with --model.assets. The data come from the hub, or from local files with --task.path and
--task.test-path.

A token of KV cache is 16 layers x 2 x 8 heads x 64 numbers x 2 bytes = 32 KiB, so 24 GiB hold all 512 rollouts of a
step at their longest. `torchtitan-rl show` estimates the memory (not measured on a GPU).
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.families.rope import Llama3Scaling
from torchtitan_rl.tasks.gsm8k import Gsm8k

SHAPE = rl.Llama3Shape(
    vocab_size=128256,
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    hidden_dim=8192,
    max_seq_len=131072,
    rope_scaling=Llama3Scaling(factor=32.0, original_max_seq_len=8192),
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="llama3.2-1b-gsm8k",
        task=Gsm8k.Config(),
        # Nothing starts until --model.assets names a checkpoint directory; validation needs the sizes only.
        model=rl.ModelConfig(assets="chars", shape=SHAPE, pretrained=True),
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
        generator=rl.GeneratorConfig(dtype="bfloat16", max_model_len=2048, max_num_seqs=512, kv_cache_gib=24.0),
    )
    config.trainer.training.mixed_precision_param = "bfloat16"
    return config
