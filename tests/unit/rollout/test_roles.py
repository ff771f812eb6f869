"""An attempt of several rollouts: the example of docs/grouping.md, through groups, estimators and evaluations."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit.family import Family
from tests.kit.sampler import policy
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.grouping import form_groups
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.run import ControllerConfig, EvalSetConfig
from torchtitan_rl.rollout.demonstrate import demonstrate
from torchtitan_rl.rollout.group import run_group
from torchtitan_rl.rollout.self_distill import self_distill
from torchtitan_rl.train import step_metrics
from torchtitan_rl.train.evaluation import evaluate
from torchtitan_rl.types import Rollout, RolloutGroup, Task

TASK = Task(id="sort/1", prompt="ba=", answer="ab")


@pytest.fixture(scope="module")
def example():
    """The page's config after its code has run."""
    page = (Path(__file__).parents[3] / "docs" / "grouping.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "answer_and_judge" in block)
    config = SimpleNamespace(algorithm=AlgorithmConfig())
    exec(code, {"config": config})
    return config.algorithm


async def play(workflow, *said, n=2, **settings):
    return await run_group(
        workflow, TASK, policy(*said, **settings), n, group_id="0/0", seed=0, reward=None, reward_timeout_s=5.0
    )


async def test_each_role_is_compared_with_its_own_kind_and_has_its_estimator(example):
    played = await play(example.workflow, "ab", "y", "ba", "y")
    assert [(r.id, r.role, r.reward) for r in played.rollouts] == [
        ("0/0/0", "solver", 1.0),
        ("0/0/0.judge", "judge", 1.0),
        ("0/0/1", "solver", 0.0),
        ("0/0/1.judge", "judge", 0.0),
    ]
    groups = form_groups(played.rollouts, example)
    assert [(group.id, group.rewards) for group in groups] == [("0/0/solver", [1.0, 0.0]), ("0/0/judge", [1.0, 0.0])]
    data = to_datums(groups, example)
    assert [group.advantages for group in groups] == [[1.0, -1.0], [1.0, -1.0]]
    assert len(data) == 4 and {datum.group for datum in data} == {0, 1}
    line = step_metrics.batch_metrics(groups, {"generator-0": "healthy"})
    assert (line["reward/solver_mean"], line["reward/judge_mean"]) == (0.5, 0.5)


async def test_evaluations_count_the_first_rollout_of_an_attempt(example):
    result = await evaluate(
        lambda temperature: policy("ba", "n"),
        Family(prompts=[TASK.prompt]),
        EvalSetConfig(),
        name="one",
        label="eval",
        seed=0,
        config=ControllerConfig(),
        workflow=example.workflow,
    )
    assert result.accuracy == 0.0  # the answer was wrong; that the judge was right is another matter


async def test_a_demonstration_is_played_through_all_of_it(example):
    task = Task(id="sort/1", prompt="ba=", answer="ab", demonstration=["ab", "y"])
    pairs = await demonstrate(example.workflow, task, policy(max_tokens=3))
    assert len(pairs) == 2 and len(pairs[1][0]) == len("ba=ab?")


async def test_each_of_them_can_be_taught(example):
    student = policy("ab", "y", for_training=True, teacher_version=2)

    async def score(tokens, *, policy_version=None):
        return [-1.0] * (len(tokens) - 1)

    student.generator.score = score
    taught = self_distill(example.workflow, prompt=lambda rollout: "z")
    attempt = await taught(TASK, student, rollout_id="0", seed=0)
    await taught.after_rewards(RolloutGroup(id="0", rollouts=attempt), student)
    assert [rollout.turns[0].advantages for rollout in attempt] == [[-0.5] * 2, [-0.5]]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([], "returned list"),
        ([Rollout(id="a", task=TASK, turns=[]), None], "returned NoneType"),
        (None, "returned NoneType"),
        ([Rollout(id="a", task=TASK, turns=[])] * 2, "the id 'a'; give each its own"),
    ],
)
async def test_what_is_no_list_of_rollouts_is_an_error(made, words):
    async def workflow(task, policy, *, rollout_id, seed):
        return made

    with pytest.raises(RuntimeError, match=words):
        await play(workflow, n=1)
