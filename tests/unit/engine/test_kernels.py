"""vLLM's kernels in torchtitan's modules: the same numbers, alone and in a batch."""

import pytest
import torch

from tests.unit.families.shapes import SHAPES
from torchtitan_rl import adapters, platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.families import DeepseekV3Shape, GptOssShape, Llama3Shape, Qwen2Shape

adapters.prepare_vllm(eager=True)

from torchtitan.models.common.attention import FusedQKVLinear  # noqa: E402
from torchtitan.models.common.feed_forward import FeedForward  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE  # noqa: E402

from torchtitan_rl.engine import kernels  # noqa: E402
from torchtitan_rl.families.rotations import AmplifiedCosSinRoPE  # noqa: E402
from torchtitan_rl.model.memory import generator_parts  # noqa: E402
from torchtitan_rl.model.module_state import places  # noqa: E402
from torchtitan_rl.model.spec import build_spec  # noqa: E402

pytestmark = pytest.mark.skipif(platform.device_type() != "cpu", reason="the operators are called on CPU tensors")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROTATIONS = [
    CosSinRoPE.Config(dim=16, max_seq_len=64),
    AmplifiedCosSinRoPE.Config(dim=16, max_seq_len=64, amplitude=1.2),
    ComplexRoPE.Config(dim=16, max_seq_len=64, theta=500.0),
]


def built(config, dtype):
    """torchtitan's module and the kernels' module, with the same random weights."""
    torch.manual_seed(0)
    plain, fast = config.build(), kernels.with_kernels(config).build()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.1)
    fast.load_state_dict(plain.state_dict())
    return plain.to(dtype), fast.to(dtype)


def assert_equal_up_to_rounding(actual, expected):
    tolerance = 1e-6 if expected.dtype == torch.float32 else 2**-7  # the last bit of bfloat16
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@DTYPES
def test_a_norm_is_torchtitans_for_rows_of_any_strides(dtype):
    plain, fast = built(RMSNorm.Config(normalized_shape=16, eps=1e-5), dtype)
    rows = torch.randn(7, 64, dtype=dtype)
    heads = rows[:, 16:48].unflatten(-1, (2, 16))  # a view: a kernel that took it for contiguous would read other rows
    with torch.no_grad():
        assert_equal_up_to_rounding(fast(heads), plain(heads))
        assert torch.equal(fast(heads[:3]), fast(heads)[:3])  # a row has the same bits in any company


def test_a_norm_of_a_size_that_the_kernel_refuses_stays_torchtitans():
    config = RMSNorm.Config(normalized_shape=20, eps=1e-5)
    assert type(kernels.with_kernels(config)) is RMSNorm.Config
    with pytest.raises(RuntimeError, match="hidden_size"):  # when this passes, the exception can go
        kernels.KernelNorm.Config(normalized_shape=20, eps=1e-5).build()(torch.ones(3, 20))


@DTYPES
@pytest.mark.parametrize("config", ROTATIONS, ids=["half", "amplified", "pair"])
def test_a_rotation_is_torchtitans(config, dtype):
    plain, fast = config.build(), kernels.with_kernels(config).build()
    query, key = torch.randn(1, 9, 4, 16, dtype=dtype), torch.randn(1, 9, 2, 16, dtype=dtype)
    positions = torch.randint(64, (1, 9))
    for actual, expected in zip(fast(query.clone(), key.clone(), positions), plain(query, key, positions)):
        assert_equal_up_to_rounding(actual, expected)


@DTYPES
@pytest.mark.parametrize("config", ROTATIONS, ids=["half", "amplified", "pair"])
def test_what_a_compiler_reads_of_a_rotation_is_torchtitans(config, dtype, monkeypatch):
    plain, fast = config.build(), kernels.with_kernels(config).build()
    query, key = torch.randn(1, 9, 4, 16, dtype=dtype), torch.randn(1, 9, 2, 16, dtype=dtype)
    positions = torch.randint(64, (1, 9))
    expected = plain(query, key, positions)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.delattr(kernels.ops, "rotary_embedding")  # a compiler could not fuse it
    for actual, wanted in zip(fast(query, key, positions), expected):
        assert_equal_up_to_rounding(actual, wanted)


def test_a_norm_that_a_compiler_reads_is_torchtitans(monkeypatch):
    plain, fast = built(RMSNorm.Config(normalized_shape=16, eps=1e-5), torch.bfloat16)
    rows = torch.randn(2**11, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.delattr(kernels.ops, "rms_norm")
    with torch.no_grad():
        assert torch.equal(fast(rows), plain(rows))


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_product_is_the_plain_one_and_a_row_does_not_depend_on_its_batch(dtype, bias):
    plain, fast = built(Linear.Config(in_features=96, out_features=160, bias=bias), dtype)
    rows = torch.randn(128, 96, dtype=dtype)
    with torch.inference_mode():
        before = fast(rows)
        assert torch.equal(before, plain(rows)), "before it is packed, it is torchtitan's"
        kernels.pack_matrices(fast)
        batch = fast(rows)
        assert_equal_up_to_rounding(batch, plain(rows))
        for size in (1, 2, 3, 17, 64):
            assert torch.equal(fast(rows[:size]), batch[:size]), size


@DTYPES
def test_a_head_in_float32_rounds_no_logit_before_and_after_a_change(dtype):
    plain, _ = built(Linear.Config(in_features=96, out_features=160), dtype)
    head = kernels.Float32Head.Config(in_features=96, out_features=160).build()
    head.load_state_dict(plain.state_dict())
    head, rows = head.to(dtype), torch.randn(64, 96, dtype=dtype)
    with torch.inference_mode():
        for factor in (1, -3):
            for module in (plain, head):
                module.weight.mul_(factor)
            expected = rows.double() @ head.weight.double().T
            if factor == 1:
                assert head(rows).dtype == torch.float32 and torch.allclose(head(rows).double(), expected, atol=1e-4)
            kernels.pack_matrices(head)
            logits = head(rows)
            assert logits.dtype == torch.float32 and torch.allclose(logits.double(), expected, atol=1e-4)
            assert torch.equal(head(rows[:3]), logits[:3])


def test_a_packed_matrix_is_packed_again_after_a_change():
    plain, fast = built(Linear.Config(in_features=32, out_features=32), torch.float32)
    with torch.inference_mode():
        kernels.pack_matrices(fast)
        for module in (plain, fast):
            module.weight.mul_(-3)
        kernels.pack_matrices(fast)
        assert_equal_up_to_rounding(fast(torch.ones(2, 32)), plain(torch.ones(2, 32)))


def test_products_are_right_whatever_threads_matrices_of_their_size_were_packed_by():
    threads, matrices = torch.get_num_threads(), []
    with torch.inference_mode():
        try:
            for num_threads in (1, 2, 1, 2):
                platform.set_threads(num_threads)
                one, two, three = (
                    built(Linear.Config(in_features=64, out_features=160), torch.float32) for _ in range(3)
                )
                kernels.pack_matrices(one[1])
                kernels.pack_matrices(torch.nn.ModuleList([two[1], three[1]]))
                matrices += [one, two, three]
        finally:
            platform.set_threads(threads)
        rows = torch.randn(5, 64)
        for plain, fast in matrices:
            assert_equal_up_to_rounding(fast(rows), plain(rows))


def test_on_a_processor_without_packed_products_of_bfloat16_matrices_stay_plain(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(kernels.ops, "create_onednn_mm", None)
    plain, fast = built(Linear.Config(in_features=32, out_features=32), torch.bfloat16)
    with torch.inference_mode():
        kernels.pack_matrices(fast)
        rows = torch.randn(3, 32, dtype=torch.bfloat16)
        assert torch.equal(fast(rows), plain(rows))
    assert platform.packs_matrices(torch.float32)


def feed_forward(bias):
    inner, outer = (Linear.Config(in_features=a, out_features=b, bias=bias) for a, b in ((48, 80), (80, 48)))
    return FeedForward.Config(w1=inner, w2=outer, w3=inner)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_feed_forward_is_the_plain_one_before_and_after_a_change(dtype, bias):
    plain, fast = built(feed_forward(bias), dtype)
    assert isinstance(fast, kernels.PackedFeedForward) is not bias
    rows = torch.randn(1, 5, 48, dtype=dtype)
    with torch.inference_mode():
        assert_equal_up_to_rounding(fast(rows), plain(rows))
        for factor in (1, -3):
            for module in (plain, fast):
                module.w3.weight.mul_(factor)
            kernels.pack_matrices(fast)
            assert torch.allclose(fast(rows), plain(rows), rtol=1e-5 if dtype == torch.float32 else 2**-5, atol=1e-5)


@DTYPES
def test_a_feed_forward_whose_products_stand_side_by_side_is_the_plain_one(dtype, monkeypatch):
    monkeypatch.setattr(platform, "has_fused_layers", lambda hidden: True)
    plain, fast = built(feed_forward(bias=False), dtype)
    rows = torch.randn(1, 5, 48, dtype=dtype)
    with torch.inference_mode():
        expected = plain(rows)
        difference = (fast(rows) - expected).abs().max() / expected.abs().max()
    # vLLM's operator may round otherwise between SiLU and the product.
    assert difference <= (1e-6 if dtype == torch.float32 else 2**-7)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
def test_query_key_and_value_of_a_packed_matrix_are_those_of_the_fused_one(dtype, bias):
    wqkv = Linear.Config(in_features=48, out_features=8 * 16, bias=bias)
    plain, fast = built(FusedQKVLinear.Config(head_dim=16, n_heads=4, n_kv_heads=2, wqkv=wqkv), dtype)
    rows = torch.randn(1, 5, 48, dtype=dtype)
    with torch.inference_mode():
        for packed in (False, True):
            if packed:
                kernels.pack_matrices(fast)
            for actual, expected in zip(fast(rows), plain(rows)):
                assert actual.shape == expected.shape
                assert_equal_up_to_rounding(actual, expected)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
def test_heads_whose_pairs_stand_apart_are_rotated_as_torchtitan_rotates_pairs(dtype, bias):
    wqkv = Linear.Config(in_features=48, out_features=8 * 16, bias=bias)
    config = FusedQKVLinear.Config(head_dim=16, n_heads=4, n_kv_heads=2, wqkv=wqkv)
    plain, _ = built(config, dtype)
    fast = kernels.changed(kernels.with_kernels(config), kernels.SplitQKVLinear.Config, pairs_apart=True).build()
    fast.load_state_dict(plain.state_dict())
    fast = fast.to(dtype)
    rotation = ComplexRoPE.Config(dim=16, max_seq_len=64, theta=500.0)
    pairs, apart = rotation.build(), kernels.with_kernels(rotation).build()
    rows, positions = torch.randn(1, 5, 48, dtype=dtype), torch.arange(3, 8)[None]
    with torch.inference_mode():
        assert not fast.pairs_are_apart, "before it is packed, it is torchtitan's"
        kernels.pack_matrices(fast)
        if not platform.packs_matrices(dtype):
            pytest.skip(f"this processor multiplies no packed matrices of {dtype}")
        assert fast.pairs_are_apart
        query, key, value = fast.flat(rows[0])
        rotated = apart.rotate_apart(query, key, positions[0], 16)
        plain_query, plain_key, plain_value = plain(rows)
        for actual, expected in zip(rotated, pairs(plain_query, plain_key, positions)):
            halves = actual.unflatten(-1, (-1, 2, 8))  # heads, even or odd, pair
            assert_equal_up_to_rounding(halves.transpose(-1, -2).flatten(-2)[None], expected)
        assert_equal_up_to_rounding(value, plain_value[0].flatten(1))


def test_only_heads_that_are_rotated_in_pairs_and_have_no_norm_stand_apart():
    def apart(family):
        sizes = dict(vocab_size=64, dim=64, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=64)
        attention = kernels.with_kernels(build_spec(ModelConfig(shape=family.debug(**sizes))).model).layers[0].attention
        return attention.qkv_linear.pairs_apart

    assert apart(Llama3Shape) and not apart(Qwen3Shape) and not apart(Qwen2Shape)


@pytest.mark.parametrize("family", [Qwen3Shape, Llama3Shape, Qwen2Shape, GptOssShape, DeepseekV3Shape])
def test_a_generators_model_keeps_the_names_and_shapes_of_its_parameters(family):
    sizes = dict(vocab_size=64, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=64, max_seq_len=64)
    config = build_spec(ModelConfig(shape=family.debug(**sizes))).model
    with torch.device("meta"):
        models = config.build(), kernels.with_kernels(config).build()
    plain, fast = ({name: tuple(place.shape) for name, place in places(model).items()} for model in models)
    assert fast == plain


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "qwen3-moe", "llama3", "qwen2", "deepseek"])
def test_the_estimate_of_packed_copies_is_near_what_is_packed(name):
    shape = SHAPES[name]
    with torch.device("meta"):
        model = kernels.with_kernels(build_spec(ModelConfig(shape=shape)).model).build()
    linears = [m for m in model.modules() if isinstance(m, kernels.PackedLinear)]
    linears += [m.wqkv for m in model.modules() if isinstance(m, kernels.SplitQKVLinear)]
    linears += [w for m in model.modules() if isinstance(m, kernels.PackedFeedForward) for w in (m.w1, m.w3)]
    packed = sum(linear.weight.numel() for linear in linears)
    estimate = generator_parts(GeneratorConfig(dtype="float32"), shape, "cpu")["packed"] / 4
    assert estimate == pytest.approx(packed, rel=0.05)  # a family's `layer_extras` are left out
