"""docs/mistakes.md: each mistake of the page is made here, and its message is the page's, to the letter.

`python -m tests.unit.test_mistakes` prints the page as it should be.
"""

import contextlib
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from torchtitan_rl.cli import main

ROOT = Path(__file__).parents[2]
HEAD = """import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets
from torchtitan_rl.tasks.gsm8k import Gsm8k
from torchtitan_rl.tasks.letter_sort import LetterSort
import quickstart

"""
BODY = """
def config():
    config = quickstart.config()
    {line}
    return config
"""

FLAGS = {
    "a file that is not there": "quikstart.py",
    "a field that is somewhere else": "quickstart.py --trainer.lr 1e-4",
    "a flag with two near names": "quickstart.py --controller.eval-task 64",
    "a value that is no number": "quickstart.py --trainer.optimizer.lr fast",
    "a choice that does not exist": "quickstart.py --generator.model-runner v3",
    "a flag without its value": "quickstart.py --seed",
    "an argument that the loss does not have": "quickstart.py --algorithm.loss-config.clip-hihg 0.3",
    "a function without its module": "quickstart.py --algorithm.loss-fn gspo",
    "a function that the module does not have": "quickstart.py --algorithm.loss-fn torchtitan_rl.algorithm.losses:gpso",
    "a gradient clip of 0 for none": "quickstart.py --trainer.training.max-norm 0",
    "one rollout per task": "quickstart.py --algorithm.group-size 1",
    "a KL without a reference": "quickstart.py --algorithm.kl-coef 0.04",
    "a completion longer than the model": "quickstart.py --sampling.max-tokens 600",
    "a layout that does not divide the model": "quickstart.py --generator.tensor-parallel-degree 3",
    "fewer tokens than sequences in an iteration": "quickstart.py --generator.max-num-batched-tokens 256",
    "a model too small for the tokenizer": "quickstart.py --model.shape.vocab-size 32",
    "steps that end within a batch": "quickstart.py --controller.num-steps 101 --algorithm.tasks-per-minibatch 16",
    "greedy training samples": "quickstart.py --algorithm.temperature 0",
    "a split without tasks": "quickstart.py --task.num-validation 0",
    "a learning rate far outside what works": "quickstart.py --trainer.optimizer.lr 1",
    "a group too small to compare": "quickstart.py --algorithm.group-size 2",
}
LINES = {
    "a number in quotes": 'config.trainer.optimizer.lr = "1e-3"',
    "a misspelt section": "config.trainer.optimiser.lr = 1e-3",
    "a misspelt argument": "config.trainer.optimizer = rl.AdamWConfig(learning_rate=1e-3)",
    "a misspelt argument of a preset": "config.algorithm = presets.grpo(group_sise=4)",
    "a task in place of its config": "config.task = LetterSort",
    "a function's name in place of the function": 'config.algorithm.advantage_fn = "grpo"',
    "steps that are no whole number": "config.controller.num_steps = 10.5",
    "a choice that does not exist, in the file": 'config.generator.model_runner = "v3"',
    "a name that is not imported": "config.algorithm.reduction = reductions.sequence_mean",
    "a config that is not returned": "return None",
    "a data file that is not there": 'config.task = Gsm8k.Config(path="trian.jsonl", test_path="test.jsonl")',
}
FUNCTIONS = {
    "a reward that raises": (
        "def reward(task, completions):\n    return [float(c == task.anwser) for c in completions]",
        "config.task.reward = reward",
    ),
    "a reward that returns nothing": (
        "def reward(task, completions):\n    print(completions[0])",
        "config.task.reward = reward",
    ),
    "a reward for the first completion only": (
        "def reward(task, completions):\n    return [float(completions[0] == task.answer)]",
        "config.task.reward = reward",
    ),
    "a loss that takes the mean itself": (
        "def loss(inputs):\n    return -(inputs.policy_logprobs * inputs.advantages).mean(), {}",
        "config.algorithm.loss_fn, config.algorithm.loss_config = loss, {}",
    ),
    "a loss without a gradient": (
        "def loss(inputs):\n"
        "    return -(inputs.token_weights * inputs.sampling_logprobs * inputs.advantages).sum(), {}",
        "config.algorithm.loss_fn, config.algorithm.loss_config = loss, {}",
    ),
    "a lag with a loss for samples of one's own": (
        "def loss(inputs):\n    return -(inputs.token_weights * inputs.policy_logprobs * inputs.advantages).sum(), {}",
        "config.algorithm.loss_fn, config.algorithm.loss_config, config.algorithm.max_policy_lag = loss, {}, 1",
    ),
    "a loss that returns no metrics": (
        "def loss(inputs):\n    return -(inputs.token_weights * inputs.policy_logprobs * inputs.advantages).sum()",
        "config.algorithm.loss_fn, config.algorithm.loss_config = loss, {}",
    ),
    "a loss that reads what the run does not have": (
        "def loss(inputs):\n"
        "    return (inputs.token_weights * inputs.policy_logprobs * inputs.reference_logprobs).sum(), {}",
        "config.algorithm.loss_fn, config.algorithm.loss_config = loss, {}",
    ),
    "an estimator that divides by zero": (
        "def maxrl(rewards):\n    return (rewards - rewards.mean()) / rewards.mean()",
        "config.algorithm.advantage_fn = maxrl",
    ),
    "a task family that reads a file that is not there": (
        "from dataclasses import dataclass\n\n"
        "@dataclass\nclass Rows:\n    path: str = 'trian.jsonl'\n    def build(self):\n"
        "        return list(open(self.path))",
        "config.task = Rows()",
    ),
    "a misspelt field of a task of one's own": (
        "from dataclasses import dataclass\n\n"
        "@dataclass\nclass Rows:\n    max_rows: int = 100\n    def build(self): ...",
        "config.task = Rows(); config.task.max_row = 5",
    ),
    "a workflow with other arguments": ("async def play(task, policy): ...", "config.algorithm.workflow = play"),
}


def printed(arguments: list[str]) -> str:
    """What `torchtitan-rl train ... --dry-run` writes to stderr."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        main.main(["train", *arguments, "--dry-run"])
    return errors.getvalue().strip()


def file_of(line: str, functions: str = "") -> str:
    return HEAD + (functions + "\n" if functions else "") + BODY.format(line=line)


def cases() -> dict[str, tuple[str, str, str]]:
    """Title -> (what the user wrote, arguments, text of my_run.py)."""
    made = {title: (f"torchtitan-rl train {flags}", flags, "") for title, flags in FLAGS.items()}
    made |= {title: (line, "my_run.py", file_of(line)) for title, line in LINES.items()}
    made |= {
        title: (f"{functions}\n...\n    {line}", "my_run.py", file_of(line, functions))
        for title, (functions, line) in FUNCTIONS.items()
    }
    return made


def message_of(title: str, directory: Path) -> str:
    """The message of one mistake, made in a directory."""
    _, arguments, text = cases()[title]
    shutil.copy(ROOT / "configs" / "quickstart.py", directory)
    if text:
        (directory / "my_run.py").write_text(text)
    path, environment = list(sys.path), dict(os.environ)
    before = os.getcwd()
    os.chdir(directory)
    try:
        return printed(arguments.split())
    finally:
        os.chdir(before)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
        sys.modules.pop("quickstart", None)


def entry(title: str, message: str) -> str:
    """The page's entry of one mistake."""
    written, _, text = cases()[title]
    language = "python" if text else "bash"
    return f"**{title[0].upper()}{title[1:]}**\n```{language}\n{written}\n```\n```text\n{message}\n```\n"


@pytest.mark.parametrize("title", cases())
def test_a_mistake_has_the_message_of_the_page(title, tmp_path):
    message = message_of(title, tmp_path)
    assert message.startswith(("error: ", "warning: ")) and len(message.splitlines()) <= 3
    assert entry(title, message) in (ROOT / "docs" / "mistakes.md").read_text()


def test_the_page_has_no_other_mistakes():
    page = (ROOT / "docs" / "mistakes.md").read_text()
    assert page.count("```text\n") == len(cases()) >= 30


def page() -> str:
    with tempfile.TemporaryDirectory() as directory:
        entries = []
        for number, title in enumerate(cases()):
            place = Path(directory) / str(number)
            place.mkdir()
            entries.append(entry(title, message_of(title, place)))
    return INTRODUCTION + "\n" + "\n".join(entries)


INTRODUCTION = f"""# Mistakes, and what is said of them

{len(cases())} mistakes that a first afternoon may bring, each with what the command prints.
`tests/unit/test_mistakes.py` makes every one of them and compares the message with this page.

All are found by `torchtitan-rl train CONFIG --dry-run`, and by `train` before a process starts. Both call the reward on
two made-up completions of a real task; `--no-reward-check` leaves the call out, for a reward that costs money. In a
config file `config` is the quickstart's, and `my_run.py` is the file. A message about a function of yours has the
function's file and line. What only a run can show is said during the run: groups without signal, once, after ten steps
in which at least nine groups in ten had equal rewards.
"""

if __name__ == "__main__":
    print(page(), end="")
