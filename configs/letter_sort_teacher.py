"""A teacher for `configs/distill.py`: a Qwen3 three times the quickstart's size, taught to sort by right demonstrations.

Writes `runs/letter_sort_teacher`; there is no reinforcement.
"""

from torchtitan_rl.config import (
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
        name="letter_sort_teacher",
        task=LetterSort.Config(min_letters=4, max_letters=6, correct_demonstrations=1.0),
        model=ModelConfig(
            assets="chars",
            shape=Qwen3Shape(
                vocab_size=64,
                dim=192,
                n_layers=6,
                n_heads=6,
                n_kv_heads=3,
                head_dim=32,
                hidden_dim=576,
                max_seq_len=512,
            ),
        ),
        supervised=SupervisedConfig(
            num_steps=400,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        controller=ControllerConfig(num_steps=0, test_tasks=512, pass_at_k=0),
        sampling=SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=TrainerConfig(max_tokens_per_microbatch=16384),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
        output_dir="runs/letter_sort_teacher",
    )
    config.trainer.training.seq_len = 64
    return config
