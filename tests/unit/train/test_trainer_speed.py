"""Tokens per second of a device, and the share of its peak."""

import pytest

from tests.integration.conftest import ROOT
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.model.flops import training_flops
from torchtitan_rl.train.step_metrics import StepMetrics
from torchtitan_rl.train.trainer_speed import TrainerSpeed, peak_flops


def config(dtype: str = "bfloat16"):
    made = load_config(str(ROOT / "configs" / "quickstart.py"))
    made.trainer.training.mixed_precision_param = dtype
    made.trainer.parallelism.data_parallel_shard_degree = 2
    return made


def test_tokens_are_those_of_one_device():
    line = TrainerSpeed.of(config(), "").metrics([30, 10], 5.0)
    assert line == {"perf/tokens_per_second_per_device": 4.0}  # 40 tokens, 5 s, 2 ranks; a CPU's peak is not known


def test_utilisation_is_the_share_of_the_peak_of_all_devices():
    speed = TrainerSpeed.of(config(), "NVIDIA A100-SXM4-80GB")
    assert speed.peak_flops == 312e12
    expected = training_flops(speed.shape, [30, 10]) / (5.0 * 2 * 312e12)
    assert speed.metrics([30, 10], 5.0)["perf/mfu"] == pytest.approx(expected, rel=1e-12)


def test_with_adapters_the_frozen_matrices_have_no_gradient():
    with_adapters = config()
    with_adapters.trainer.lora = LoRAConfig()
    whole, adapted = (TrainerSpeed.of(c, "NVIDIA A100-SXM4-80GB").metrics([8], 1.0) for c in (config(), with_adapters))
    assert adapted["perf/mfu"] == pytest.approx(whole["perf/mfu"] * 2 / 3)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_peak_is_known_or_there_is_none(name, peak):
    assert peak_flops(name) == peak


def test_peaks_are_those_of_bfloat16():
    assert TrainerSpeed.of(config("float32"), "NVIDIA H100 80GB HBM3").peak_flops is None


def test_a_line_without_known_devices_has_no_speed():
    assert StepMetrics().speed(None) == {}
