"""A Qwen3.5 on the quickstart's task.

Differs from the quickstart:
- model.shape: Qwen35Shape(vocab_size=64, dim=192, n_layers=4, n_heads=6, n_kv_heads=3, head_dim=32, hidden_dim=576,
  max_seq_len=512, full_attention_interval=2, n_key_heads=6, n_value_heads=6, key_head_dim=32, value_head_dim=32), not
  Qwen3Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384,
  max_seq_len=512); gated delta nets and gated attention in turn
- supervised.lr: 0.002, not 0.003
- controller.num_steps: 120, not 160
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.tasks.letter_sort import LetterSort

SHAPE = rl.Qwen35Shape(
    vocab_size=64,
    dim=192,
    n_layers=4,
    n_heads=6,
    n_kv_heads=3,
    head_dim=32,
    hidden_dim=576,
    max_seq_len=512,
    full_attention_interval=2,
    n_key_heads=6,
    n_value_heads=6,
    key_head_dim=32,
    value_head_dim=32,
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="letter_sort_qwen3_5",
        task=LetterSort.Config(min_letters=4, max_letters=6),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=300,
            batch_size=64,
            lr=2e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=presets.grpo(
            tasks_per_step=32,
            reduction=reductions.token_mean,
            schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=rl.ControllerConfig(num_steps=120, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    return config
