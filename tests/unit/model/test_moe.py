"""Mixtures of experts: sizes, refusals, the experts' arithmetic, and the model against transformers' Qwen3 MoE."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.kit.refusal import refusal
from tests.kit.view import VIEW
from torchtitan_rl import platform
from torchtitan_rl.config.load import apply_overrides
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ExpertsShape, ModelConfig, Qwen3Shape
from torchtitan_rl.config.run import RunConfig, SamplingConfig
from torchtitan_rl.model.experts import Experts, Gate
from torchtitan_rl.model.files import assets_dir, write_model_dir
from torchtitan_rl.model.memory import layer_activations
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.model.spec import build_spec, training_spec
from torchtitan_rl.model.train_step import head_outputs
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.types import Microbatch
from torchtitan_rl.validation.run import validate

CPU = torch.device("cpu")


def tiny(**changes):
    sizes = dict(
        vocab_size=11,
        dim=16,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        hidden_dim=24,
        max_seq_len=32,
        experts=ExpertsShape(num_experts=6, top_k=2),
    )
    return Qwen3Shape(**{**sizes, **changes})


def for_training(shape):
    return training_spec(build_spec(ModelConfig(shape=shape)), VIEW, attention="sdpa", chunk_bytes=4 * 4 * 11)


def with_random_weights(spec, seed=0):
    """The built model, with weights large enough for every part of it to matter."""
    model = spec.model.build()
    model.init_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(around + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


# Sizes.


def test_parameters_by_hand():
    # Per layer: attention 1024 + 512 + 16 and norms 32 as in a dense one; 6 experts of 3 x 16 x 24; a router of 6 x 16.
    layer = 1024 + 512 + 16 + 32 + 6 * 1152 + 96
    assert tiny().num_parameters == 11 * 16 + 2 * layer + 16 == 17_376
    model = build_spec(ModelConfig(shape=tiny())).model.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == 17_376


@pytest.mark.parametrize("coeff", [None, 0.01])
def test_a_shape_survives_a_hugging_face_config(coeff, tmp_path):
    shape = tiny(experts=ExpertsShape(num_experts=6, top_k=2, load_balance_coeff=coeff))
    (tmp_path / "config.json").write_text(json.dumps(shape.to_hf(1, 0)))
    assert resolve_shape(ModelConfig(assets=str(tmp_path))) == shape
    assert Qwen3Shape.from_hf_config(Qwen3MoeConfig(**shape.to_hf(1, 0)).to_dict(), "model") == shape


def test_the_30b_flavour_is_the_model_of_that_name(tmp_path):
    # As published; intermediate_size is of dense layers, of which there are none.
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3_moe",
                "vocab_size": 151936,
                "hidden_size": 2048,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "rope_theta": 1000000.0,
                "max_position_embeddings": 40960,
                "tie_word_embeddings": False,
                "rms_norm_eps": 1e-6,
            }
        )
    )
    shape = resolve_shape(ModelConfig(assets=str(tmp_path)))
    assert shape == Qwen3Shape.of_flavor("30B-A3B")
    assert shape.num_parameters == 30_532_122_624


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"norm_topk_prob": False}, "says norm_topk_prob=False; only a Qwen3 with norm_topk_prob=True is supported"),
        ({"mlp_only_layers": [0]}, "says mlp_only_layers=[0]; only a Qwen3 with mlp_only_layers=[] is supported"),
        (
            {"decoder_sparse_step": 2},
            "says decoder_sparse_step=2; only a Qwen3 with decoder_sparse_step=1 is supported",
        ),
        ({"num_experts": ...}, "has no num_experts; fetch the directory again"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mixture_of_another_kind_is_refused(changes, complaint, tmp_path):
    content = {name: value for name, value in {**tiny().to_hf(1, 0), **changes}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert refusal(resolve_shape, ModelConfig(assets=str(tmp_path))) == (
        f"model.assets={str(tmp_path)!r}: its config.json {complaint}"
    )


# The experts' arithmetic.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_multiply_in_the_dtype_of_their_input(dtype):
    experts = Experts.Config(dim=8, hidden_dim=16, num_experts=3).build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    rows = torch.randn(5, 8, generator=generator).to(dtype).requires_grad_()
    out = experts(rows, torch.tensor([2, 0, 3]))  # the second expert has no row
    out.float().square().sum().backward()
    got, got_rows = {name: weight.grad.clone() for name, weight in experts.named_parameters()}, rows.grad.clone()
    experts.zero_grad()
    rows.grad = None
    expected = torch.cat(
        [
            (F.silu(part @ w1.to(dtype).T) * (part @ w3.to(dtype).T)) @ w2.to(dtype).T
            for part, w1, w2, w3 in zip(rows.split([2, 0, 3]), experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)
        ]
    )
    expected.float().square().sum().backward()
    assert out.dtype == dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out, expected, **tolerance)
    torch.testing.assert_close(got_rows, rows.grad, **tolerance)
    for name, weight in experts.named_parameters():
        torch.testing.assert_close(got[name], weight.grad, **tolerance)
    assert not got["w1_EFD"][1].any() and got["w1_EFD"][0].any()


def test_a_gate_scores_in_fp32_whatever_the_dtype():
    gate = Gate.Config(in_features=64, out_features=4).build().bfloat16()
    with torch.no_grad():
        gate.weight.copy_(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    scores = gate(x)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), x.double() @ gate.weight.double().T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_trainers_model_is_transformers_qwen3_moe(tie_embeddings, tmp_path):
    from safetensors.torch import save_file

    shape = tiny(tie_embeddings=tie_embeddings)
    spec = for_training(shape)
    model = with_random_weights(spec)
    state = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in state.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    (tmp_path / "config.json").write_text(json.dumps(shape.to_hf(1, 0)))
    reference, info = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]

    tokens, vocab = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 10, 0, 7, 8]), shape.vocab_size
    with torch.no_grad():
        expected_LV = reference.eval()(tokens[None]).logits[0].log_softmax(-1)
        batch = Microbatch(  # the document once per token of the vocabulary, scored against that token
            tokens_T=tokens.repeat(vocab),
            target_tokens_T=torch.arange(vocab).repeat_interleave(len(tokens)),
            lengths=[len(tokens)] * vocab,
            loss_inputs={},
        )
        logprobs_T = head_outputs(model, batch, CPU, temperature=1.0)["policy_logprobs"]
    torch.testing.assert_close(logprobs_T.view(vocab, -1).T, expected_LV, rtol=0, atol=1e-4)
    assert expected_LV.std() > 0.5  # a model that says something, so that agreement means something


@pytest.mark.parametrize("coeff", [None, 0.01])
def test_weights_survive_hugging_faces_names(coeff):
    spec = for_training(tiny(experts=ExpertsShape(num_experts=6, top_k=2, load_balance_coeff=coeff)))
    state = with_random_weights(spec).state_dict()
    biases = [name for name in state if name.endswith("expert_bias_E")]
    assert len(biases) == (0 if coeff is None else 2)
    for name in biases:
        state[name] = torch.arange(6.0)
    adapter = spec.state_dict_adapter(spec.model, None)
    back = adapter.from_hf(adapter.to_hf(dict(state)))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


# The generator's plan.


@pytest.fixture(scope="module")
def plan():
    """The module, imported once and late: it needs vLLM, which takes seconds."""
    from torchtitan_rl.engine import plan as module

    return module


@pytest.fixture(scope="module")
def layers():
    """The module, imported late for the same reason."""
    from torchtitan_rl.engine import layers as module

    return module


def test_a_generator_rank_has_every_expert_and_its_share_of_their_features(plan):
    from torchtitan_rl.engine import slices

    shared = build_spec(ModelConfig(shape=tiny()))
    spec = plan.generator_spec(shared, 2)
    for layer, whole in zip(spec.model.layers, shared.model.layers):
        routed = layer.moe.routed_experts
        assert isinstance(routed, slices.SlicedExperts.Config)
        assert isinstance(routed.inner_experts, Experts.Config) and isinstance(layer.moe.router.gate, Gate.Config)
        assert (routed.inner_experts.num_experts, routed.inner_experts.hidden_dim) == (6, 12)
        assert repr(layer.moe.router.to_dict()) == repr(whole.moe.router.to_dict())
        assert whole.moe.routed_experts.inner_experts.hidden_dim == 24
    alone = plan.generator_spec(shared, 1)
    assert not isinstance(alone.model.layers[0].moe.routed_experts, slices.SlicedExperts.Config)
    with pytest.raises(ValueError, match="generator.tensor_parallel_degree=2: must divide the model's hidden_dim=25"):
        plan.generator_spec(build_spec(ModelConfig(shape=tiny(hidden_dim=25))), 2)


def test_slices_of_experts_sum_to_the_whole(layers):
    layer = with_random_weights(for_training(tiny())).layers["0"].moe
    part = build_spec(ModelConfig(shape=tiny(hidden_dim=12))).model.layers[0].moe.build().eval()
    x_BLD = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, parts = layer(x_BLD), []
        for rank in range(2):
            part.load_state_dict(
                {
                    name: layers.shard_for_rank(f"layers.0.moe.{name}", tensor, rank, 2)
                    for name, tensor in layer.state_dict().items()
                }
            )
            parts.append(part(x_BLD))
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-5)
    assert whole.std() > 0.1 and not torch.allclose(parts[0], parts[1], atol=0.1)


# What a run's config may say.


def run_config(**shape):
    config = RunConfig(
        name="unit",
        task=LetterSort.Config(min_letters=4, max_letters=6),
        model=ModelConfig(assets="chars", shape=tiny(**{"vocab_size": 64, "max_seq_len": 64, "head_dim": 32, **shape})),
        sampling=SamplingConfig(max_prompt_tokens=8, max_tokens=12),
        generator=GeneratorConfig(dtype="float32", max_model_len=32),
    )
    config.trainer.training.seq_len = 32
    return config


def invalid(*overrides, **shape):
    config = run_config(**shape)
    apply_overrides(config, list(overrides))
    return refusal(validate, config)


EP = "--trainer.parallelism.expert-parallel-degree"
DP = "--trainer.parallelism.data-parallel-shard-degree"
TP = "--trainer.parallelism.tensor-parallel-degree"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [EP, "2", DP, "2"],
        [EP, "2", TP, "2"],
        [EP, "2", DP, "4"],
        [EP, "2", DP, "2", TP, "2"],
        ["--generator.tensor-parallel-degree", "2"],
        ["--model.shape.experts.num-experts", "4"],
    ],
)
def test_layouts_that_experts_allow(overrides):
    config = run_config()
    apply_overrides(config, overrides)
    validate(config)


@pytest.mark.parametrize(
    ("overrides", "degree", "ranks", "fits"),
    [
        ([EP, "2"], 2, 1, [1]),
        ([EP, "3", DP, "4"], 3, 4, [1, 2]),
        ([EP, "4", DP, "4"], 4, 4, [1, 2]),  # four ranks, but six experts
        ([EP, "2", "--trainer.parallelism.data-parallel-replicate-degree", "2"], 2, 1, [1]),
    ],
)
def test_an_expert_parallel_degree_that_does_not_fit(overrides, degree, ranks, fits):
    assert invalid(*overrides) == (
        f"trainer.parallelism.expert_parallel_degree={degree}: must divide the model's num_experts=6 and "
        f"data_parallel_shard_degree x tensor_parallel_degree = {ranks}, whose ranks it uses; use one of {fits}"
    )


def test_expert_parallelism_without_experts():
    assert invalid(EP, "2", DP, "2", experts=None) == (
        "trainer.parallelism.expert_parallel_degree=2: the model has no experts; use 1"
    )
    assert invalid(EP, "0") == "trainer.parallelism.expert_parallel_degree=0: must be at least 1"


@pytest.mark.parametrize(("top_k", "bound"), [(0, "at least 1"), (7, "at most num_experts=6")])
def test_a_number_of_experts_per_token_that_there_is_not(top_k, bound):
    message = f"model.shape.experts.top_k={top_k}: must be {bound}"
    assert invalid(experts=ExpertsShape(num_experts=6, top_k=top_k)) == message


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["--trainer.parallelism.data-parallel-replicate-degree", "2"],
            "data_parallel_replicate_degree=2: a checkpoint's experts cannot be read into replicas; use 1, and a "
            "larger data_parallel_shard_degree",
        ),
        (
            [DP, "4"],
            "data_parallel_shard_degree=4: a checkpoint's num_experts=6 cannot be read into 4 equal parts; use a "
            "degree that divides them",
        ),
    ],
)
def test_layouts_that_a_checkpoint_cannot_be_read_into(overrides, complaint, tmp_path):
    config = run_config()
    apply_overrides(config, overrides)
    validate(config)  # random weights can
    write_model_dir(tmp_path, config.model.shape, assets_dir(config.model), eos=1, pad=0)
    (tmp_path / "model.safetensors").touch()
    config.model = ModelConfig(assets=str(tmp_path))
    assert refusal(validate, config) == f"trainer.parallelism.{complaint}"


def test_vllms_own_model_is_for_dense_models():
    assert invalid("--generator.model-impl", "vllm") == (
        "generator.model_impl='vllm': is for dense models only; use 'torchtitan'"
    )


def test_experts_that_ask_the_host_are_not_captured(monkeypatch):
    monkeypatch.setattr(platform, "experts_ask_the_host", lambda dtype: dtype == "float32")
    assert invalid("--generator.enforce-eager", "False", "--generator.dtype", "float32") == (
        "generator.enforce_eager=False: experts in float32 are multiplied on this GPU with the host's help, which a "
        "CUDA graph cannot capture; use True"
    )


def test_experts_are_not_compiled():
    assert invalid("--generator.compile") == (
        "generator.compile=True: torch's compiler knows the matrix product of a qwen3's experts in bfloat16 alone, and "
        "that is not tested; use False"
    )


def test_sizes_that_the_experts_kernel_cannot_take():
    needs = "is not a multiple of {}, which the experts' kernel needs with {}={!r}; use a multiple"
    fp32, bf16 = (4, "trainer.training.mixed_precision_param", "float32"), (8, "generator.dtype", "bfloat16")
    assert invalid(hidden_dim=26) == "model.shape.hidden_dim: 26 " + needs.format(*fp32)
    assert invalid(dim=18) == "model.shape.dim: 18 " + needs.format(*fp32)
    assert invalid("--generator.dtype", "bfloat16", hidden_dim=20) == (
        "model.shape.hidden_dim: 20 " + needs.format(*bf16)
    )
    assert invalid(TP, "2", hidden_dim=20) == (
        "model.shape.hidden_dim: 10 on each of 2 tensor-parallel ranks " + needs.format(*fp32)
    )
    config = run_config(hidden_dim=20)  # with expert parallelism the trainer's TP ranks hold whole experts
    apply_overrides(config, [TP, "2", EP, "2"])
    validate(config)


def test_a_device_without_the_experts_kernel_is_refused(monkeypatch):
    assert platform.missing_grouped_mm("float32") == platform.missing_grouped_mm("bfloat16") == ""

    def not_here(*args, **kwargs):
        raise NotImplementedError("Could not run 'aten::_grouped_mm'\nand much more")

    monkeypatch.setattr(torch, "_grouped_mm", not_here)
    assert invalid() == (
        "trainer.training.mixed_precision_param='float32': experts need torch's grouped matrix product, which torch "
        f"{torch.__version__} refuses on this CPU (Could not run 'aten::_grouped_mm'); use a dense model or another "
        "device"
    )
    validate(run_config(experts=None))  # a dense model does not ask for it


def test_every_token_is_counted_once_per_expert_it_goes_to():
    # Per token and layer 2 x (4 x 24 + 4 x 16) numbers instead of a dense feed-forward's 4 x 24.
    kept = {checkpoint: layer_activations(tiny(), checkpoint) for checkpoint in ("none", "selective", "full")}
    dense = {checkpoint: layer_activations(tiny(experts=None), checkpoint) for checkpoint in kept}
    assert kept["none"] - dense["none"] == 2 * 160 - 96
    assert kept["selective"] - dense["selective"] == 2 * 2 * 16 - (16 + 24)  # what an all-to-all brought and took
    assert kept["full"] == dense["full"] == 16
