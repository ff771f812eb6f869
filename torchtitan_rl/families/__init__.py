"""Families of models, one file each: what the package knows about Qwen3, Llama 3, Qwen2.5, Qwen3.5, gpt-oss and others.

Outside of this folder a model is a `DecoderShape`, and for the engine's plan a list of layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtitan_rl.families.decoder import DecoderShape, ExpertsShape, read_config_json
from torchtitan_rl.families.deepseek_v3 import DeepseekV3Shape
from torchtitan_rl.families.gpt_oss import GptOssShape
from torchtitan_rl.families.llama3 import Llama3Shape
from torchtitan_rl.families.qwen2 import Qwen2Shape
from torchtitan_rl.families.qwen3 import Qwen3Shape
from torchtitan_rl.families.qwen3_5 import Qwen35Shape

__all__ = [
    "BUILT_IN",
    "DecoderShape",
    "DeepseekV3Shape",
    "ExpertsShape",
    "GptOssShape",
    "Llama3Shape",
    "Qwen2Shape",
    "Qwen3Shape",
    "Qwen35Shape",
    "shape_of_directory",
    "shape_of_hf",
]

BUILT_IN: tuple[type[DecoderShape], ...] = (
    Qwen3Shape,
    Llama3Shape,
    Qwen2Shape,
    Qwen35Shape,
    GptOssShape,
    DeepseekV3Shape,
)


def shape_of_hf(hf: dict[str, Any], where: str, family: type[DecoderShape] | None = None) -> DecoderShape:
    """The shape that the content of a `config.json` describes; of `family`, or of a built-in one. Raises ValueError,
    beginning with `where`, for a model of no family and for one that its family does not compute."""
    if family is not None:
        return family.from_hf_config(hf, where)
    kind = hf.get("model_type")
    for family in BUILT_IN:
        if kind in family.model_types:
            return family.from_hf_config(hf, where)
    known = ", ".join(f"{family.name} ({' and '.join(family.model_types)})" for family in BUILT_IN)
    raise ValueError(
        f"{where}: its config.json says model_type={kind!r}, which is of no family of this package: {known}; "
        "docs/families.md shows how to add one as model.family"
    )


def shape_of_directory(directory: Path, family: type[DecoderShape] | None = None) -> DecoderShape:
    """The shape of the model in a Hugging Face directory. Raises ValueError as `shape_of_hf` does."""
    where = f"model.assets={str(directory)!r}"
    return shape_of_hf(read_config_json(directory / "config.json", where), where, family)
