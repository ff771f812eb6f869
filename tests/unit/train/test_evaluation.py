"""What an evaluation reports, worked out by hand for a policy whose right answers are counted out."""

import asyncio
import json
import random
from collections import Counter

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.kit.family import Family
from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from tests.kit.sampler import CHARS, FunctionSampler
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.run import ControllerConfig, EvalSetConfig
from torchtitan_rl.record.json_lines import json_line
from torchtitan_rl.rollout.failures import Failures
from torchtitan_rl.rollout.policy import Policy, single_turn
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.pass_rate_filter import prompt_hash
from torchtitan_rl.train.evaluation import Evaluation, eval_families, evaluate
from torchtitan_rl.types import Rollout
from torchtitan_rl.validation.run import validate

NUM_RIGHT = {"a": 0, "b": 1, "c": 2, "d": 4}  # of four samples; greedily c and d


def graded(task, completions):
    return [1.0 if completion == "y" else 0.5 for completion in completions]


def letters(reward=graded, prompts="abcd"):
    return Family(prompts=prompts, reward=reward, name="letters")


def counted_out():
    """A sampler that is right as often as NUM_RIGHT says."""
    samples = Counter()

    def answer(prompt, params):
        if params.temperature == 0.0:
            return "ny"[NUM_RIGHT[prompt] >= 2]
        samples[prompt] += 1
        return "ny"[samples[prompt] <= NUM_RIGHT[prompt]]

    return FunctionSampler(answer)


def flaky(task, completions):
    if task.prompt == "d":
        raise OSError("judge is away")
    return graded(task, completions)


async def evaluation(family=None, failures=None, sampler=None, workflow=single_turn, tasks_recorded=0, **fields):
    sampler = sampler or counted_out()

    def policy(temperature):
        return Policy(generator=sampler, tokenizer=CHARS, max_tokens=1, max_prompt_tokens=1, temperature=temperature)

    return await evaluate(
        policy,
        family or letters(),
        EvalSetConfig(**fields),
        name="set",
        label="eval/0",
        seed=0,
        config=ControllerConfig(),
        workflow=workflow,
        failures=failures,
        tasks_recorded=tasks_recorded,
    )


async def test_avg_and_pass_and_their_intervals():
    result = await evaluation(num_samples=4, pass_at_k=2)
    line = result.metrics()
    assert {name: line[name] for name in ("eval/name", "eval/split", "eval/num_tasks", "eval/accuracy")} == {
        "eval/name": "set",
        "eval/split": "validation",
        "eval/num_tasks": 4,
        "eval/accuracy": 0.5,
    }
    assert line["eval/avg_at_4"] == (0 + 1 + 2 + 4) / 16
    # Two of four are both wrong with chances 1, C(3,2)/C(4,2) = 1/2, C(2,2)/C(4,2) = 1/6 and 0.
    assert line["eval/pass_at_2"] == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)
    # tests/unit/test_metrics.py has the sums for 0, 1/4, 1/2, 1; those for 0, 1/2, 5/6, 1 go alike, with d = 0.800180
    # and 4 / d = 4.998876 tasks.
    low, high = line["eval/avg_at_4_ci95_low"], line["eval/avg_at_4_ci95_high"]
    assert (low, high) == pytest.approx((0.138931, 0.789442), abs=1e-6)
    low, high = line["eval/pass_at_2_ci95_low"], line["eval/pass_at_2_ci95_high"]
    assert (low, high) == pytest.approx((0.220123, 0.874120), abs=1e-6)
    wilson = binomtest(2, 4).proportion_ci(0.95, method="wilson")
    assert line["eval/accuracy_ci95_low"] == pytest.approx(wilson.low, abs=1e-12)
    assert result.summary() == "validation accuracy 0.500, avg@4 0.438, pass@2 0.583"


async def test_rewards_of_numpy_count_as_numbers():
    async def rewarded(task, policy, *, rollout_id, seed):
        rollout = await single_turn(task, policy, rollout_id=rollout_id, seed=seed)
        rollout.reward = np.float32(rollout.text == "y") if task.prompt in "ab" else np.int64(rollout.text == "y")
        return rollout

    result = await evaluation(workflow=rewarded, num_samples=4)
    assert result.accuracy == 0.5 and result.avg_at_n == (0 + 1 + 2 + 4) / 16
    json_line(result.metrics())


async def test_an_attempt_without_turns_is_one_wrong_attempt():
    async def sometimes(task, policy, *, rollout_id, seed):
        if task.prompt == "d" and rollout_id.endswith("/0") and policy.temperature:
            return Rollout(id=rollout_id, task=task, turns=[])
        return await single_turn(task, policy, rollout_id=rollout_id, seed=seed)

    result = await evaluation(workflow=sometimes, num_samples=4)
    assert result.accuracy == 0.5 and result.avg_at_n == (0 + 1 + 2 + 3) / 16


async def test_the_completions_of_the_first_tasks_are_kept():
    result = await evaluation(tasks_recorded=2, num_samples=2)
    assert [
        tuple(record[name] for name in ("task_index", "task_id", "sample", "text", "reward", "correct"))
        for record in result.completions
    ] == [
        (0, "letters/validation/0", 0, "n", 0.5, False),
        (1, "letters/validation/1", 0, "n", 0.5, False),
        (0, "letters/validation/0", 1, "n", 0.5, False),
        (0, "letters/validation/0", 2, "n", 0.5, False),
        (1, "letters/validation/1", 1, "y", 1.0, True),
        (1, "letters/validation/1", 2, "n", 0.5, False),
    ]
    first = result.completions[0]
    assert (first["name"], first["split"], first["prompt"], first["answer"]) == ("set", "validation", "a", "0")
    assert (first["num_tokens"], first["finish_reason"], first["failed"]) == ([1], "stop", "")
    assert (await evaluation(num_samples=2)).completions == []
    assert result.metrics() == (await evaluation(num_samples=2)).metrics()
    assert "completions" not in repr(result) and result.summary_data()["completions"] == []


async def test_a_completion_that_could_not_be_judged_is_kept_with_the_reason():
    async def lost(task, policy, **kwargs):
        if task.prompt == "c":
            raise OSError("there is no world")
        return await single_turn(task, policy, **kwargs)

    failures = Failures(AlgorithmConfig(on_rollout_failure="drop_group", max_failed_frac=1.0), {})
    kept = (await evaluation(letters(flaky), failures, workflow=lost, tasks_recorded=4)).completions
    assert [record["correct"] for record in kept] == [False] * 4
    assert (kept[2].get("text"), kept[2]["failed"]) == (None, "there is no world (0 retries)")
    assert (kept[3]["text"], kept[3]["reward"]) == ("y", None) and "judge is away" in kept[3]["failed"]


async def test_the_pass_rates_it_measured():
    sampled, greedy = (
        (await evaluation(num_samples=4)).pass_rates,
        (await evaluation(split="test", num_tasks=2)).pass_rates,
    )
    assert [(rate.split, rate.index, rate.num_correct, rate.num_samples) for rate in sampled] == [
        ("validation", 0, 0, 4),
        ("validation", 1, 1, 4),
        ("validation", 2, 2, 4),
        ("validation", 3, 4, 4),
    ]
    assert [(rate.split, rate.num_correct, rate.num_samples) for rate in greedy] == [("test", 0, 1), ("test", 0, 1)]
    assert sampled[2].prompt_hash == prompt_hash(letters().task("validation", 2)) != sampled[1].prompt_hash


async def test_a_task_whose_reward_fails_to_the_last_counts_as_wrong_where_failures_do_not_end_the_run():
    with pytest.raises(RuntimeError, match="judge is away"):
        await evaluation(letters(flaky))
    failures = Failures(AlgorithmConfig(on_rollout_failure="retry", rollout_retries=1, max_failed_frac=1.0), {})
    line = (await evaluation(letters(flaky), failures)).metrics()
    assert line["eval/accuracy"] == 0.25  # c alone; d is right, and nobody judged it
    assert line["eval/reward_mean"] == (0.5 + 0.5 + 1.0) / 3  # of those that were judged
    assert (line["failure/reward"], line["failure/attempts"]) == (2, 1) and "failure/dropped_groups" not in line


async def test_one_attempt_that_fails_is_one_wrong_attempt():
    def confused(task, completions):
        """Fails for siblings of which one is wrong, and for a wrong answer to c alone."""
        if "n" in completions and len(completions) != 1:
            raise OSError("the judge is confused by n")
        if completions == ["n"] and task.prompt == "c":
            raise OSError("the judge does not like c")
        return graded(task, completions)

    failures = Failures(AlgorithmConfig(on_rollout_failure="drop_group", max_failed_frac=1.0), {})
    result = await evaluation(letters(confused), failures, num_samples=4, pass_at_k=2)
    line, whole = result.metrics(), (await evaluation(num_samples=4, pass_at_k=2)).metrics()
    for name in ("accuracy", "avg_at_4", "pass_at_2"):  # what failed was wrong
        assert line[f"eval/{name}"] == whole[f"eval/{name}"]
    assert line["failure/attempts"] == 2  # the two wrong samples of c
    assert line["failure/reward"] == 3 + 2  # the calls for all samples of a, b and c, and two single ones
    assert result.summary() == "validation accuracy 0.500, avg@4 0.438, pass@2 0.583, 2 of 20 attempts failed"


@pytest.mark.parametrize("where", ["workflow", "reward"])
async def test_failed_attempts_take_no_more_than_themselves_from_avg_and_pass(where):
    rng, failed = random.Random(0), []

    def away(task, completions):
        if any(completion.startswith("lost") for completion in completions):
            raise OSError("judge is away")
        return graded(task, completions)

    async def unreliable(task, policy, *, rollout_id, seed):
        rollout = await single_turn(task, policy, rollout_id=rollout_id, seed=seed)
        if rng.random() < 0.01:
            failed.append(rollout.text)
            if where == "workflow":
                raise OSError("agent is away")
            rollout.text = f"lost {rollout.text}"
        return rollout

    half = FunctionSampler(lambda prompt, params: "ny"[params.seed % 2 == 0])
    asked = dict(sampler=half, num_tasks=200, num_samples=16, pass_at_k=8)
    failures = Failures(AlgorithmConfig(on_rollout_failure="drop_group"), {})
    line = (await evaluation(letters(away, "b" * 200), failures, workflow=unreliable, **asked)).metrics()
    whole = (await evaluation(letters(away, "b" * 200), **asked)).metrics()
    assert 20 < len(failed) == line["failure/attempts"] < 60  # of 3,400
    lost = {name: whole[f"eval/{name}"] - line[f"eval/{name}"] for name in ("accuracy", "avg_at_16", "pass_at_8")}
    right = failed.count("y")  # greedy or sampled
    assert lost["accuracy"] * 200 + lost["avg_at_16"] * 3200 == pytest.approx(right)
    assert lost["pass_at_8"] < 0.003 < 0.98 < whole["eval/pass_at_8"]


async def test_a_workflow_that_fails_takes_its_attempt_alone():
    async def fails_at_two(task, policy, *, rollout_id, seed):
        if rollout_id.endswith("/2"):
            raise OSError("the agent is away")
        return await single_turn(task, policy, rollout_id=rollout_id, seed=seed)

    failures = Failures(AlgorithmConfig(on_rollout_failure="drop_group", max_failed_frac=1.0), {})
    line = (await evaluation(failures=failures, workflow=fails_at_two, num_samples=4)).metrics()
    # b, c and d are right in the first samples, and the sampler does not count what was not asked.
    assert line["eval/avg_at_4"] == (0 + 1 + 2 + 3) / 16 and line["failure/workflow"] == line["failure/attempts"] == 4


async def test_after_an_attempt_that_ends_the_run_its_siblings_end_too():
    played = []

    async def workflow(task, policy, *, rollout_id, seed):
        if task.prompt == "a":
            raise RuntimeError("the tool is gone")
        await asyncio.sleep(0.01)
        played.append(task.prompt)

    with pytest.raises(RuntimeError, match="the tool is gone"):
        await evaluation(workflow=workflow)
    assert asyncio.all_tasks() == {asyncio.current_task()} and played == []


async def test_failures_of_an_evaluation_are_not_those_of_the_next_batch():
    def away(task, completions):
        raise OSError("judge is away")

    failures = Failures(AlgorithmConfig(on_rollout_failure="drop_group", max_failed_frac=1.0), {})
    result = await evaluation(letters(away), failures)
    assert result.failures == {"failure/reward": 4, "failure/attempts": 4} and result.accuracy == 0.0
    assert failures.without_failed([], batch := Counter()) == [] and not +batch
    assert failures.failed == {"reward": 4}  # and the limit of failures counts them


async def test_an_evaluation_with_failures_comes_back_from_a_checkpoint():
    result = await evaluation(failures=Failures(AlgorithmConfig(on_rollout_failure="drop_group"), {}))
    again = Evaluation(**json.loads(json.dumps(result.summary_data())))
    assert again.failures == {"failure/attempts": 0} and again.metrics() == result.metrics()


async def test_greedy_alone_and_a_single_task():
    assert (await evaluation(num_tasks=1)).metrics() == {
        "eval/name": "set",
        "eval/split": "validation",
        "eval/accuracy": 0,
        "eval/num_tasks": 1,
        "eval/reward_mean": 0.5,
    }


async def test_what_counts_as_correct_is_a_matter_of_the_set():
    line = (await evaluation(num_samples=4, correct_reward=0.5)).metrics()
    assert line["eval/accuracy"] == line["eval/avg_at_4"] == 1.0  # a wrong answer has 0.5
    assert line["eval/reward_mean"] == (0.5 + 0.5 + 1.0 + 1.0) / 4
    assert (await evaluation()).metrics()["eval/accuracy"] == 0.5  # the controller's 1.0


async def test_the_parts_of_a_reward_have_curves_in_evaluations():
    def in_parts(task, completions):
        lengths = [float(len(completion)) for completion in completions]
        return graded(task, completions), {"length": lengths, "prompt": [float(task.prompt == "d")]}

    line = (await evaluation(letters(in_parts))).metrics()
    assert (line["eval/reward_mean"], line["eval/accuracy"]) == (0.75, 0.5)
    assert (line["eval/reward_part_length_mean"], line["eval/reward_part_prompt_mean"]) == (1.0, 0.25)


def with_set(name="held_out", **fields):
    config = run_config()
    config.controller.eval_sets = {name: EvalSetConfig(**fields)}
    return config


def test_sets_have_families_of_their_own_or_the_runs():
    family = LetterSort.Config().build()
    config = with_set(task=LetterSort.Config(min_letters=2, max_letters=3, num_validation=20, num_test=20))
    validate(config)
    assert eval_families(config, family)["held_out"].num_tasks("test") == 20
    assert eval_families(with_set(split="train"), family) == {"held_out": family}
    assert eval_families(run_config(), family) == {}


def test_a_set_that_cannot_be_evaluated_or_told_apart_is_refused():
    family = LetterSort.Config().build()
    assert refusal(eval_families, with_set("letter_sort"), family) == (
        "controller.eval_sets.letter_sort: is the name of the run's own evaluations in the metrics; use another"
    )
    empty = with_set(task=LetterSort.Config(num_test=0), split="test")
    assert refusal(eval_families, empty, family).startswith("task.test: 0 tasks in letter_sort")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": "validation"}, "controller.eval_sets.validation: the run's own evaluations are validation and test"),
        ({"name": "a-b"}, "controller.eval_sets.a-b: "),
        ({"num_tasks": 0}, "controller.eval_sets.held_out.num_tasks=0: must be at least 1"),
        ({"split": "dev"}, "controller.eval_sets.held_out.split='dev': there is no such choice"),
        ({"num_samples": -1}, "controller.eval_sets.held_out.num_samples=-1: must not be negative"),
        ({"num_samples": 4, "pass_at_k": 5}, "controller.eval_sets.held_out.pass_at_k=5: must be between 0 and num_s"),
        ({"correct_reward": float("nan")}, "controller.eval_sets.held_out.correct_reward=nan: is not finite"),
        ({"num_samples": 4, "temperature": 0.0}, "controller.eval_sets.held_out.temperature=0.0: samples of one task"),
    ],
)
def test_mistakes_in_a_set_are_refused(fields, message):
    assert refusal(validate, with_set(**fields)).startswith(message)
