"""Specs made from one shared spec, the standard flavours, and the model they build against transformers' Qwen3."""

import dataclasses

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.kit.view import VIEW
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.model.attention import PackedSDPA
from torchtitan_rl.model.logprob_head import LogprobHead
from torchtitan_rl.model.spec import build_spec, training_spec, with_positions
from torchtitan_rl.model.train_step import head_outputs
from torchtitan_rl.types import Microbatch

CPU = torch.device("cpu")


def tiny(**changes):
    sizes = dict(vocab_size=11, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=24, max_seq_len=32)
    return Qwen3Shape(**{**sizes, **changes})


def for_training(shape, attention="sdpa"):
    return training_spec(build_spec(ModelConfig(shape=shape)), VIEW, attention=attention, chunk_bytes=4 * 4 * 11)


def snapshot(spec):
    return repr(spec), repr(spec.model.to_dict())


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


# The spec to train from.


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("model", [ModelConfig(shape=tiny()), ModelConfig(flavor="debugmodel")], ids=["shape", "name"])
def test_a_training_spec_leaves_the_shared_spec_as_it_was(model, attention):
    spec = build_spec(model)
    before = snapshot(spec)
    made = training_spec(spec, VIEW, attention=attention, chunk_bytes=4 * 4 * 11)
    assert snapshot(spec) == before
    assert made is not spec and made.model is not spec.model
    assert isinstance(made.model.lm_head, LogprobHead.Config) and made.model.lm_head.chunk_bytes == 4 * 4 * 11
    assert not isinstance(spec.model.lm_head, LogprobHead.Config)
    for layer in made.model.layers:
        assert isinstance(layer.attention.inner_attention, PackedSDPA.Config) == (attention == "sdpa")


def test_a_spec_is_built_anew_each_time():
    first, second = (build_spec(ModelConfig(shape=tiny())) for _ in range(2))
    first.model.layers[0].attention.n_heads = 1
    assert second.model.layers[0].attention.n_heads == 4


# The generator's spec.


def test_a_generator_spec_leaves_the_shared_spec_as_it_was(plan):
    spec = build_spec(ModelConfig(shape=tiny()))
    before = snapshot(spec)
    for degree in (1, 2):
        made = plan.generator_spec(spec, degree)
        assert snapshot(spec) == before
        assert made is not spec and made.model is not spec.model


def test_an_attention_that_the_generator_cannot_cut_is_named(plan):
    spec = build_spec(ModelConfig(shape=tiny()))
    spec.model.layers[1].attention = spec.model.layers[1].feed_forward
    with pytest.raises(
        ValueError, match="the attention of layer 1 is a FeedForward.Config, which the generator cannot"
    ):
        plan.generator_spec(spec, 1)


def test_a_generator_rank_has_its_share_of_heads_and_features(plan, layers):
    spec = plan.generator_spec(build_spec(ModelConfig(shape=tiny())), 2)
    for index, layer in enumerate(spec.model.layers):
        attention, ffn = layer.attention, layer.feed_forward
        assert (attention.n_heads, attention.n_kv_heads) == (2, 1)
        assert (attention.qkv_linear.n_heads, attention.qkv_linear.n_kv_heads) == (2, 1)
        assert attention.inner_attention == layers.PagedAttention.Config(
            layer=index, n_heads=2, n_kv_heads=1, head_dim=8
        )
        # Half of 4 query, 2 key and 2 value heads of 8; half of the feed-forward's 24.
        linears = (attention.qkv_linear.wqkv, attention.wo, ffn.w1, ffn.w3, ffn.w2)
        assert [(x.in_features, x.out_features) for x in linears] == [(16, 32), (16, 16), (16, 12), (16, 12), (12, 16)]
        assert attention.wo.sums_ranks and ffn.w2.sums_ranks
    assert spec.model.lm_head.out_features == 11  # embedding and head are whole on every rank


@pytest.mark.parametrize(
    ("degree", "changes", "complaint"),
    [(3, {}, "n_heads=4"), (4, {}, "n_kv_heads=2"), (2, {"hidden_dim": 25}, "hidden_dim=25")],
)
def test_degrees_that_do_not_divide_are_refused(degree, changes, complaint, plan):
    spec = build_spec(ModelConfig(shape=tiny(**changes)))
    before = snapshot(spec)
    with pytest.raises(ValueError) as caught:
        plan.generator_spec(spec, degree)
    assert str(caught.value) == f"generator.tensor_parallel_degree={degree}: must divide the model's {complaint}"
    assert snapshot(spec) == before


def test_parts_of_parameters_are_the_shapes_a_generator_rank_holds(layers):
    state = for_training(tiny()).model.build().state_dict()
    halves = {name: layers.shard_for_rank(name, tensor, 1, 2).shape for name, tensor in state.items()}
    layer = {name.removeprefix("layers.1."): tuple(shape) for name, shape in halves.items() if "layers.1." in name}
    assert layer == {
        "attention.qkv_linear.wq.weight": (16, 16),
        "attention.qkv_linear.wk.weight": (8, 16),
        "attention.qkv_linear.wv.weight": (8, 16),
        "attention.wo.weight": (16, 16),
        "attention.q_norm.weight": (8,),
        "attention.k_norm.weight": (8,),
        "feed_forward.w1.weight": (12, 16),
        "feed_forward.w2.weight": (16, 12),
        "feed_forward.w3.weight": (12, 16),
        "attention_norm.weight": (16,),
        "ffn_norm.weight": (16,),
    }
    assert halves["tok_embeddings.weight"] == halves["lm_head.weight"] == (11, 16)


def test_a_column_then_a_row_layer_in_parts_sum_to_the_whole(layers):
    # x -> w1 -> w2 without the activation between; each rank has half of w1's outputs and of w2's inputs.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 16, generator=generator, dtype=torch.float64)
    w1 = torch.randn(24, 16, generator=generator, dtype=torch.float64)
    w2 = torch.randn(16, 24, generator=generator, dtype=torch.float64)
    parts = [
        x
        @ layers.shard_for_rank("layers.0.feed_forward.w1.weight", w1, rank, 2).T
        @ layers.shard_for_rank("layers.0.feed_forward.w2.weight", w2, rank, 2).T
        for rank in range(2)
    ]
    torch.testing.assert_close(parts[0] + parts[1], x @ w1.T @ w2.T)
    assert layers.shard_for_rank("layers.0.feed_forward.w1.weight", w1, 0, 1) is w1


# Standard flavours.


def test_the_smallest_flavours():
    small, larger = Qwen3Shape.of_flavor("0.6B"), Qwen3Shape.of_flavor("1.7B")
    assert small == Qwen3Shape(
        vocab_size=151936,
        dim=1024,
        n_layers=28,
        n_heads=16,
        n_kv_heads=8,
        head_dim=128,
        hidden_dim=3072,
        rope_theta=1e6,
        max_seq_len=40960,
        tie_embeddings=True,
        norm_eps=1e-6,
    )
    assert small.num_parameters == 596_049_920
    assert larger == dataclasses.replace(small, dim=2048, hidden_dim=6144)
    assert larger.num_parameters == 1_720_574_976


@pytest.mark.parametrize("flavor", ["0.6B", "1.7B", "debugmodel_moe"])
def test_a_flavour_and_its_shape_build_models_of_the_same_parameters(flavor):
    with torch.device("meta"):
        by_flavor = build_spec(ModelConfig(flavor=flavor)).model.build()
        by_shape = build_spec(ModelConfig(shape=Qwen3Shape.of_flavor(flavor))).model.build()
    described = [
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
        for model in (by_flavor, by_shape)
    ]
    assert described[0] == described[1]
    assert sum(parameter.numel() for parameter in by_flavor.parameters()) == Qwen3Shape.of_flavor(flavor).num_parameters


def test_unknown_flavours_are_refused():
    with pytest.raises(ValueError) as caught:
        Qwen3Shape.of_flavor("9B")
    message = str(caught.value)
    assert message.startswith("model.flavor='9B': is not a Qwen3 flavour; use one of ")
    assert "0.6B, 1.7B" in message and "30B-A3B" in message


# The model against transformers.


def with_random_weights(spec, seed=0):
    """The built model, with weights large enough for every part of it to matter."""
    model = spec.model.build()
    model.init_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.ndim == 1 else 0.0  # norms near one, matrices around zero
            parameter.copy_(around + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def every_logprob(model, tokens, vocab_size, **kwargs):
    """(T, V) log-probabilities: the document once per token of the vocabulary, packed, scored against that token."""
    length = len(tokens)
    batch = Microbatch(
        tokens_T=tokens.repeat(vocab_size),
        target_tokens_T=torch.arange(vocab_size).repeat_interleave(length),
        lengths=[length] * vocab_size,
        loss_inputs={},
    )
    with torch.no_grad():
        said = head_outputs(model, batch, CPU, **{"temperature": 1.0, **kwargs})
        logprobs, entropy = said["policy_logprobs"], said["entropy"]
    return logprobs.view(vocab_size, length).T, entropy.view(vocab_size, length)[0]


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("changes", [{}, {"n_kv_heads": 4, "rope_theta": 1e4, "norm_eps": 1e-3}], ids=["gqa", "mha"])
def test_the_trainers_model_is_transformers_qwen3(tie_embeddings, changes):
    shape = tiny(tie_embeddings=tie_embeddings, **changes)
    spec = for_training(shape)
    model = with_random_weights(spec)
    reference = Qwen3ForCausalLM(Qwen3Config(**shape.to_hf(1, 0))).eval()
    state = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    report = reference.load_state_dict(state, strict=False)
    assert not report.unexpected_keys
    assert set(report.missing_keys) <= ({"lm_head.weight"} if tie_embeddings else set())  # tied: it is the embedding
    reference.tie_weights()

    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 10, 0, 7, 8])
    with torch.no_grad():
        logits_LV = reference(tokens[None]).logits[0]
    logp_LV, entropy_L = every_logprob(model, tokens, shape.vocab_size)
    expected_LV = logits_LV.log_softmax(-1)
    torch.testing.assert_close(logp_LV, expected_LV, rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy_L, -(expected_LV.exp() * expected_LV).sum(-1), rtol=0, atol=1e-4)
    assert expected_LV.std() > 0.5  # a model that says something, so that agreement means something
    logp_LV, _ = every_logprob(model, tokens, shape.vocab_size, temperature=0.5)
    torch.testing.assert_close(logp_LV, (logits_LV / 0.5).log_softmax(-1), rtol=0, atol=1e-4)


def test_packed_documents_and_padding_do_not_change_a_log_probability():
    model = with_random_weights(for_training(tiny()))
    documents = [torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9]), torch.tensor([2, 6, 5, 3, 5, 8, 9, 7])]
    targets = [torch.tensor([1, 4, 1, 5, 9]), torch.tensor([2]), torch.tensor([6, 5, 3, 5, 8, 9, 7, 0])]

    def score(which, **kwargs):
        batch = Microbatch(
            tokens_T=torch.cat([documents[i] for i in which]),
            target_tokens_T=torch.cat([targets[i] for i in which]),
            lengths=[len(documents[i]) for i in which],
            loss_inputs={},
        )
        with torch.no_grad():
            return head_outputs(model, batch, CPU, temperature=1.0, **kwargs)["policy_logprobs"].split(batch.lengths)

    alone = [score([i])[0] for i in range(3)]
    for order in ([0, 1, 2], [2, 0, 1]):
        for kwargs in ({}, {"multiple_of": 8}):  # 14 tokens, padded to 16
            for i, packed in zip(order, score(order, **kwargs), strict=True):
                torch.testing.assert_close(packed, alone[i], rtol=0, atol=1e-5)


def test_tied_embeddings_are_one_parameter():
    model = for_training(tiny()).model.build()
    assert model.lm_head.weight is model.tok_embeddings.weight
    untied = for_training(tiny(tie_embeddings=False)).model.build()
    assert untied.lm_head.weight is not untied.tok_embeddings.weight


def test_rotary_tables_cover_what_is_needed_and_agree():
    spec = build_spec(ModelConfig(shape=tiny(max_seq_len=64)))
    cut, whole = with_positions(spec, 24), with_positions(spec, 1000)
    tables = [made.model.build().layers["0"].attention.rope.cache for made in (cut, whole)]
    assert [len(table) for table in tables] == [24, 64] and torch.equal(tables[0], tables[1][:24])
    assert spec.model.layers[0].attention.rope.max_seq_len == 64
