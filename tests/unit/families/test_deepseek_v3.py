"""What is particular about DeepSeek-V3's layout: its config.json, and faults that a test must see."""

import dataclasses
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from tests.kit.refusal import refusal
from tests.kit.view import VIEW
from tests.unit.families.shapes import SHAPES
from tests.unit.families.test_families import LENGTH, logprobs, perturbed
from torchtitan_rl import adapters
from torchtitan_rl.config.meshes import LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import DeepseekV3Shape, ExpertsShape, ModelConfig
from torchtitan_rl.families import shape_of_hf
from torchtitan_rl.model.spec import build_spec, training_spec
from torchtitan_rl.validation.trainer import check_degree, check_trainer

SMALL = SHAPES["deepseek"]
PUBLISHED = dict(  # config.json of Moonlight-16B-A3B
    architectures=["DeepseekV3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    aux_loss_alpha=0.001,
    ep_size=1,
    first_k_dense_replace=1,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=11264,
    kv_lora_rank=512,
    max_position_embeddings=8192,
    model_type="deepseek_v3",
    moe_intermediate_size=1408,
    moe_layer_freq=1,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=True,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    num_nextn_predict_layers=0,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=50000.0,
    routed_scaling_factor=2.446,
    scoring_func="sigmoid",
    seq_aux=True,
    tie_word_embeddings=False,
    topk_group=1,
    topk_method="noaux_tc",
    torch_dtype="bfloat16",
    v_head_dim=128,
    vocab_size=163840,
)


def read(content):
    return shape_of_hf(content, "m")


def built(shape):
    spec = training_spec(build_spec(ModelConfig(shape=shape)), VIEW, attention="sdpa", chunk_bytes=2**20)
    model = spec.model.build()
    torch.manual_seed(0)
    model.init_weights()
    return perturbed(model)


def test_the_published_config_gives_the_sizes_and_the_count_of_parameters():
    shape = read(PUBLISHED)
    assert shape == DeepseekV3Shape(
        vocab_size=163840,
        dim=2048,
        n_layers=27,
        n_heads=16,
        n_kv_heads=16,
        head_dim=192,
        hidden_dim=1408,
        max_seq_len=8192,
        rope_theta=5e4,
        experts=ExpertsShape(num_experts=64, top_k=6),
        kv_lora_rank=512,
        rotated_dim=64,
        value_dim=128,
        dense_hidden_dim=11264,
        num_shared_experts=2,
        route_scale=2.446,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(**PUBLISHED))
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert 15.9e9 < shape.num_parameters < 16e9


@pytest.mark.parametrize(
    "key, value",
    [
        ("n_group", 8),
        ("topk_group", 4),
        ("norm_topk_prob", False),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_layer_freq", 2),
        ("rope_interleave", False),
        ("rope_scaling", {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("attention_bias", True),
    ],
    ids=str,
)
def test_a_key_that_changes_the_computation_is_refused_by_name(key, value):
    assert f"its config.json says {key}=" in refusal(read, PUBLISHED | {key: value})


@pytest.mark.parametrize("key", ["q_lora_rank", "n_group", "kv_lora_rank", "routed_scaling_factor", "n_shared_experts"])
def test_no_value_is_made_up_for_a_key_that_is_missing(key):
    without = {name: value for name, value in PUBLISHED.items() if name != key}
    assert f"its config.json has no {key}" in refusal(read, without)


FAULTS = {
    "no factor of the experts' weights": lambda s: dataclasses.replace(s, route_scale=1.0),
    "another epsilon": lambda s: dataclasses.replace(s, norm_eps=1e-3),
    "another base": lambda s: dataclasses.replace(s, rope_theta=2e4),
}
ZEROED = ("expert_bias_E", "shared_experts.w2.weight")


@pytest.mark.parametrize("fault", [*FAULTS, *ZEROED])
def test_each_part_shows_in_the_log_probabilities(fault):
    """By more than twenty times what `test_families.py` allows between this package and transformers."""
    tokens = torch.randint(0, SMALL.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    right, wrong = built(SMALL), built(FAULTS[fault](SMALL) if fault in FAULTS else SMALL)
    with torch.no_grad():
        for name, tensor in (*wrong.named_parameters(), *wrong.named_buffers()):
            if name.endswith(fault):
                tensor.zero_()
        assert (logprobs(right, tokens) - logprobs(wrong, tokens)).abs().max() > 4e-4


def test_a_bias_without_a_coefficient_stays():
    assert build_spec(ModelConfig(shape=SMALL)).post_optimizer_build_fn is None
    moving = dataclasses.replace(SMALL, experts=ExpertsShape(num_experts=8, top_k=3, load_balance_coeff=0.01))
    assert build_spec(ModelConfig(shape=moving)).post_optimizer_build_fn is not None
    assert shape_of_hf(moving.to_hf(1, 0), "m") == moving


def test_a_degree_divides_the_feed_forward_of_the_first_layers():
    shape = dataclasses.replace(SMALL, dense_hidden_dim=81)
    assert refusal(check_degree, "generator.tensor_parallel_degree", 2, shape) == (
        "generator.tensor_parallel_degree=2: must divide the model's dense_hidden_dim=81; use one of [1]"
    )
    check_degree("generator.tensor_parallel_degree", 2, dataclasses.replace(shape, n_dense_layers=0))


def test_sizes_and_settings_that_do_not_fit_are_refused():
    for changes, name in (
        ({"n_kv_heads": 2}, "n_kv_heads=2"),
        ({"value_dim": 64}, "value_dim=64"),
        ({"n_dense_layers": 3}, "n_dense_layers=3"),
    ):
        assert f"model.shape.{name}: " in refusal(partial(dataclasses.replace, SMALL, **changes))
    config = TrainerConfig(lora=LoRAConfig(target_modules=["o_proj"]))
    config.training.seq_len = 64
    message = refusal(check_trainer, "trainer", config, ModelConfig(shape=SMALL), 8)
    assert message.startswith("trainer.lora.target_modules='o_proj': is no layer of a deepseek-v3")


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's build for a GPU has no kernels for a CPU")
def test_vllms_kernel_on_a_cpu_takes_query_heads_for_tokens():
    """The reason of `own_model_fault`: vLLM's own DeepSeek-V3 passes queries of three dimensions, its Qwen2 of two.
    When this test fails, vLLM is mended: remove the fault of `DeepseekV3Shape`, and the test."""
    adapters.prepare_vllm(eager=True)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    tokens, heads, size = 8, 4, 16
    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_type": "default", "rope_theta": 1e4}
        rope = get_rope(size, max_position=64, rope_parameters=parameters, is_neox_style=False, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    queries_TNH, keys_TNH = (torch.randn(tokens, n, size, generator=draw) for n in (heads, 1))
    positions = torch.arange(tokens)

    def on_cpu(queries):
        rotated, _ = rope.forward_cpu(positions, queries.clone(), keys_TNH.clone())  # writes into its arguments
        return rotated.view(tokens, heads, size)

    right, _ = rope.forward_native(positions, queries_TNH, keys_TNH)
    torch.testing.assert_close(on_cpu(queries_TNH.flatten(1)), right)
    wrong = on_cpu(queries_TNH)
    assert (wrong - right).abs().max() > 1
    # As many heads are rotated as there are tokens, each by the position that is its place among all heads.
    first, _ = rope.forward_native(positions, queries_TNH.flatten(0, 1)[:tokens], keys_TNH)
    torch.testing.assert_close(wrong.flatten(0, 1)[:tokens], first)
    assert torch.equal(wrong.flatten(0, 1)[tokens:], queries_TNH.flatten(0, 1)[tokens:])


def test_the_fault_of_vllms_own_model_is_that_of_a_cpu():
    assert SMALL.own_model_fault("cpu").startswith("on a CPU vLLM's own DeepSeek-V3 rotates most query heads")
    assert SMALL.own_model_fault("cuda") == ""
