"""The work of a whole step: the same tasks, lengths and rewards for our sides and for TRL's."""

import json
from pathlib import Path

import pytest

from torchtitan_rl.tools.bench import stepping
from torchtitan_rl.tools.bench.controlled import group_lengths, run_config
from torchtitan_rl.tools.bench.length_tasks import LengthTasks, prompt_text, share_of_digits
from torchtitan_rl.tools.bench.workload import SHAPES, Workload

WORK = Workload(size="3m", shape=SHAPES["qwen3"]["3m"], dtype="bfloat16", num_prompts=4, group_size=2)


def written(tmp_path: Path) -> dict:
    stepping.write_work(tmp_path / "work.json", WORK, ["fixed", "skewed"], 2, Path("model"), 8)
    return json.loads((tmp_path / "work.json").read_text())


def test_trl_gets_a_step_for_each_round_with_the_lengths_of_the_workload(tmp_path):
    work = written(tmp_path)
    assert (work["bf16"], work["microbatches"], work["group_size"]) == (True, 8, 2)
    for part, lengths in zip(work["parts"], ["fixed", "skewed"], strict=True):
        assert part["steps"] == 3 and part["lengths"] == WORK.completion_lengths(lengths)


def test_both_get_the_same_prompts_and_lengths(tmp_path):
    tasks = LengthTasks(LengthTasks.Config(lengths=group_lengths(WORK, "skewed")))
    of_run = [tasks.task("train", index) for index in range(3 * 4)]
    part = written(tmp_path)["parts"][1]
    assert [task.prompt for task in of_run] == part["prompts"]
    assert [length for task in of_run[:4] for length in task.answer] == part["lengths"]
    assert of_run[4].answer == of_run[0].answer and of_run[4].prompt != of_run[0].prompt


def test_the_objective_is_the_same(tmp_path):
    work, config = written(tmp_path), run_config(WORK, Path("model"), Path("run"))
    assert config.algorithm.loss_config == {"clip_low": work["clip"], "clip_high": work["clip"]}
    assert (config.trainer.optimizer.lr, config.trainer.training.max_norm) == (work["lr"], work["max_norm"])
    assert config.trainer.optimizer.weight_decay == 0 and config.algorithm.schedule.decay == "constant"


def test_a_prompt_is_six_letters():
    assert len(prompt_text(0)) == 6 and prompt_text(0).isalpha() and prompt_text(0) != prompt_text(1)


@pytest.mark.parametrize("text, reward", [("12ab", 0.5), ("", 0.0), ("a", 0.0), ("7", 1.0)])
def test_the_reward_is_the_share_of_digits(text, reward):
    assert share_of_digits([text]) == [reward]
