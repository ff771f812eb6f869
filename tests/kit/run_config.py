"""A small valid config."""

from torchtitan_rl.algorithm.advantages import grpo
from torchtitan_rl.algorithm.losses import ppo
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.meshes import AdamWConfig, GeneratorConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.config.run import RunConfig, SamplingConfig
from torchtitan_rl.tasks.letter_sort import LetterSort


def run_config() -> RunConfig:
    """Letter sort with 4 heads, 2 KV heads, 64 positions, at most 8 + 12 tokens."""
    config = RunConfig(
        name="unit",
        task=LetterSort.Config(min_letters=4, max_letters=6),
        model=ModelConfig(
            assets="chars",
            shape=Qwen3Shape(
                vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=24, max_seq_len=64
            ),
        ),
        algorithm=AlgorithmConfig(advantage_fn=grpo, loss_fn=ppo, loss_config={"clip_low": 0.2, "clip_high": 0.28}),
        sampling=SamplingConfig(max_prompt_tokens=8, max_tokens=12),
        trainer=TrainerConfig(optimizer=AdamWConfig(lr=1e-3)),
        generator=GeneratorConfig(max_model_len=32),
    )
    config.trainer.training.seq_len = 32
    return config
