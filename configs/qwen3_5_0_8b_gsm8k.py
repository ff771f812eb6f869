"""GSM8K with the text part of a Qwen3.5 0.8B directory, on one 80 GB GPU that trainer and generator are on together.

Download the checkpoint first (`hf download Qwen/Qwen3.5-0.8B --local-dir Qwen3.5-0.8B`) and name its directory with
--model.assets; its tensors for images and for guessing tokens stay unread. The data come from the hub, or from local
files with --task.path and --task.test-path.

A token of KV cache is 6 layers x 2 x 2 heads x 256 numbers x 2 bytes = 12 KiB, in blocks of some 540 tokens, which are
as large as a state. A sequence has states of 18 layers x (16 heads x 128 x 128 numbers x 4 bytes + 3 x 6144 inputs of
the convolution x 2 bytes) = 19 MiB, however long it is. 20 GiB hold all 512 rollouts of a step at their longest.
`torchtitan-rl show` estimates the memory and counts a gated delta net as if it were attention (not measured on a GPU).
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.tasks.gsm8k import Gsm8k

SHAPE = rl.Qwen35Shape(
    vocab_size=248320,
    dim=1024,
    n_layers=24,
    n_heads=8,
    n_kv_heads=2,
    head_dim=256,
    hidden_dim=3584,
    max_seq_len=262144,
    n_key_heads=16,
    n_value_heads=16,
    key_head_dim=128,
    value_head_dim=128,
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="qwen3.5-0.8b-gsm8k",
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
        generator=rl.GeneratorConfig(dtype="bfloat16", max_model_len=2048, max_num_seqs=512, kv_cache_gib=20.0),
    )
    config.trainer.training.mixed_precision_param = "bfloat16"
    return config
