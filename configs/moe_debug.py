"""A mixture of experts on two CPU cores: 8 experts, 2 per token, expert-parallel over two trainer ranks.

For trying the path, not for a result: three times the quickstart's parameters, and a minute or two on a busy machine.
"""

from torchtitan_rl.algorithm.advantages import grpo
from torchtitan_rl.algorithm.losses import ppo
from torchtitan_rl.algorithm.reductions import token_mean
from torchtitan_rl.config import (
    AdamWConfig,
    AlgorithmConfig,
    ControllerConfig,
    ExpertsShape,
    GeneratorConfig,
    ModelConfig,
    Qwen3Shape,
    RunConfig,
    SamplingConfig,
    ScheduleConfig,
    SupervisedConfig,
    TrainerConfig,
)
from torchtitan_rl.tasks.letter_sort import LetterSort


def config() -> RunConfig:
    config = RunConfig(
        name="moe-debug",
        task=LetterSort.Config(min_letters=4, max_letters=6),
        model=ModelConfig(
            assets="chars",
            shape=Qwen3Shape(
                vocab_size=64,
                dim=128,
                n_layers=4,
                n_heads=4,
                n_kv_heads=2,
                head_dim=32,
                hidden_dim=192,
                experts=ExpertsShape(num_experts=8, top_k=2),
                max_seq_len=512,
            ),
        ),
        supervised=SupervisedConfig(
            num_steps=150,
            batch_size=32,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=ScheduleConfig(decay="cosine", warmup_steps=10),
        ),
        algorithm=AlgorithmConfig(
            tasks_per_step=8,
            group_size=8,
            advantage_fn=grpo,
            loss_fn=ppo,
            loss_config={"clip_low": 0.2, "clip_high": 0.2},
            reduction=token_mean,
            schedule=ScheduleConfig(decay="linear", warmup_steps=2, final_factor=0.1),
        ),
        controller=ControllerConfig(num_steps=20, eval_every=0, eval_tasks=64, test_tasks=64, pass_at_k=0),
        sampling=SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=TrainerConfig(optimizer=AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=128, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    config.trainer.parallelism.data_parallel_shard_degree = 2
    config.trainer.parallelism.expert_parallel_degree = 2
    return config
