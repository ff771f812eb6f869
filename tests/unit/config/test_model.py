"""Sizes of a model: counted, written to and read from a Hugging Face config, and what is refused."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.refusal import refusal
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.model.files import BUILTIN_ASSETS, assets_dir, has_weights, missing_weights, write_model_dir
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.model.spec import build_spec

TINY = Qwen3Shape(vocab_size=11, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=24, max_seq_len=32)

shapes = st.builds(
    lambda n_kv_heads, shared, half, **sizes: Qwen3Shape(
        n_heads=n_kv_heads * shared, n_kv_heads=n_kv_heads, head_dim=2 * half, max_seq_len=8, **sizes
    ),
    n_kv_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    half=st.integers(1, 5),
    vocab_size=st.integers(1, 40),
    dim=st.integers(1, 30),
    n_layers=st.integers(1, 3),
    hidden_dim=st.integers(1, 50),
    tie_embeddings=st.booleans(),
    rope_theta=st.sampled_from([1e4, 1e6]),
    norm_eps=st.sampled_from([1e-6, 1e-5]),
)


def test_parameters_by_hand():
    # Per layer: q and o 2 x 16 x 32, k and v 2 x 16 x 16, their norms 2 x 8, feed-forward 3 x 16 x 24, norms 2 x 16.
    layer = 1024 + 512 + 16 + 1152 + 32
    assert TINY.num_parameters == 11 * 16 + 2 * layer + 16 == 5664


@settings(deadline=None, derandomize=True, max_examples=30)
@given(shape=shapes)
def test_parameters_are_those_of_the_model_that_is_built(shape):
    spec = build_spec(ModelConfig(shape=shape))
    model = spec.model.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_parameters


@settings(deadline=None, derandomize=True, max_examples=30)
@given(shape=shapes)
def test_a_shape_survives_a_hugging_face_config(shape, tmp_path_factory):
    file = tmp_path_factory.mktemp("hf") / "config.json"
    file.write_text(json.dumps(shape.to_hf(1, 0)))
    assert Qwen3Shape.from_hf(file) == shape


def test_a_hugging_face_config_has_the_ids_of_the_tokenizer():
    content = TINY.to_hf(eos_token_id=5, pad_token_id=6)
    assert (content["eos_token_id"], content["pad_token_id"], content["model_type"]) == (5, 6, "qwen3")


def test_a_config_as_older_transformers_wrote_it(tmp_path):
    # rope_theta at the top level, no tie_word_embeddings, no rms_norm_eps.
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3",
                "vocab_size": 11,
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 4,
                "intermediate_size": 24,
                "rope_theta": 10000.0,
                "max_position_embeddings": 32,
            }
        )
    )
    assert Qwen3Shape.from_hf(tmp_path / "config.json") == Qwen3Shape(
        vocab_size=11,
        dim=16,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=4,
        hidden_dim=24,
        max_seq_len=32,
        rope_theta=1e4,
        tie_embeddings=False,
        norm_eps=1e-6,
    )


def test_a_config_as_newer_transformers_writes_it(tmp_path):
    content = TINY.to_hf(1, 0)
    del content["rope_theta"]
    content["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    (tmp_path / "config.json").write_text(json.dumps(content))
    shape = Qwen3Shape.from_hf(tmp_path / "config.json")
    assert math.isclose(shape.rope_theta, 5000.0) and shape.dim == 16


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gemma3", None])
def test_another_kind_of_model_is_refused(model_type, tmp_path):
    content = {} if model_type is None else {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert refusal(resolve_shape, ModelConfig(assets=str(tmp_path))) == (
        f"model.assets={str(tmp_path)!r}: its config.json says model_type={model_type!r}, which is of no "
        "family of this package: qwen3 (qwen3 and qwen3_moe), llama3 (llama and mistral), qwen2 (qwen2), "
        "qwen3_5 (qwen3_5_text and qwen3_5), gpt-oss (gpt_oss), deepseek-v3 (deepseek_v3); "
        "docs/families.md shows how to add one as model.family"
    )


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"model_type": "qwen3", "hidden_size": 16}', b"[]", "{}".encode("utf-16"), b""],
    ids=["not json", "no sizes", "a list", "utf-16", "empty"],
)
def test_a_damaged_config_is_refused_by_its_directory(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    assert refusal(resolve_shape, ModelConfig(assets=str(tmp_path))).startswith(f"model.assets={str(tmp_path)!r}: ")


def test_a_family_that_would_read_no_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_hf(1, 0)))
    for no_class in ("llama3", TINY, int):
        message = refusal(resolve_shape, ModelConfig(assets=str(tmp_path), family=no_class))
        assert message.startswith(f"model.family={no_class!r}: is no class of shapes; give a subclass of DecoderShape")
    for sizes in ({"shape": TINY}, {"flavor": "0.6B"}):
        message = refusal(resolve_shape, ModelConfig(assets=str(tmp_path), family=Qwen3Shape, **sizes))
        (name,) = sizes
        assert message.startswith("model.family=Qwen3Shape: reads the config.json of model.assets, and")
        assert f"model.{name} gives the sizes already; keep one of them" in message


def test_assets_that_are_not_there_are_refused(tmp_path):
    missing = str(tmp_path / "qwen")
    assert refusal(assets_dir, ModelConfig(assets=missing)) == (
        f"model.assets={missing!r}: there is no such directory; give a Hugging Face model directory or one of "
        "['bytes', 'chars']"
    )


def test_sizes_that_nobody_gave_are_refused():
    assert refusal(resolve_shape, ModelConfig(assets="chars")) == (
        "model.assets='chars': has no config.json; give model.shape, model.flavor or a model directory"
    )


def test_a_shape_and_a_flavour_together_are_refused():
    assert refusal(resolve_shape, ModelConfig(shape=TINY, flavor="0.6B")) == (
        "model.flavor='0.6B': model.shape is set too; keep one of them"
    )


def test_a_shape_of_ones_own_is_taken_as_it_is():
    assert resolve_shape(ModelConfig(shape=TINY)) is TINY


def test_a_model_directory_has_the_config_and_the_tokenizers_files(tmp_path):
    chars = BUILTIN_ASSETS["chars"]
    write_model_dir(tmp_path / "model", TINY, chars, eos=1, pad=0)
    written = {file.name for file in (tmp_path / "model").iterdir()}
    assert written == {"config.json", *(file.name for file in chars.iterdir())}
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (chars / "tokenizer.json").read_bytes()
    config = ModelConfig(assets=str(tmp_path / "model"))
    assert resolve_shape(config) == TINY
    assert not has_weights(config)
    (tmp_path / "model" / "model.safetensors").touch()
    assert has_weights(config)


def test_a_run_that_must_start_from_a_checkpoint_does_not_start_without_one(tmp_path):
    directory = str(tmp_path)
    assert missing_weights(ModelConfig(assets=directory)) == ""
    assert missing_weights(ModelConfig(assets=directory, pretrained=True)) == (
        f"model.assets={directory!r}: has no safetensors, and model.pretrained is set; "
        "give --model.assets the directory of a checkpoint"
    )
    (tmp_path / "model.safetensors").touch()
    assert missing_weights(ModelConfig(assets=directory, pretrained=True)) == ""
