"""Model-config converters: what is refused before a start, and what one may do to the head."""

import dataclasses
import importlib.util
import subprocess
import sys

import pytest

from tests.kit.refusal import refusal
from torchtitan_rl import platform
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.model.converters import check_converters
from torchtitan_rl.model.spec import _recast, build_spec


@pytest.fixture(scope="module")
def quantization():
    import torchtitan.components.quantization as quantization

    return quantization


@pytest.mark.parametrize("name", ["Float8LinearConverter", "Float8GroupedExpertsConverter"])
def test_float8_is_refused_where_the_hardware_lacks_it(name, quantization, monkeypatch):
    monkeypatch.setattr(platform, "device_type", lambda: "cpu")
    assert refusal(check_converters, [getattr(quantization, name).Config()]) == (
        f"trainer.converters[0]={name}.Config: this cpu device has no float8; use a GPU of compute capability 8.9 or "
        "later, or leave the converter out"
    )


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_float8_needs_compute_capability_8_9(capability, has, monkeypatch):
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    monkeypatch.setattr(platform.torch.cuda, "get_device_capability", lambda: capability)
    assert platform.has_float8() == has


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_a_package_that_a_converter_needs_is_missed_before_the_start(quantization):
    message = refusal(check_converters, [quantization.Float8LinearConverter.Config(emulate=True)])
    assert message.startswith("trainer.converters[0]=Float8LinearConverter.Config: torchao is not installed")


def test_loras_converter_is_refused_in_favour_of_the_setting():
    from torchtitan.components.lora import LoRAConverter

    assert "use trainer.lora=LoRAConfig(...)" in refusal(check_converters, [LoRAConverter.Config()])


def test_what_is_no_config_of_a_converter_is_refused(quantization):
    own = "Float8LinearConverter.Config"
    converter = quantization.Float8LinearConverter
    for given in (converter, converter.Config):
        assert refusal(check_converters, [given]) == (
            f"trainer.converters[0]={given.__qualname__}: is a class, not a config of one; write {own}()"
        )
    assert refusal(check_converters, ["float8"]) == (
        "trainer.converters[0]=str: has no build() method; give a converter's config, such as X.Config()"
    )


def test_no_converters_import_nothing():
    code = (
        "import sys; from torchtitan_rl.model.converters import check_converters; check_converters([]); "
        "sys.exit('torchtitan.components' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_head_that_a_converter_replaced_becomes_ours_without_the_converters_fields():
    from torchtitan.models.common.linear import Linear

    from torchtitan_rl.model.logprob_head import LogprobHead

    class Quantized(Linear):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(Linear.Config):
            recipe: str = "rowwise"

    shape = Qwen3Shape(vocab_size=11, dim=16, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=24)
    head = build_spec(ModelConfig(shape=shape)).model.lm_head
    ours = _recast(_recast(head, Quantized.Config), LogprobHead.Config, chunk_bytes=4)
    assert (ours.in_features, ours.out_features, ours.chunk_bytes) == (16, 11, 4)
    assert ours.param_init == head.param_init


@pytest.mark.skipif(platform.device_type() != "cpu", reason="about a machine without a GPU")
def test_a_converter_imported_first_does_not_leave_torchtitan_on_a_gpu_that_is_not_there():
    code = (
        "import sys, torch, torchtitan.distributed.parallel_dims as dims; before = dims.device_type\n"
        "from torchtitan_rl import adapters; adapters.adapt_torchtitan()\n"
        "import torchtitan.distributed.utils as utils\n"
        "print(before, dims.device_type, utils.device_type, utils.device_module is torch.cpu)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.split() == ["cuda", "cpu", "cpu", "True"]
