"""Adapters on the tiny model: what is frozen, what the merged weights are, and which rows of the fused layer are
whose."""

import pytest
import torch

from tests.kit.view import VIEW
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.model import lora
from torchtitan_rl.model.logprob_head import LogprobHead
from torchtitan_rl.model.logprobs import chunked_logprobs
from torchtitan_rl.model.spec import build_spec, training_spec
from torchtitan_rl.model.train_step import head_outputs
from torchtitan_rl.types import Microbatch

SHAPE = dict(vocab_size=11, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=24, max_seq_len=32)
TOKENS = torch.tensor([1, 5, 2, 8, 9, 3, 3, 10, 7])
BATCH = Microbatch(tokens_T=TOKENS, target_tokens_T=TOKENS.roll(-1), lengths=[4, 5], loss_inputs={})


def base_spec(**changes):
    spec = build_spec(ModelConfig(shape=Qwen3Shape(**{**SHAPE, **changes})))
    return training_spec(spec, VIEW, attention="sdpa", chunk_bytes=4 * 4 * 11)


def built(spec, seed=0):
    torch.manual_seed(seed)
    model = spec.model.build()
    with torch.no_grad():
        model.init_weights()
    return model


def adapted(config, *, seed=0, **changes):
    """A model whose adapters do something: A and B both drawn at random."""
    model = built(lora.lora_spec(base_spec(**changes), config), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if lora.is_adapter(name):
                parameter.normal_(std=0.3)
    return model


def logprobs(model):
    return head_outputs(model, BATCH, torch.device("cpu"), temperature=1.0)["policy_logprobs"]


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_alone_require_and_get_gradients(tied):
    model = adapted(LoRAConfig(rank=3), tie_embeddings=tied)
    lora.require_frozen_base(model)
    assert isinstance(model.lm_head, LogprobHead)
    logprobs(model).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.norm() > 0) == lora.is_adapter(name), name


def test_a_base_that_trains_is_noticed():
    model = adapted(LoRAConfig())
    model.norm.weight.requires_grad_(True)
    with pytest.raises(AssertionError, match="norm.weight"):
        lora.require_frozen_base(model)


def test_making_a_spec_leaves_the_one_it_is_made_of():
    spec = base_spec()
    before = repr(spec.model.to_dict())
    assert lora.lora_spec(spec, LoRAConfig()).model is not spec.model
    assert repr(spec.model.to_dict()) == before


@pytest.mark.parametrize(
    "targets", [["qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ["qkv_proj"], ["down_proj", "o_proj"]]
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_merged_model_computes_what_the_adapted_one_does(targets, kv_heads):
    config = LoRAConfig(rank=3, alpha=5.0, target_modules=targets)
    model = adapted(config, n_kv_heads=kv_heads)
    state = model.state_dict()
    adapters = lora.whole_adapters(state, kv_heads, config)
    plain = built(base_spec(n_kv_heads=kv_heads), seed=1)
    base = lora.base_state(state)
    assert base.keys() == plain.state_dict().keys()
    plain.load_state_dict(base)
    expected = logprobs(model)
    assert (logprobs(plain) - expected).abs().max() > 1e-2
    plain.load_state_dict({name: lora.merge(name, tensor, adapters) for name, tensor in base.items()})
    assert torch.allclose(logprobs(plain), expected, atol=1e-5)


def test_a_merge_by_hand():
    """W = 0, A = [1 2], B = [3 4]', alpha / rank = 0.5: 0.5 B A = [[1.5, 3], [2, 4]]."""
    adapters = {"w": (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]]), 0.5)}
    assert lora.merge("w", torch.zeros(2, 2), adapters).tolist() == [[1.5, 3.0], [2.0, 4.0]]
    assert lora.merge("v", torch.ones(1), adapters).tolist() == [1.0]
    assert lora.merge("w", torch.zeros(2, 2, dtype=torch.bfloat16), adapters).dtype == torch.bfloat16


def test_rows_of_the_fused_layer_by_hand():
    """Two key-value heads of size 1, two query heads each: rows q0 q1 k0 v0 q2 q3 k1 v1."""
    b = torch.arange(8.0)[:, None]
    parts = dict(lora._split_fused(b, {"wq": 4, "wk": 2, "wv": 2}, 2))
    assert {name: part[:, 0].tolist() for name, part in parts.items()} == {
        "wq": [0, 1, 4, 5],
        "wk": [2, 6],
        "wv": [3, 7],
    }


def test_query_key_and_value_share_one_a():
    config = LoRAConfig(rank=3, target_modules=["qkv_proj"])
    adapters = lora.whole_adapters(adapted(config).state_dict(), 2, config)
    q, k, v = (adapters[f"layers.1.attention.qkv_linear.{part}.weight"] for part in ("wq", "wk", "wv"))
    assert q[0] is k[0] is v[0] and q[0].shape == (3, 16)
    assert [part[1].shape for part in (q, k, v)] == [(32, 3), (16, 3), (16, 3)]
    assert len(adapters) == 2 * 3


def test_a_model_with_separate_query_key_and_value_layers():
    spec = build_spec(ModelConfig(flavor="debugmodel_non_fused_qkv"))
    spec.model.layers = spec.model.layers[:1]
    config = LoRAConfig(rank=2, target_modules=["qkv_proj"])
    state = built(lora.lora_spec(spec, config)).state_dict()
    adapters = lora.whole_adapters(state, 8, config)
    assert adapters.keys() == {f"layers.0.attention.qkv_linear.{part}.weight" for part in ("wq", "wk", "wv")}
    assert all(state[name].shape == (b.shape[0], a.shape[1]) for name, (a, b, _) in adapters.items())


def test_experts_have_no_adapters_and_asking_for_them_is_refused():
    spec = build_spec(ModelConfig(flavor="debugmodel_moe"))
    with pytest.raises(ValueError) as caught:
        lora.lora_spec(spec, LoRAConfig())
    assert str(caught.value) == (
        "trainer.lora.target_modules='gate_proj': no linear layer of this model is one (experts of a mixture have no "
        "adapters); use qkv_proj, o_proj"
    )
    spec.model.layers = spec.model.layers[:1]
    with torch.device("meta"):
        model = lora.lora_spec(spec, LoRAConfig(target_modules=["qkv_proj", "o_proj"])).model.build()
    lora.require_frozen_base(model)
    adapters = [name for name in model.state_dict() if lora.is_adapter(name)]
    assert len(adapters) == 4 and all(".attention." in name for name in adapters)


def test_initial_adapters_depend_on_the_seed_alone_and_change_nothing_yet():
    config = LoRAConfig(rank=3)
    first, second, third = (adapted(config, seed=seed) for seed in (0, 1, 1))
    random_state = torch.get_rng_state()
    for model, seed in ((first, 7), (second, 7), (third, 8)):
        lora.draw_adapters(model, seed)
    assert torch.equal(torch.get_rng_state(), random_state)
    drawn = [lora.adapter_state(model.state_dict()) for model in (first, second, third)]
    for name, tensor in drawn[0].items():
        assert torch.equal(tensor, drawn[1][name])
        if ".lora_b." in name:
            assert not tensor.any()
        else:
            assert not torch.equal(tensor, drawn[2][name])
            # Kaiming-uniform with a = sqrt(5): within 1 / sqrt(in).
            assert 0 < tensor.abs().max() <= tensor.shape[1] ** -0.5


def test_a_fingerprint_is_of_the_base_alone():
    model = adapted(LoRAConfig(rank=3))
    before = lora.base_fingerprint(model.state_dict())
    with torch.no_grad():
        model.layers["0"].attention.wo.lora_b.weight.add_(1.0)
    assert lora.base_fingerprint(model.state_dict()) == before
    assert lora.base_fingerprint(built(base_spec(), seed=0).state_dict()) != before  # adapters were drawn in between
    with torch.no_grad():
        model.layers["0"].attention.wo.weight[0, 0] += 1e-6
    assert lora.base_fingerprint(model.state_dict()) != before


def test_a_frozen_head_passes_the_same_gradient_on():
    hidden, weight = torch.randn(9, 6, requires_grad=True), torch.randn(11, 6)
    gradients = []
    for trained in (True, False):
        head = weight.clone().requires_grad_(trained)
        logprobs, entropy = chunked_logprobs(hidden, head, TOKENS, chunk_tokens=4)
        (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden)
        gradients.append(gradient)
    assert gradients[0].norm() > 0 and torch.equal(*gradients)
