"""Adapters as a directory that Hugging Face's PEFT loads: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.model.lora import Adapters

__all__ = ["write_peft_dir"]


def write_peft_dir(adapters: Adapters, hf_adapter, lora: LoRAConfig, directory: Path, *, base: str | None) -> None:
    """Writes unsharded adapters under Hugging Face's names.

    `hf_adapter` is torchtitan's state-dict adapter of the model, `base` the directory of the base weights (None: PEFT's
    user has to name the directory). PEFT too scales by alpha / rank. Of adapters with more rows than `lora.rank` only
    the first are written: the rest are zero (`actors.adapter_slots`).
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b, _) in adapters.items():
        # B has the rows of the weight, in an order that may differ between torchtitan and Hugging Face.
        ((hf_name, hf_b),) = hf_adapter.to_hf({name: b}).items()
        layer = f"base_model.model.{hf_name.removesuffix('.weight')}"
        tensors[f"{layer}.lora_A.weight"] = a[: lora.rank].cpu().contiguous().clone()  # query, key and value share one
        tensors[f"{layer}.lora_B.weight"] = hf_b[:, : lora.rank].cpu().contiguous().clone()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": base,
                "r": lora.rank,
                "lora_alpha": lora.alpha,
                "lora_dropout": 0.0,
                "bias": "none",
                "fan_in_fan_out": False,
                "inference_mode": True,
                "target_modules": sorted({name.split(".")[-3] for name in tensors}),
            },
            indent=1,
        )
    )
