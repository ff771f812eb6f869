"""GSM8K with a Qwen3-0.6B checkpoint directory, on one 80 GB GPU that trainer and generator are on at the same time.

Download the checkpoint first (`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`) and name its directory with
--model.assets. The data come from the hub, or from a local file with --task.path.

By the estimate (`torchtitan-rl show`; not measured on a GPU) the two need 67 GiB of the 80 GB card's 79, so nothing
has to leave it: 21 the trainer (float32 parameters, gradients and moments 9, activations of 16,384 tokens and the rest
12), 43 the generator. A token of KV cache is 28 layers x 2 x 8 heads x 128 numbers x 2 bytes = 112 KiB, so 40 GiB hold
374,000 tokens: all 512 rollouts of a step at 730 tokens each. A 141 GB card holds all of them at their longest with
--generator.kv-cache-gib 84; a 40 GB card carries the run with --roles.colocation all --generator.kv-cache-gib 20
--trainer.max-tokens-per-microbatch 8192 (25 GiB).
"""

from torchtitan_rl.actors.config import AdamWConfig, GeneratorConfig, TrainerConfig
from torchtitan_rl.algorithm.advantages import grpo
from torchtitan_rl.algorithm.config import AlgorithmConfig
from torchtitan_rl.algorithm.losses import ppo
from torchtitan_rl.algorithm.reductions import token_mean
from torchtitan_rl.algorithm.schedules import ScheduleConfig
from torchtitan_rl.config import ControllerConfig, RunConfig, SamplingConfig
from torchtitan_rl.model.config import ModelConfig
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
        generator=GeneratorConfig(dtype="bfloat16", max_model_len=2048, max_num_seqs=512, kv_cache_gib=40.0),
    )
    config.trainer.training.mixed_precision_param = "bfloat16"
    return config
