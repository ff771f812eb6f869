"""Conversations as tokens, with the character tokenizer and with a BPE under templates like those in use."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.kit.environment import AsyncScriptedEnv
from tests.kit.sampler import CHARS, policy
from tests.unit.rollout.templates import QWEN_LIKE, byte_bpe
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.rollout.chat import Chat
from torchtitan_rl.rollout.multi_turn import Limits, multi_turn
from torchtitan_rl.rollout.renderings import Renderings
from torchtitan_rl.tasks.calculator import Calculator
from torchtitan_rl.tasks.env import Step
from torchtitan_rl.types import Completion, RolloutGroup, Task

LIMITS = Limits(max_turns=4, max_tokens=512, timeout_s=10.0, step_timeout_s=5.0)
USER = {"role": "user", "content": "12*34"}

QWEN = byte_bpe(QWEN_LIKE)


def talk(first, answer, **settings):
    """Answers with messages once, and ends."""
    return AsyncScriptedEnv(Step(observation=answer), Step(reward=1.0, done=True), first=first, **settings)


async def play(env, policy):
    task = Task(id="talk", prompt="")
    return await multi_turn(task, policy, rollout_id="0/0/0", seed=0, env=env, limits=LIMITS)


def trained_tokens(rollout):
    """All tokens of a rollout's longest datum, and the targets with a loss over all its datums."""
    data = to_datums([RolloutGroup(id="0", rollouts=[rollout])], AlgorithmConfig())
    targets = [
        token
        for datum in data
        for token, mask in zip(datum.target_tokens.tolist(), datum.loss_inputs["loss_mask"])
        if mask
    ]
    return torch.cat([data[-1].tokens, data[-1].target_tokens[-1:]]).tolist(), targets


async def test_the_rendered_conversation_is_the_tokens_sampled_and_trained_with_the_character_tokenizer():
    env = Calculator.Config(chat=True).build().environment(Task(id="c", prompt=[USER], answer="408"))
    rollout = await play(env, policy("[12*34]", "408<eos>"))
    messages = [
        USER,
        {"role": "assistant", "content": "[12*34]"},
        {"role": "tool", "content": "408"},
        {"role": "assistant", "content": "408"},
    ]
    # The call ended at its stop string: the end of that turn is the template's, not the policy's.
    rendered = CHARS.apply_chat_template(messages, return_dict=False)
    assert CHARS.decode(rendered) == "<user>:12*34\n<assistant>:[12*34]<eos>\n<tool>:408\n<assistant>:408<eos>\n"
    whole, targets = trained_tokens(rollout)
    assert whole == rendered[:-1]  # after the last <eos> nothing is sampled
    assert CHARS.decode(targets) == "[12*34]408<eos>"
    assert rollout.reward == 1.0


async def test_the_rendered_conversation_is_the_tokens_sampled_and_trained_with_a_bpe_and_a_template_like_qwens():
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    said = ["the tool\n<tool_call>12*34</tool_call><|im_end|>", "the answer is 408<|im_end|>"]
    heard = [{"role": "tool", "content": "408"}, {"role": "tool", "content": "and so on"}]
    policy_ = policy(*said, tokenizer=QWEN, max_tokens=128, max_prompt_tokens=256)
    rollout = await play(talk([USER], heard, tools=tools), policy_)
    messages = [
        USER,
        {"role": "assistant", "content": said[0].removesuffix("<|im_end|>")},
        *heard,
        {"role": "assistant", "content": "the answer is 408"},
    ]
    rendered = QWEN.apply_chat_template(messages, tools=tools, return_dict=False)
    whole, targets = trained_tokens(rollout)
    assert QWEN.decode(rendered) == QWEN.decode(whole) + "\n"
    assert rendered == whole + QWEN.encode("\n")
    assert QWEN.decode(targets) == "".join(said)
    # Turns end at <|im_end|> though the tokenizer's end of sequence is another token.
    end = QWEN.convert_tokens_to_ids("<|im_end|>")
    assert [params.stop_token_ids for _, params in policy_.generator.asked] == [[end], [end]]


async def test_a_completion_in_tokens_that_the_tokenizer_would_not_choose_is_kept_as_it_was_sampled():
    end = QWEN.convert_tokens_to_ids("<|im_end|>")
    letters = [QWEN.convert_tokens_to_ids(letter) for letter in "theanswer"]
    assert QWEN.encode("theanswer") != letters
    rollout = await play(
        talk([USER], [USER]), policy([*letters, end], "so<|im_end|>", tokenizer=QWEN, max_prompt_tokens=256)
    )
    whole, targets = trained_tokens(rollout)
    assert targets[: len(letters) + 1] == [*letters, end]
    messages = [USER, {"role": "assistant", "content": "theanswer"}, USER, {"role": "assistant", "content": "so"}]
    rendered = QWEN.apply_chat_template(messages, return_dict=False)
    assert QWEN.decode(whole) + "\n" == QWEN.decode(rendered) and len(whole) + 1 > len(rendered)


async def test_reasoning_that_a_template_would_leave_out_later_stays_in_later_prompts():
    said = "<think>\nso\n</think>\nthe answer<|im_end|>"
    rollout = await play(talk([USER], [USER]), policy(said, "so<|im_end|>", tokenizer=QWEN, max_prompt_tokens=256))
    first, second = rollout.turns
    assert second.prompt_tokens[: len(first.prompt_tokens)] == first.prompt_tokens
    assert QWEN.decode(second.prompt_tokens) == (
        "<|im_start|>user\n12*34<|im_end|>\n<|im_start|>assistant\n"
        + said
        + "\n<|im_start|>user\n12*34<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_completion_cut_off_by_the_token_limit_is_given_the_end_of_its_turn():
    policy_ = policy("the answer is", "408<|im_end|>", tokenizer=QWEN, max_tokens=2, max_prompt_tokens=256)
    rollout = await play(talk([USER], [USER]), policy_)
    assert rollout.turns[0].completion.truncated
    after = rollout.turns[1].prompt_tokens[len(rollout.turns[0].prompt_tokens) + 2 :]
    assert QWEN.decode(after) == "<|im_end|>\n<|im_start|>user\n12*34<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_to_imitate_has_the_tokens_of_a_rollout_that_says_the_same():
    messages = [
        USER,
        {"role": "assistant", "content": "[12*34]"},
        {"role": "tool", "content": "408"},
        {"role": "assistant", "content": "408"},
    ]
    tokens, mask = Chat(CHARS).render(messages)
    assert tokens == CHARS.apply_chat_template(messages, return_dict=False)
    assert CHARS.decode([token for token, policys in zip(tokens, mask) if policys]) == "[12*34]<eos>408<eos>"
    assert len(mask) == len(tokens) and mask[-1] is False  # the newline after the last turn

    tokens, mask = Chat(QWEN).render(messages)
    assert tokens == QWEN.apply_chat_template(messages, return_dict=False)
    assert QWEN.decode([token for token, policys in zip(tokens, mask) if policys]) == "[12*34]<|im_end|>408<|im_end|>"
    keeps = Chat(QWEN, renderings=Renderings())
    assert keeps.render(messages) == keeps.render(messages) == (tokens, mask)
    with pytest.raises(ValueError, match="has no assistant message"):
        Chat(CHARS).render([USER])


def test_a_chatml_template_of_others_that_leaves_the_last_turn_open():
    folder = Path(importlib.util.find_spec("vllm").origin).parent / "transformers_utils" / "chat_templates"
    tokenizer = byte_bpe((folder / "template_chatml.jinja").read_text())
    messages = [
        {"role": "system", "content": "so"},
        USER,
        {"role": "assistant", "content": "the answer"},
        USER,
        {"role": "assistant", "content": "408"},
    ]
    tokens, mask = Chat(tokenizer).render(messages)
    assert tokens == tokenizer.apply_chat_template(messages, return_dict=False) + tokenizer.encode("<|im_end|>")
    said = tokenizer.decode([token for token, policys in zip(tokens, mask) if policys])
    assert said == "the answer<|im_end|>408<|im_end|>"


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """A real tokenizer: the sentencepiece model of Mistral's instruction models; vLLM requires a package that has
    it."""
    folder = tmp_path_factory.mktemp("mistral")
    data = Path(importlib.util.find_spec("mistral_common").origin).parent / "data"
    shutil.copy(data / "mistral_instruct_tokenizer_240323.model.v3", folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "LlamaTokenizer",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "chat_template": "{{ bos_token }}{% for m in messages %}"
                "{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
                "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
                "{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}{% endfor %}",
            }
        )
    )
    return AutoTokenizer.from_pretrained(folder)


async def test_the_rendered_conversation_is_the_tokens_sampled_and_trained_with_mistrals_tokenizer(mistral):
    assert len(mistral) == 32768
    said = [mistral.encode(f" {text}</s>", add_special_tokens=False) for text in ("Compute 12*34, yes.", "It is 408.")]
    policy_ = policy(*said, tokenizer=mistral, max_prompt_tokens=256)
    heard = [{"role": "tool", "content": "408, a café"}]
    rollout = await play(talk([USER], heard), policy_)
    messages = [
        USER,
        {"role": "assistant", "content": "Compute 12*34, yes."},
        *heard,
        {"role": "assistant", "content": "It is 408."},
    ]
    whole, targets = trained_tokens(rollout)
    assert whole == mistral.apply_chat_template(messages, return_dict=False)
    assert targets == said[0] + said[1]
    assert mistral.convert_ids_to_tokens(whole)[:3] == ["<s>", "[INST]", "▁"]  # its digits are tokens of their own


def test_a_template_that_marks_no_end_of_a_turn():
    plain = byte_bpe(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chat = Chat(plain)
    assert chat.end_of_turn([USER]) is None
    newline = plain.encode("\n")
    completion = Completion(
        tokens=[*plain.encode("so"), *newline], logprobs=[0.0] * 2, policy_versions=[0] * 2, finish_reason="stop"
    )
    # A newline that was sampled may be part of what was said: the template adds its own.
    assert plain.decode(chat.extend([], completion, [USER], [USER])) == "so\n\nuser: 12*34\nassistant: "


def test_messages_may_quote_the_mark_of_a_completion():
    chat = Chat(byte_bpe("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"))
    quoting = {"role": "user", "content": "what-the-policy-said, what-the-policy-said-1-"}
    assert chat.between([quoting], [USER]) == chat.between([USER], [USER])


def test_templates_that_cannot_be_used_say_why():
    with pytest.raises(ValueError, match="tokenizer.chat_template=None: the prompt is a list of messages"):
        Chat(byte_bpe(None))
    refuses = byte_bpe("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses messages of the roles user, user .roles must alternate"):
        Chat(refuses).prompt([USER, USER])
    drops = byte_bpe("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="shows an assistant message 0 times after 1 messages"):
        Chat(drops).between([USER], [USER])
