"""The work that a bench gives to both of its sides: a model, prompts, and how long each completion is."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.families import DecoderShape, Llama3Shape, Qwen2Shape, Qwen3Shape
from torchtitan_rl.model.files import BUILTIN_ASSETS, write_model_dir
from torchtitan_rl.model.shape import kv_bytes_per_token
from torchtitan_rl.tools.certify.reference_model import ReferenceModel

__all__ = ["DTYPES", "EOS", "LENGTHS", "PROMPT_TOKENS", "SHAPES", "SIZES", "Dtype", "Lengths", "Workload"]

Dtype = Literal["float32", "bfloat16"]
Lengths = Literal["fixed", "skewed"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
LENGTHS: tuple[Lengths, ...] = ("fixed", "skewed")

SHAPES: dict[str, dict[str, DecoderShape]] = {
    "qwen3": {
        "3m": Qwen3Shape(
            vocab_size=64, dim=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=768, max_seq_len=512
        ),
        "32m": Qwen3Shape(
            vocab_size=264, dim=512, n_layers=10, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=1536, max_seq_len=512
        ),
        "0.6b": Qwen3Shape(
            vocab_size=151936, dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, hidden_dim=3072,
            max_seq_len=512,
        ),
    },
    "llama3": {
        "3m": Llama3Shape(
            vocab_size=64, dim=256, n_layers=4, n_heads=4, n_kv_heads=1, head_dim=64, hidden_dim=800, max_seq_len=512
        ),
        "32m": Llama3Shape(
            vocab_size=264, dim=512, n_layers=10, n_heads=8, n_kv_heads=2, head_dim=64, hidden_dim=1600, max_seq_len=512
        ),
    },
    "qwen2": {
        "3m": Qwen2Shape(
            vocab_size=64, dim=256, n_layers=4, n_heads=4, n_kv_heads=1, head_dim=64, hidden_dim=800, max_seq_len=512
        ),
        "32m": Qwen2Shape(
            vocab_size=264, dim=512, n_layers=10, n_heads=8, n_kv_heads=2, head_dim=64, hidden_dim=1600, max_seq_len=512
        ),
    },
}  # fmt: skip
"""Family -> size -> a model with about so many parameters. The weights are random. In Llama 3 and Qwen2.5 four query
heads share a key head, in Qwen3 two; a larger feed-forward makes up for it."""
SIZES = tuple(SHAPES["qwen3"])

EOS, PAD = 1, 0
PROMPT_TOKENS = 6
LONGEST = 256
"""Tokens of the longest completion."""
_STOPS = 0.0146
"""Chance that a token is the last one: lengths are geometric, cut at `LONGEST`, and have a mean of 67 tokens."""
_CACHE_BLOCK = 128
"""vLLM's cache on a CPU has blocks of this many tokens, more than on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model in one dtype, and a batch of completions. Example: `Workload(size="3m", dtype="float32",
    shape=SHAPES["qwen3"]["3m"])`."""

    size: str
    """The name of `shape`, for reports."""
    shape: DecoderShape
    dtype: Dtype
    """Of the generators' weights, and of what trainers compute in."""
    num_prompts: int = 16
    group_size: int = 8
    """Completions of one prompt."""
    fixed_tokens: int = 64
    """Of each completion with fixed lengths; at most `LONGEST`."""

    @property
    def name(self) -> str:
        """Of the model, for reports: its size, and its family unless that is Qwen3."""
        return self.size if self.shape.name == Qwen3Shape.name else f"{self.shape.name} {self.size}"

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that may be asked for."""
        return PROMPT_TOKENS + LONGEST

    def completion_lengths(self, lengths: Lengths) -> list[int]:
        """Tokens of each completion, the same for every side and every repeat. `fixed`: `fixed_tokens`. `skewed`: as a
        random model ends its completions, most of them short and a few at 256: the distribution's quantiles, shuffled.
        """
        if lengths == "fixed":
            return [self.fixed_tokens] * self.num_completions
        longer = [
            (index + 0.5) / self.num_completions for index in range(self.num_completions)
        ]  # chance of a longer one
        drawn = [min(LONGEST, 1 + math.floor(math.log(chance) / math.log(1 - _STOPS))) for chance in longer]
        random.Random(0).shuffle(drawn)
        return drawn

    def prompts(self, repeat: int) -> list[list[int]]:
        """The prompt of each completion. Another repeat has other prompts, which no prefix cache knows."""
        draw = random.Random(repeat)
        drawn = [
            [draw.randrange(3, self.shape.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(self.num_prompts)
        ]
        return [prompt for prompt in drawn for _ in range(self.group_size)]

    def generator(self) -> GeneratorConfig:
        """A generator that decodes all completions at once, with a cache that holds them."""
        config = GeneratorConfig(
            dtype=self.dtype,
            max_model_len=self.context,
            max_num_seqs=self.num_completions,
            num_spares=0,
            max_replica_restarts=0,
        )
        longest = max((self.completion_lengths(lengths) for lengths in LENGTHS), key=sum)
        blocks = sum(math.ceil((PROMPT_TOKENS + length) / _CACHE_BLOCK) for length in longest)
        num_bytes = (blocks + 1) * _CACHE_BLOCK * kv_bytes_per_token(config, self.shape)
        config.kv_cache_gib = max(0.25, num_bytes / 2**30)
        return config

    def write_model(self, directory: Path) -> None:
        """Draws the weights and writes them, in float32, with config.json and tokenizer."""
        write_model_dir(directory, self.shape, BUILTIN_ASSETS["chars"], eos=EOS, pad=PAD)
        ReferenceModel.drawn(self.shape.to_hf(EOS, PAD), directory)
