"""A tokenizer and a chat template like Qwen's, made on the spot."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# The shape of Qwen's: tools in the system turn, what tools said in a user turn (several of them in one), and reasoning
# left out of turns before the last question.
QWEN_LIKE = """\
{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{- tool | tojson }}{{ '\n' }}{% endfor %}\
{{- '<|im_end|>\n' }}{% endif %}\
{%- set ns = namespace(last=0) %}\
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{%- for message in messages %}\
{%- if message.role == 'assistant' %}\
{%- set said = message.content %}\
{%- if loop.index0 < ns.last and '</think>' in said %}\
{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}\
{{- '<|im_start|>assistant\n' + said + '<|im_end|>\n' }}\
{%- elif message.role == 'tool' %}\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}\
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}\
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}\
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


def byte_bpe(chat_template):
    """A byte-level BPE like Qwen's, trained on the spot; its eos is not what ends a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")],
    )
    corpus = ["the answer is 408 and the tool said so\nuser\nassistant\nsystem\ntool_response"] * 4
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
