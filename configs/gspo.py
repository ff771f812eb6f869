"""GSPO: one ratio per sequence, clipped within narrow bounds (wider than the paper's: sequences here are short); on the
quickstart's task and warm start (arXiv:2507.18071).

A batch is two optimizer steps, so that ratios are not all 1.
"""

from torchtitan_rl.algorithm.advantages import grpo
from torchtitan_rl.algorithm.losses import gspo
from torchtitan_rl.algorithm.reductions import sequence_mean
from torchtitan_rl.config import (
    AdamWConfig,
    AlgorithmConfig,
    ControllerConfig,
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
        name="gspo",
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
                hidden_dim=384,
                max_seq_len=512,
            ),
        ),
        supervised=SupervisedConfig(
            num_steps=300,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=AlgorithmConfig(
            tasks_per_step=64,
            tasks_per_minibatch=32,
            group_size=8,
            advantage_fn=grpo,
            loss_fn=gspo,
            loss_config={"clip_low": 0.03, "clip_high": 0.04},
            reduction=sequence_mean,
            schedule=ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=ControllerConfig(num_steps=160, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=TrainerConfig(optimizer=AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    return config
