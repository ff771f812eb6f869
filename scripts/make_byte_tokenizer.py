"""Write the byte-level chat tokenizer of the tiny chat model, in Hugging Face format.

    python scripts/make_byte_tokenizer.py [DIRECTORY]

The files are committed under torchtitan_rl/assets/bytes; running this again gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ["<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
"""Ids 0 to 5; the 256 bytes are 6 to 261. <|end|> ends every message, and is the end-of-sequence token."""

# Tools are listed in a system message: what a person would write to the policy, a line for each tool.
# Calls of tools are written as vLLM's parser `pythonic` reads them: `[add(a=1, b="x")]`, with strings in double quotes.
# A value is a string, a table, a list, or a number or word of Python.
CHAT_TEMPLATE = (
    "{% macro literal(value) %}"
    "{% if value is string %}{{ value | tojson }}"
    "{% elif value is mapping %}{ {%- for key, item in value.items() %}{% if not loop.first %}, {% endif %}"
    "{{ key | tojson }}: {{ literal(item) }}{% endfor -%} }"
    "{% elif value is iterable %}[{% for item in value %}{% if not loop.first %}, {% endif %}"
    "{{ literal(item) }}{% endfor %}]"
    "{% else %}{{ value }}{% endif %}"
    "{% endmacro %}"
    "{% macro call(function) %}{{ function.name }}({% if function.arguments is mapping %}"
    "{% for name, value in function.arguments.items() %}{% if not loop.first %}, {% endif %}"
    "{{ name }}={{ literal(value) }}{% endfor %}{% else %}{{ function.arguments }}{% endif %}){% endmacro %}"
    "{% if tools %}<|system|>{% for tool in tools %}"
    "{{ tool.function.name }}: {{ tool.function.description }}{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.tool_calls %}[{% for one in message.tool_calls %}{% if not loop.first %}, {% endif %}"
    "{{ call(one.function) }}{% endfor %}]{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """One token per byte of UTF-8, so that no text is unknown; adds no special tokens when encoding."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `directory`, which is made if needed."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<|end|>",
        "additional_special_tokens": SPECIAL_TOKENS[2:],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer.json").write_text(build_tokenizer().to_str(pretty=True) + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    default = Path(__file__).parent.parent / "torchtitan_rl" / "assets" / "bytes"
    write_tokenizer(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
