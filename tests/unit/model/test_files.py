"""The tokenizers of the package's own directories, and which files of a directory are the model."""

import json

import pytest
from transformers import AutoConfig, AutoTokenizer

from torchtitan_rl.families import Qwen3Shape
from torchtitan_rl.model.files import BUILTIN_ASSETS, load_tokenizer, weight_files, write_model_dir


@pytest.mark.parametrize("name", BUILTIN_ASSETS)
def test_the_short_way_to_a_tokenizer_reads_what_transformers_reads(name):
    ours, reference = load_tokenizer(BUILTIN_ASSETS[name]), AutoTokenizer.from_pretrained(BUILTIN_ASSETS[name])
    assert type(ours) is type(reference)
    messages = [{"role": "user", "content": "sort: dab?"}, {"role": "assistant", "content": "abd\n"}]
    assert ours.apply_chat_template(messages, tokenize=False) == reference.apply_chat_template(messages, tokenize=False)
    text = ours.apply_chat_template(messages, tokenize=False) + "é\t12"
    assert ours.encode(text) == reference.encode(text)
    assert ours.decode(ours.encode(text)) == reference.decode(ours.encode(text))
    assert ours.special_tokens_map == reference.special_tokens_map


def test_one_file_counts_before_the_index_of_a_model_that_was_there_before(tmp_path):
    index, one_file = tmp_path / "model.safetensors.index.json", tmp_path / "model.safetensors"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    one_file.touch()
    assert weight_files(tmp_path) == [one_file]
    one_file.unlink()
    with pytest.raises(ValueError, match="model-00001-of-00001.safetensors is missing, which model.safetensors.index"):
        weight_files(tmp_path)


def test_a_config_json_says_the_dtype_of_the_weights(tmp_path):
    shape = Qwen3Shape(vocab_size=64, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=64)
    for dtype in ("float32", "bfloat16"):
        write_model_dir(tmp_path, shape, BUILTIN_ASSETS["chars"], eos=1, pad=0, dtype=dtype)
        assert str(AutoConfig.from_pretrained(tmp_path).dtype) == f"torch.{dtype}"
