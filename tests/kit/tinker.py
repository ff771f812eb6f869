"""What a Tinker server serves, over a directory and without any stack."""

from pathlib import Path

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.serve.tinker.service import Served


def served(directory: Path, **fields) -> Served:
    """A model of 64 tokens and as many positions that trains adapters of rank 8 and less."""
    return Served(
        **{
            "base_model": "base",
            "base_dir": directory,
            "family": "qwen3",
            "vocab_size": 64,
            "context_tokens": 64,
            "trained_tokens": 64,
            "lora": LoRAConfig(rank=8, alpha=8.0),
            "end_tokens": {"eos": 1, "pad": 0},
            "write_form": lambda checkpoint, source, target: None,
        }
        | fields
    )
