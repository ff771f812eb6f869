"""Planted faults: each breaks a line that names the part."""

import asyncio
import math

import pytest

from tests.unit.tools.certify import faults
from torchtitan_rl.families import BUILT_IN, shape_of_hf
from torchtitan_rl.tools.certify.broken_part import broken_part
from torchtitan_rl.tools.certify.certification import Certification, certify
from torchtitan_rl.tools.certify.small_config import debug_config, small_config
from torchtitan_rl.tools.certify.subject import Subject
from torchtitan_rl.tools.certify.token_checks import GreedyTokens

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}
EXPERTS = dict(
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    moe_intermediate_size=96,
    num_experts=16,
    num_experts_per_tok=4,
    norm_topk_prob=True,
)


def config_of(name):
    """The content of a small config.json."""
    family, _, kind = name.partition("+")
    changes = {"yarn": {"rope_parameters": YARN}, "moe": EXPERTS, "": {}}[kind]
    return small_config(debug_config(family) | changes)


def checks_of(stage):
    async def gather():
        return [check async for check in stage()]

    return asyncio.run(gather())


def first_broken(checks):
    return next((check for check in checks if check.broken), None)


def of_trainer(shape, hf, directory):
    """The lines of a trainer of one rank, in this process."""
    certification = Certification(subject=Subject.of(shape, hf, directory), scratch=directory)
    return certification, checks_of(certification.trainer)


@pytest.mark.whole
@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3+moe", "llama3", "qwen2", "qwen2+yarn", "qwen3_5", "gpt-oss", "deepseek-v3"]
)
def test_a_healthy_family_breaks_no_line_and_every_parameter_has_a_gradient(name, tmp_path):
    hf = config_of(name)
    certification, checks = of_trainer(shape_of_hf(hf, "m"), hf, tmp_path)
    assert len(checks) == 7 and first_broken(checks) is None
    small = {name for name, gradient in certification.one_rank.items() if not gradient.abs().max() > 1e-3}
    assert {name for name in small if not name.endswith("expert_bias_E")} == set()  # a buffer has no gradient


@pytest.mark.whole
@pytest.mark.parametrize("fault", faults.OF_TRAINER)
def test_a_fault_breaks_a_line_that_names_the_part(fault, tmp_path):
    name, family, part = faults.OF_TRAINER[fault]
    hf = config_of(name)
    _, checks = of_trainer(family.from_hf_config(hf, "m"), hf, tmp_path)
    broken = first_broken(checks)
    print(f"{fault}: {broken and broken.line}")
    assert broken is not None and (broken.part == part or part in broken.part and part != "norm")


@pytest.mark.slow
@pytest.mark.whole
def test_a_stale_tensor_breaks_the_line_of_the_sync(tmp_path):
    hf = config_of("qwen3")
    subject = Subject.of(shape_of_hf(hf, "m"), hf, tmp_path)
    broken = first_broken(checks_of(Certification(subject=subject, scratch=tmp_path, store=faults.StaleStore).engine))
    print(broken and broken.line)
    assert broken.name.startswith("weight sync: ") and broken.part == faults.StaleStore.NAME


@pytest.mark.slow
@pytest.mark.whole
def test_key_and_value_heads_of_the_wrong_queries_break_the_line_of_the_layout(tmp_path):
    hf = config_of("qwen2")
    certification, checks = of_trainer(faults.SwappedHeads.from_hf_config(hf, "m"), hf, tmp_path)
    assert first_broken(checks) is None  # one rank has no such fault
    certification.layouts = ((1, 2),)
    broken = first_broken(checks_of(certification.meshes))
    print(broken and broken.line)
    assert broken.name == "gradients: FSDP 1, TP 2 = one rank" and "attention" in broken.part
    assert math.isfinite(broken.difference)


@pytest.mark.whole
def test_vllms_own_model_is_not_run_where_it_has_a_fault(tmp_path):
    hf = config_of("qwen2") | {"hidden_size": 96}
    subject = Subject.of(shape_of_hf(hf, "m"), hf, tmp_path)
    certification = Certification(subject=subject, scratch=tmp_path, greedy=GreedyTokens.of(subject))
    alone, in_runs = checks_of(certification.vllm)
    fault = "vLLM's own Qwen2 makes every head of size dim / n_heads = 12, not of model.shape.head_dim="
    assert alone.difference is None and alone.note.startswith(fault)
    assert in_runs.difference is None and in_runs.note.startswith(f"generator.model_impl='vllm': {fault}")


@pytest.mark.parametrize("name", [family.name for family in BUILT_IN])
def test_a_healthy_family_has_no_broken_part_before_the_head(name, tmp_path):
    hf = debug_config(name)
    subject = Subject.of(shape_of_hf(hf, "m"), hf, tmp_path)
    assert broken_part(subject, subject.documents[0]) == "lm_head"


def test_a_family_without_adapters_has_a_line_that_says_so(tmp_path):
    hf = config_of("deepseek-v3")
    subject = Subject.of(shape_of_hf(hf, "m"), hf, tmp_path)
    (line,) = checks_of(Certification(subject=subject, scratch=tmp_path).adapters)
    assert line.line == "LoRA: no layer of a deepseek-v3 has adapters" and line.difference is None


@pytest.mark.whole
def test_what_a_model_raises_is_a_broken_line():
    hf = config_of("llama3")
    broken = first_broken(asyncio.run(certify(faults.HalfRotation.from_hf_config(hf, "m"), hf)))
    assert broken.name == "trainer" and "HF checkpoint conversion assumes ComplexRoPE.Config" in broken.line


@pytest.mark.whole
def test_after_a_broken_line_the_other_stages_are_not_run():
    hf = config_of("qwen2")
    _, family, part = faults.OF_TRAINER["bias dropped"]
    checks = asyncio.run(certify(family.from_hf_config(hf, "m"), hf))
    assert checks[0].broken and checks[0].part == part
    assert [check.name for check in checks[1:]] == ["engine", "vLLM's own model", "LoRA", "critic and GRPO", "layouts"]
    assert all(check.difference is None and check.note.startswith("not run") for check in checks[1:])
