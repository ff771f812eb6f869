"""`torchtitan-rl certify`: a family by the command, and what is refused before anything starts."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import Olmo2Config

from tests.integration.conftest import ROOT
from tests.integration.leftovers import nothing_left
from torchtitan_rl.tools.certify.small_config import debug_config

pytestmark = pytest.mark.whole

STAGES = (
    "weights",
    "gradients",
    "engine (torchtitan)",
    "weight sync",
    "prefix cache",
    "export in vLLM",
    "LoRA",
    "critic",
)


LEFT_OUT = {
    "qwen2": {},
    "deepseek-v3": {
        "greedy tokens: export in vLLM = transformers": "on a CPU vLLM's own DeepSeek-V3 rotates most query heads",
        "engine (vllm)": "generator.model_impl='vllm': on a CPU vLLM's own DeepSeek-V3 rotates most query heads",
        "LoRA": "no layer of a deepseek-v3 has adapters",
    },
}
"""Of each family on a CPU, the lines that are not run and how their reasons begin; beside the layout of four
processes."""
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU leaves out other lines")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", pytest.param("deepseek-v3", marks=ON_CPU)])
def test_a_family_is_certified_by_the_command(family, tmp_path):
    command = [sys.executable, "-m", "torchtitan_rl.cli", "certify", family, "--json", "--output", str(tmp_path)]
    with nothing_left():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "certificate.json").read_text())
    assert data == json.loads(done.stdout)
    assert data["ok"] and data["family"] == family and len(data["versions"]) == 4 and len(data["config_sha256"]) == 64
    names = " ".join(check["name"] for check in data["checks"])
    assert all(stage in names for stage in STAGES) and "FSDP 1, TP 2" in names
    left_out = {check["name"]: check["note"] for check in data["checks"] if check["ok"] is None}
    assert left_out.pop("gradients: FSDP 2, TP 2 = one rank") == "four processes: --layouts 2x2"
    assert left_out.keys() == LEFT_OUT[family].keys()
    assert all(note.startswith(LEFT_OUT[family][name]) for name, note in left_out.items())
    assert all(check["difference"] <= check["tolerance"] for check in data["checks"] if check["ok"])


@pytest.mark.slow
def test_a_family_in_a_file_of_a_user_is_certified(tmp_path):
    Olmo2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, eos_token_id=1).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "torchtitan_rl.cli", "certify", str(tmp_path)]
    command += ["--family", "tests/unit/families/olmo2.py:Olmo2Shape"]
    with nothing_left():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    checks = json.loads((tmp_path / "certificate.json").read_text())["checks"]
    names = " ".join(check["name"] for check in checks)
    assert all(stage in names for stage in STAGES)
    left_out = [check["name"] for check in checks if check["ok"] is None]
    assert left_out[-2:] == ["gradients: FSDP 1, TP 2 = one rank", "gradients: FSDP 2, TP 2 = one rank"]
    assert all("vLLM" in name or "vllm" in name for name in left_out[:-2])


def test_what_is_no_model_is_refused(here, tmp_path):
    assert "is neither a directory nor a family of this package" in here("certify", "qwen4").stderr
    assert "has no config.json" in here("certify", str(tmp_path)).stderr
    assert "names no file" in here("certify", "qwen3", "--family", "mine:Mine").stderr


def test_a_model_that_a_family_does_not_compute_is_refused_by_its_key(here, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(debug_config("qwen2") | {"hidden_act": "gelu"}))
    done = here("certify", str(tmp_path))
    assert done.returncode == 1 and "config.json says hidden_act='gelu'" in done.stderr
    assert not (tmp_path / "certificate.json").exists()


def test_train_says_once_that_a_directory_has_no_certificate(here, tmp_path):
    from torchtitan_rl.families import shape_of_hf
    from torchtitan_rl.model.files import BUILTIN_ASSETS, write_model_dir

    shape = shape_of_hf(debug_config("qwen3") | {"max_position_embeddings": 512}, "m")
    write_model_dir(tmp_path, shape, BUILTIN_ASSETS["chars"], eos=1, pad=0)
    quickstart = str(ROOT / "configs" / "quickstart.py")
    done = here("train", quickstart, "--dry-run", "--model.assets", str(tmp_path), "--model.shape", "None")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no certificate.json") == 1
    assert "certificate" not in here("train", quickstart, "--dry-run").stderr
