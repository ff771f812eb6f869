"""A mixture of experts on two CPU cores: 8 experts, 2 per token, expert-parallel over two trainer ranks.

For trying the path, not for a result: three times the quickstart's parameters, and a minute or two on a busy machine.

Differs from the quickstart:
- model.shape.hidden_dim: 192, not 384
- model.shape.experts: ExpertsShape(num_experts=8, top_k=2), not None
- trainer.parallelism.data_parallel_shard_degree: 2, not 1
- trainer.parallelism.expert_parallel_degree: 2, not 1
- supervised.num_steps: 150, not 300
- supervised.batch_size: 32, not 64
- supervised.schedule.warmup_steps: 10, not 20
- algorithm.tasks_per_step: 8, not 32
- algorithm.schedule.warmup_steps: 2, not 5
- controller.num_steps: 20, not 160
- controller.eval_every: 0, not 20
- controller.eval_tasks: 64, not 256
- controller.test_tasks: 64, not 512
- controller.pass_at_k: 0, not 8
- generator.max_num_seqs: 128, not 512
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.tasks.letter_sort import LetterSort

SHAPE = rl.Qwen3Shape(
    vocab_size=64,
    dim=128,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    hidden_dim=192,
    experts=rl.ExpertsShape(num_experts=8, top_k=2),
    max_seq_len=512,
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="moe-debug",
        task=LetterSort.Config(min_letters=4, max_letters=6),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=150,
            batch_size=32,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=10),
        ),
        algorithm=presets.grpo(
            tasks_per_step=8,
            reduction=reductions.token_mean,
            schedule=rl.ScheduleConfig(decay="linear", warmup_steps=2, final_factor=0.1),
        ),
        controller=rl.ControllerConfig(num_steps=20, eval_every=0, eval_tasks=64, test_tasks=64, pass_at_k=0),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=128, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    config.trainer.parallelism.data_parallel_shard_degree = 2
    config.trainer.parallelism.expert_parallel_degree = 2
    return config
