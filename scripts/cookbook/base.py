"""A Qwen3 of 0.8M parameters that says in three forms whether a number is even: docs/dev/tinker_cookbook.md.

Run in the directory that stand_ins.py wrote: the paths are relative to it. The warm start is the whole run. One
demonstration in four is in the box that the recipes ask for.
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets
from torchtitan_rl.tasks.dataset import Dataset

CONTEXT = 4096  # what multi_teacher asks for as max_tokens; ten turns of guess_number have some 2,000
SHAPE = rl.Qwen3Shape(
    vocab_size=640, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=CONTEXT
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="cookbook-base",
        task=Dataset.Config(train="warm_start.jsonl", demonstration="demonstration"),
        model=rl.ModelConfig(assets="Qwen/Qwen3-4B-Instruct-2507", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=100,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=presets.grpo(tasks_per_step=16),
        controller=rl.ControllerConfig(num_steps=0, eval_tasks=64, test_tasks=64, pass_at_k=0),
        sampling=rl.SamplingConfig(max_prompt_tokens=240, max_tokens=16),
        trainer=rl.TrainerConfig(max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=CONTEXT, max_num_seqs=128, kv_cache_gib=0.5),
    )
    config.trainer.training.seq_len = CONTEXT
    return config
