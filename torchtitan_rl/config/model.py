"""Which model a run trains."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_rl.families import (
    DecoderShape,
    DeepseekV3Shape,
    ExpertsShape,
    GptOssShape,
    Llama3Shape,
    Qwen2Shape,
    Qwen3Shape,
    Qwen35Shape,
)

__all__ = [
    "ModelConfig",
    "DeepseekV3Shape",
    "ExpertsShape",
    "GptOssShape",
    "Llama3Shape",
    "Qwen2Shape",
    "Qwen3Shape",
    "Qwen35Shape",
]


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """A model: its sizes, and the directory of its files."""

    assets: str = "chars"
    """A Hugging Face directory with a tokenizer, or one of the package's tokenizers, without weights: `"chars"`, and
    `"bytes"` with a chat template for tools. The directory needs a config.json unless `shape` or `flavor` is set.
    Safetensors in the directory are the initial weights; without safetensors the initial weights are random."""
    shape: DecoderShape | None = None
    """Sizes of the model, of the class of its family, such as `Qwen3Shape`; None: those of `flavor`, or of the
    config.json in `assets`, which says the family too."""
    family: type[DecoderShape] | None = None
    """A family of your own that the config.json in `assets` is of; None: one of the package's. See docs/families.md."""
    flavor: str | None = None
    """Name of a standard Qwen3 of torchtitan, such as `"0.6B"`, that gives the sizes; None: see `shape`."""
    pretrained: bool = False
    """True refuses to start from random weights: `assets` must hold safetensors."""
    float32_head: bool = False
    """True: trainers and generators compute logits in float32 where the model is in bfloat16, from the same hidden
    states and head. Logits of bfloat16 have 8 bits each, a large part of the mismatch of trainer and generator; see
    docs/numerics.md."""
