"""A teacher for `configs/distill.py`: a Qwen3 three times the quickstart's size, shown right demonstrations of sorting.

Writes `runs/letter_sort_teacher`; there is no reinforcement.
"""

import torchtitan_rl.config as rl
from torchtitan_rl.tasks.letter_sort import LetterSort

SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=192, n_layers=6, n_heads=6, n_kv_heads=3, head_dim=32, hidden_dim=576, max_seq_len=512
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="letter_sort_teacher",
        task=LetterSort.Config(min_letters=4, max_letters=6, correct_demonstrations=1.0),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=400,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        controller=rl.ControllerConfig(num_steps=0, test_tasks=512, pass_at_k=0),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=rl.TrainerConfig(max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
        output_dir="runs/letter_sort_teacher",
    )
    config.trainer.training.seq_len = 64
    return config
