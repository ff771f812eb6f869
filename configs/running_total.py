"""Arithmetic with a scratchpad: a 0.8M-parameter Qwen3 learns to add a number, on two CPU cores in minutes.

The policy adds up a list of numbers from 0 to 2: it writes each number again, and after it the last digit of the total
so far. The warm start shows that form, and how 0 and 1 are added. After a 2 the total grows by a random number in its
demonstrations: what a digit plus 2 is, is learned from the reward alone.

Differs from the quickstart:
- task: RunningTotal.Config(), not LetterSort.Config()
- supervised.num_steps: 250, not 300
- algorithm.entropy_coef: 0.1, not 0.0
- controller.num_steps: 60, not 160
- trainer.optimizer.lr: 0.0005, not 0.001
- sampling.max_tokens: 14, not 12; an answer takes 12 and its end
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
        controller=rl.ControllerConfig(num_steps=60, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=14),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=5e-4, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    return config
