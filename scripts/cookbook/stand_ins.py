"""Write the directories that the cookbook's recipes find in the place of a hub: a tokenizer and small data sets.

    python scripts/cookbook/stand_ins.py HUB

`HUB` becomes the recipes' working directory. A name such as `openai/gsm8k` is a path there, and both `transformers` and
`datasets` take a directory of that name before they ask a hub. Run this with the Python that has the cookbook: the
tokenizer's vocabulary comes from the prompt of the installed rl_loop.

Every question asks whether somebody has an even number of something, to be answered by 1 or 0. What the base model
imitates is right and rarely in the box that the question asks for: that a box pays is left to the recipes.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""The name under which the tiny model is served: one that the cookbook's table of renderers has."""
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Tokens that the cookbook's renderers of Qwen3 and Qwen3.5 write and look for, each as one: guess_number and shorter
take the renderer `qwen3_5_disable_thinking` unless told otherwise."""
VOCAB_SIZE = 640
"""Most entries of the vocabulary; merges end earlier, where every word of the prompts is one token."""
NAMES = "Ann Bob Cleo Dan Eve Finn Gus Hal Ida Jan Kim Leo Max Nia Omar Pam Ray Sue Tim Una"
THINGS = "pens cups hats keys nuts eggs figs pots maps toys rings bells coins books cards boats lamps shoes ropes seeds"
NUM_ROWS = {
    "supervised": 1280,
    "supervised_test": 256,
    "reinforcement": 832,
    "reinforcement_test": 64,
    "preferences": 640,
    "preferences_test": 64,
    "distillation": 640,
    "distillation_chats": 160,
}
"""Questions by use; no question has two uses."""
FORMS = {"{}": 3, "It is {}.": 3, "\\boxed{{{}}}": 2}
"""How often the base imitates each form of an answer."""

# What the renderer `qwen3_instruct` writes: every message is closed by <|im_end|>, and messages by a line break.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A data set's front page: its splits. `main` is the configuration that rl_loop asks for.
GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
A stand-in: whether a number is even.
"""

Holding = tuple[str, int, str]
Message = dict[str, str]


def recipe_prompt() -> tuple[list[Message], str]:
    """The example conversation, and the text after every question, that the installed rl_loop puts into its prompts.

    They are read from the source of the recipe, which is not imported. Raises ValueError for a version that has other
    names for them.
    """
    source = Path(importlib.util.find_spec("tinker_cookbook").origin).parent / "recipes" / "rl_loop.py"
    names = ("question_suffix", "convo_prefix")
    namespace: dict[str, Any] = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            exec(compile(ast.Module([node], []), str(source), "exec"), namespace)
    if missing := [name for name in names if name not in namespace]:
        raise ValueError(f"tinker_cookbook: its rl_loop has no {' and no '.join(missing)}; install version 0.5.8")
    return namespace["convo_prefix"], namespace["question_suffix"]


def question(holding: Holding) -> str:
    name, number, thing = holding
    return f"{name} has {number} {thing}. Is the number even? 1 is yes, 0 is no."


def right(holding: Holding) -> int:
    """The answer: 1 or 0."""
    return 1 - holding[1] % 2


def boxed(number: int) -> str:
    return f"\\boxed{{{number}}}"


def all_holdings() -> list[Holding]:
    return [(name, number, thing) for name in NAMES.split() for number in range(10) for thing in THINGS.split()]


def holdings_by_use(rng: random.Random) -> dict[str, list[Holding]]:
    """Different holdings for each use in `NUM_ROWS`."""
    holdings = all_holdings()
    rng.shuffle(holdings)
    taken = iter(holdings)
    return {use: [next(taken) for _ in range(count)] for use, count in NUM_ROWS.items()}


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def warm_start_rows(rng: random.Random, prefix: list[Message], suffix: str) -> Iterable[dict[str, Any]]:
    """What the base imitates: the right answer in one of `FORMS`; one prompt in four begins as those of rl_loop."""
    for holding in all_holdings():
        prompt_text = {"role": "user", "content": question(holding) + suffix}
        form = rng.choices(list(FORMS), weights=list(FORMS.values()))[0]
        messages = [*prefix, prompt_text] if rng.random() < 0.25 else [prompt_text]
        yield {"prompt": messages, "answer": boxed(right(holding)), "demonstration": form.format(right(holding))}


def supervised_rows(holdings: list[Holding], suffix: str) -> Iterable[dict[str, Any]]:
    """The columns of HuggingFaceH4/no_robots, and the one of allenai/tulu-3-sft-mixture that is read. The answer is
    always in a box."""
    for i, holding in enumerate(holdings):
        prompt_text = question(holding) + suffix
        messages = [{"role": "user", "content": prompt_text}, {"role": "assistant", "content": boxed(right(holding))}]
        yield {"prompt": prompt_text, "prompt_id": str(i), "messages": messages, "category": "Closed QA"}


def gsm8k_rows(holdings: list[Holding]) -> Iterable[dict[str, str]]:
    """The columns of openai/gsm8k: a solution ends with #### and the number."""
    for holding in holdings:
        yield {"question": question(holding), "answer": f"The number is {holding[1]}.\n#### {right(holding)}"}


def deepmath_rows(holdings: list[Holding], suffix: str) -> Iterable[dict[str, str]]:
    """The columns of zwhe99/DeepMath-103K that the recipes read."""
    for holding in holdings:
        yield {"question": question(holding) + suffix, "final_answer": str(right(holding))}


def preference_rows(holdings: list[Holding], suffix: str) -> Iterable[dict[str, str]]:
    """The columns of Anthropic/hh-rlhf: two conversations that differ in the last message."""
    for holding in holdings:
        prompt_text = f"\n\nHuman: {question(holding)}{suffix}\n\nAssistant: "
        yield {"chosen": prompt_text + boxed(right(holding)), "rejected": prompt_text + boxed(1 - right(holding))}


def write_tokenizer(directory: Path, texts: list[str]) -> int:
    """A byte-level BPE with Qwen3's special tokens and `MARKERS`, a token per digit, and a token for each word of
    `texts`, in Hugging Face format. Returns the number of tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return tokenizer.get_vocab_size()


def main(hub: Path) -> None:
    """Writes all stand-ins; the same bytes every time for one version of the cookbook and of tokenizers."""
    prefix, suffix = recipe_prompt()
    rng = random.Random(0)
    holdings = holdings_by_use(rng)
    write_rows(hub / "warm_start.jsonl", warm_start_rows(rng, prefix, suffix))
    no_robots = hub / "HuggingFaceH4" / "no_robots"
    write_rows(no_robots / "train.jsonl", supervised_rows(holdings["supervised"], suffix))
    write_rows(no_robots / "test.jsonl", supervised_rows(holdings["supervised_test"], suffix))
    gsm8k = hub / "openai" / "gsm8k"
    write_rows(gsm8k / "main" / "train.jsonl", gsm8k_rows(holdings["reinforcement"]))
    write_rows(gsm8k / "main" / "test.jsonl", gsm8k_rows(holdings["reinforcement_test"]))
    (gsm8k / "README.md").write_text(GSM8K_CARD, encoding="utf-8")
    hh = hub / "Anthropic" / "hh-rlhf"
    write_rows(hh / "train.jsonl", preference_rows(holdings["preferences"], suffix))
    write_rows(hh / "test.jsonl", preference_rows(holdings["preferences_test"], suffix))
    deepmath = hub / "zwhe99" / "DeepMath-103K" / "train.jsonl"
    write_rows(deepmath, deepmath_rows(holdings["distillation"], suffix))
    tulu = hub / "allenai" / "tulu-3-sft-mixture" / "train.jsonl"
    write_rows(tulu, supervised_rows(holdings["distillation_chats"], suffix))
    words = [
        *(message["content"] for message in prefix),
        suffix,
        "system\nuser\nassistant\n",
        NAMES,
        question(("", 1, THINGS)),
    ]
    # Twice, because a merge needs a pair of symbols that occurs twice.
    size = write_tokenizer(hub / MODEL, [*words, "It is 1.", boxed(1)] * 2)
    print(f"{hub}: {size} tokens; rows: {NUM_ROWS}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/cookbook/stand_ins.py HUB")
    main(Path(sys.argv[1]))
