"""The byte-level chat tokenizer of the tiny chat model, and the script that writes it."""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import torchtitan_rl
from torchtitan_rl.rollout.chat import Chat
from torchtitan_rl.tasks.calculator import TOOLS, Calculator
from torchtitan_rl.tasks.vocabulary import unknown_characters

BYTES = Path(torchtitan_rl.__file__).parent / "assets" / "bytes"
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_byte_tokenizer.py"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BYTES)


def test_one_token_per_byte_and_no_text_is_unknown(tokenizer):
    text = "Käse 3€, 日本\n\n  'x' \t~"
    tokens = tokenizer.encode(text)
    assert len(tokenizer) == 262 and len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text and unknown_characters(tokenizer, text) == []
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<|end|>", "<|tool|>"]) == [0, 1, 5]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_the_template_lists_tools_and_grows_by_whole_messages(tokenizer):
    task = Calculator.Config(chat=True).build().task("test", 0)
    env = Calculator.Config(chat=True).build().environment(task)
    chat, asked = Chat(tokenizer, env.tools), task.prompt[0]["content"]
    prompt = chat.prompt(task.prompt)
    assert tokenizer.decode(prompt) == f"<|system|>calculator: [a+b]<|end|><|user|>{asked}<|end|><|assistant|>"
    assert chat.end_of_turn(task.prompt) == tokenizer.eos_token_id
    between = chat.between(task.prompt, [{"role": "tool", "content": "7"}])
    assert tokenizer.decode(between) == "<|end|><|tool|>7<|end|><|assistant|>"
    assert tokenizer.decode(Chat(tokenizer).prompt(task.prompt)) == f"<|user|>{asked}<|end|><|assistant|>"
    assert "\n".join(["calculator: [a+b]"] * 2) in tokenizer.decode(Chat(tokenizer, TOOLS * 2).prompt(task.prompt))


def test_the_script_writes_the_committed_bytes(tmp_path):
    spec = importlib.util.spec_from_file_location("make_byte_tokenizer", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write_tokenizer(tmp_path / "again")
    written = {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}
    assert written == {file.name: file.read_bytes() for file in BYTES.iterdir()}
