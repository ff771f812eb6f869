"""The files PEFT reads. That PEFT computes the same from them is tests/integration/test_lora.py's."""

import json
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.weights.peft import write_peft_dir


def test_names_shapes_and_config(tmp_path):
    a = torch.randn(2, 4)
    adapters = {
        "layers.3.attention.qkv_linear.wq.weight": (a, torch.randn(8, 2), 0.5),
        "layers.3.attention.qkv_linear.wk.weight": (a, torch.randn(4, 2), 0.5),
        "layers.0.feed_forward.w2.weight": (torch.randn(2, 6), torch.randn(4, 2), 0.5),
    }
    names = Qwen3StateDictAdapter(SimpleNamespace(enable_weight_tying=True), None)
    write_peft_dir(adapters, names, LoRAConfig(rank=2, alpha=1.0), tmp_path / "new" / "adapter", base="some/base")
    held = load_file(tmp_path / "new" / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers"
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == {
        f"{prefix}.3.self_attn.q_proj.lora_A.weight": (2, 4),
        f"{prefix}.3.self_attn.q_proj.lora_B.weight": (8, 2),
        f"{prefix}.3.self_attn.k_proj.lora_A.weight": (2, 4),
        f"{prefix}.3.self_attn.k_proj.lora_B.weight": (4, 2),
        f"{prefix}.0.mlp.down_proj.lora_A.weight": (2, 6),
        f"{prefix}.0.mlp.down_proj.lora_B.weight": (4, 2),
    }
    assert torch.equal(held[f"{prefix}.3.self_attn.k_proj.lora_A.weight"], a)
    config = json.loads((tmp_path / "new" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 1.0, "LORA")
    assert config["target_modules"] == ["down_proj", "k_proj", "q_proj"]
    assert config["base_model_name_or_path"] == "some/base"


def test_of_a_model_with_a_smaller_rank_its_own_rows_are_written(tmp_path):
    """Adapters of rank 4 of which 2 rows are in use: the others are zero, and scaling is by alpha / 2."""
    a, b = torch.randn(4, 6), torch.randn(8, 4)
    a[2:], b[:, 2:] = 0.0, 0.0
    names = Qwen3StateDictAdapter(SimpleNamespace(enable_weight_tying=True), None)
    adapters = {"layers.0.feed_forward.w2.weight": (a, b, 0.5)}
    write_peft_dir(adapters, names, LoRAConfig(rank=2, alpha=1.0), tmp_path, base=None)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.0.mlp.down_proj"
    lora_a, lora_b = tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"]
    assert lora_a.shape == (2, 6) and lora_b.shape == (8, 2)
    torch.testing.assert_close(lora_b @ lora_a, b @ a)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2
