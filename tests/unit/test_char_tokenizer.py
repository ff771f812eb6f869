"""The character tokenizer of the tiny models, and the script that writes it."""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import torchtitan_rl

CHARS = Path(torchtitan_rl.__file__).parent / "assets" / "chars"
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_char_tokenizer.py"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHARS)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_char_tokenizer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_64_entries_special_tokens_first(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 64
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.bos_token_id is None
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 12, 13, 19, 20, 45, 49]) == [
        "<pad>",
        "<eos>",
        "<unk>",
        "0",
        "9",
        "+",
        " ",
        "a",
        "z",
        "\n",
    ]


def test_encode_gives_one_token_per_character_and_nothing_else(tokenizer):
    # s is the 19th letter, and a is 20.
    assert tokenizer.encode("szyci=") == [38, 45, 44, 22, 28, 16]
    assert tokenizer.encode("") == []


def test_every_character_survives_a_round_trip(tokenizer, script):
    text = script.CHARACTERS + " a  b .\n\n , it 's (x) ?  "
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text) and tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([0, *tokens, 1], skip_special_tokens=True) == text
    assert sorted(tokenizer.encode(script.CHARACTERS)) == list(range(3, 64))


def test_other_characters_are_unknown(tokenizer):
    assert tokenizer.encode("Aé{") == [2, 2, 2]


def test_eos_can_be_written_as_text(tokenizer):
    assert tokenizer.encode("ab<eos>") == [20, 21, 1]


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<user>:hi\n<assistant>:"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<user>:hi\n"
    assert tokenizer.unk_token_id not in tokenizer.encode(prompt)
    # A later prompt starts with the earlier one and the completion it got.
    messages += [{"role": "assistant", "content": "yo"}, {"role": "user", "content": "bye"}]
    later = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert later[: len(tokenizer.encode(prompt)) + 3] == tokenizer.encode(prompt) + tokenizer.encode("yo") + [1]


def test_it_loads_the_same_beside_the_config_of_a_qwen3(tokenizer, tmp_path):
    # With a model's config there, transformers may prefer the tokenizer class of that model.
    for file in CHARS.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    beside = AutoTokenizer.from_pretrained(tmp_path)
    text = "sort these: szyci =\n"
    assert beside.encode(text) == tokenizer.encode(text)
    assert beside.decode(beside.encode(text)) == text


def test_the_script_writes_the_committed_bytes(script, tmp_path):
    script.write_tokenizer(tmp_path / "again")
    written = {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}
    assert written == {file.name: file.read_bytes() for file in CHARS.iterdir()}
