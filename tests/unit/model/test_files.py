"""The tokenizers of the package's own directories."""

import pytest
from transformers import AutoTokenizer

from torchtitan_rl.model.files import BUILTIN_ASSETS, load_tokenizer


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
