"""Arithmetic with a scratchpad: a 0.8M-parameter Qwen3 learns to add up a list, on two CPU cores in minutes.

The policy writes each number again and after it the last digit of the total so far. The warm start shows only that
form: in its demonstrations the total grows by a random number, whatever the number that was copied. That the number is
to be added, and what a digit plus a digit is, is learned from the reward alone. Not yet on every seed (docs/log.md).

Differs from the quickstart:
- task: RunningTotal.Config(), not LetterSort.Config()
- supervised.num_steps: 250, not 300
- algorithm.entropy_coef: 0.1, not 0.0; without it the policy settles on totals before it has tried the others
- controller.num_steps: 120, not 160
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.tasks.running_total import RunningTotal

SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="running_total",
        task=RunningTotal.Config(),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=250,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=presets.grpo(
            tasks_per_step=32,
            reduction=reductions.token_mean,
            entropy_coef=0.1,
            schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=rl.ControllerConfig(num_steps=120, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    return config
