"""Write the character-level tokenizer of the tiny models, in Hugging Face format.

    python scripts/make_char_tokenizer.py [DIRECTORY]

The files are committed under torchtitan_rl/assets/chars; running this again gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>"]
"""Ids 0, 1 and 2."""
CHARACTERS = "0123456789+-*=() abcdefghijklmnopqrstuvwxyz?.,\n" + ":;!'\"_/<>[]#$%"
"""Ids 3 to 63. Anything else, capitals included, becomes <unk>."""

# Every line the template adds is spelled with characters above. An assistant turn ends with <eos>, as a sampled
# one does, so a conversation rendered again starts with exactly the tokens of the prompt it grew from.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message['role'] }}>:{{ message['content'] }}{% if message['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>:{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """One token per character, 64 in all; adds no special tokens when encoding."""
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    assert len(vocab) == 64, f"{len(vocab)} entries: a character is listed twice, or one is missing"
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    # [\s\S] is any character; a dot would leave out the newline.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    # Without it, decoding would put a space between tokens.
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `directory`, which is made if needed."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer.json").write_text(build_tokenizer().to_str(pretty=True) + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    default = Path(__file__).parent.parent / "torchtitan_rl" / "assets" / "chars"
    write_tokenizer(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
