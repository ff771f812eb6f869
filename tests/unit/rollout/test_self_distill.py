"""The policy as its own teacher, with a sampler whose scores are made up: what is asked, and what becomes of it."""

from functools import partial

import pytest
import torch

from tests.kit.environment import AsyncScriptedEnv
from tests.kit.sampler import CHARS, policy
from torchtitan_rl.algorithm.advantages import group_centered, grpo, rloo
from torchtitan_rl.rollout.group import rollouts_of
from torchtitan_rl.rollout.multi_turn import Limits, multi_turn
from torchtitan_rl.rollout.policy import single_turn
from torchtitan_rl.rollout.self_distill import distill_group, self_distill
from torchtitan_rl.tasks.env import Step
from torchtitan_rl.tasks.letter_sort import hinted
from torchtitan_rl.types import Rollout, RolloutGroup, Task

TASK = Task(id="sort/1", prompt="cab=", answer="abc")


def hint(rollout):
    return hinted("cab", rollout.task.answer)


def scored(*said, **settings):
    """A policy that says these; every token's score is -0.1 x its position, the likeliest are the next two ids."""
    made = policy(*said, **{"for_training": "teacher_version" in settings} | settings)
    made.generator.scored = []

    async def score(tokens, *, policy_version=None):
        made.generator.scored.append((CHARS.decode(tokens), policy_version))
        return [-0.1 * position for position in range(1, len(tokens))]

    async def score_top(tokens, top_k, *, policy_version=None):
        await score(tokens, policy_version=policy_version)
        ranks = torch.arange(top_k)
        return torch.tensor(tokens[1:])[:, None] + ranks, torch.log(0.5 / (ranks + 1)).repeat(len(tokens) - 1, 1)

    made.generator.score, made.generator.score_top = score, score_top
    return made


async def play(workflow, policy, task=TASK):
    """The rollout that a workflow has played, after what the workflow does with judged rollouts."""
    rollout = await workflow(task, policy, rollout_id="0/0/0", seed=1)
    if (after_rewards := getattr(workflow, "after_rewards", None)) is not None:
        await after_rewards(RolloutGroup(id="0/0", rollouts=rollouts_of(rollout, task)), policy)
    return rollout


async def test_the_sampled_tokens_are_scored_under_the_other_prompt_by_the_teachers_version():
    student = scored("bc", teacher_version=7)
    rollout = await play(self_distill(single_turn, prompt=hint, coef=2.0), student)
    assert student.generator.scored == [("cab:abc=bc", 7)]
    (turn,) = rollout.turns
    assert CHARS.decode(turn.prompt_tokens) == "cab=" and rollout.text == "bc"  # what trains is the plain prompt
    # The student said each with -0.5; "b" is at position 8 of what the teacher read, "c" at 9.
    assert turn.advantages == pytest.approx([-2 * (-0.5 + 0.8), -2 * (-0.5 + 0.9)])
    assert turn.advantages_version is None and turn.soft_targets is None


async def test_in_evaluations_nothing_is_scored():
    student = scored("bc")
    assert (await play(self_distill(single_turn, prompt=hint), student)).turns[
        0
    ].advantages is None and not student.generator.scored


async def test_the_likeliest_tokens_are_targets_and_the_sampled_ones_earn_nothing():
    (turn,) = (
        await play(self_distill(single_turn, prompt=hint, coef=2.0, top_k=2), scored("bc", teacher_version=1))
    ).turns
    b, c = turn.completion.tokens
    tokens, weights = turn.soft_targets
    assert tokens.tolist() == [[b, b + 1], [c, c + 1]]
    assert weights.flatten().tolist() == pytest.approx([1.0, 0.5, 1.0, 0.5])
    assert turn.advantages == [0.0, 0.0]


async def test_a_rollout_without_a_prompt_teaches_nothing():
    student = scored("bc", teacher_version=1)
    (turn,) = (await play(self_distill(single_turn, prompt=lambda rollout: None), student)).turns
    assert turn.advantages == [0.0, 0.0] and not student.generator.scored


def several_turns(task, policy, *, rollout_id, seed):
    limits = Limits(max_turns=4, max_tokens=64, timeout_s=10.0, step_timeout_s=5.0)
    question = Step(observation="?")
    env = AsyncScriptedEnv(question, question, Step(done=True), first=TASK.prompt)
    return multi_turn(task, policy, rollout_id=rollout_id, seed=seed, env=env, limits=limits)


async def test_the_teacher_reads_all_turns_and_each_is_given_its_own_scores():
    student = scored("ab", "c", "de", teacher_version=3)
    rollout = await play(self_distill(several_turns, prompt=hint, discount=1.0), student)
    assert student.generator.scored == [("cab:abc=ab?c?de", 3)]
    teacher = [-0.8, -0.9, -1.1, -1.3, -1.4]  # positions 8, 9, 11, 13, 14: the questions are nobody's
    own = [-(-0.5 - score) for score in teacher]
    want = [sum(own[i:]) for i in range(len(own))]
    assert [a for turn in rollout.turns for a in turn.advantages] == pytest.approx(want)
    assert [len(turn.advantages) for turn in rollout.turns] == [2, 1, 2]


async def test_turns_that_do_not_go_on_from_each_other_are_an_error():
    async def forgetful(task, policy, *, rollout_id, seed):
        rollout = await several_turns(task, policy, rollout_id=rollout_id, seed=seed)
        rollout.turns[1].prompt_tokens = rollout.turns[1].prompt_tokens[1:]
        return rollout

    with pytest.raises(ValueError, match="turn 1 of rollout 0/0/0 does not go on"):
        await play(self_distill(forgetful, prompt=hint), scored("ab", "c", "de", teacher_version=3))


async def test_another_temperature_is_an_error():
    with pytest.raises(ValueError, match="temperature=0.5"):
        await play(self_distill(single_turn, prompt=hint), scored("ab", teacher_version=3, temperature=0.5))


def of_a_sibling_that_succeeded(rollout, siblings):
    good = next((other for other in siblings if other.reward == 1.0), None)
    return None if good is None else hinted("cab", good.text)


@pytest.mark.parametrize("advantage_fn", [None, group_centered, partial(grpo, std="none"), rloo])
async def test_a_group_learns_from_the_sibling_that_succeeded(advantage_fn):
    student = scored("abc", "bc", teacher_version=5)
    rollouts = [await play(single_turn, student) for _ in range(2)]
    rollouts[0].reward, rollouts[1].reward = 1.0, 0.0
    hook = distill_group(prompt=of_a_sibling_that_succeeded, advantage_fn=advantage_fn)
    await hook(RolloutGroup(id="0/0", rollouts=rollouts), student)
    assert student.generator.scored == [("cab:abc=bc", 5)]  # the one that succeeded has no other to learn from
    best = {None: 0.0, rloo: 1.0}.get(advantage_fn, 0.5)
    assert rollouts[0].turns[0].advantages == [best] * 3
    assert rollouts[1].turns[0].advantages == pytest.approx([-best - 0.3, -best - 0.4])


async def test_it_decorates_a_workflow_of_ones_own():
    @self_distill(prompt=hint)
    async def mine(task, policy, *, rollout_id, seed):
        return await single_turn(task, policy, rollout_id=rollout_id, seed=seed)

    student = scored("bc", teacher_version=7)
    assert (await play(mine, student)).turns[0].advantages == pytest.approx([-0.3, -0.4]) and len(
        student.generator.scored
    ) == 1


async def test_training_without_a_version_to_teach_is_an_error():
    with pytest.raises(RuntimeError, match="teacher_version=None: nobody has said which policy version teaches"):
        await play(self_distill(single_turn, prompt=hint), scored("bc", for_training=True))


async def test_a_prompt_without_tokens_is_an_error():
    with pytest.raises(ValueError, match="prompt='': of rollout 0/0/0 has no tokens; give some, or None"):
        await play(self_distill(single_turn, prompt=lambda rollout: ""), scored("bc", teacher_version=1))


async def test_rollouts_of_another_role_and_without_turns_are_no_siblings():
    student = scored("abc", "bc", "abc", teacher_version=5)
    rollouts = [await play(single_turn, student) for _ in range(3)]
    rollouts[0].role, rollouts[1].reward = "judge", 0.0
    rollouts[0].reward = rollouts[2].reward = 1.0
    empty = Rollout(id="0/0/3", task=TASK, turns=[])
    seen = []

    def note(rollout, siblings):
        seen.append((rollout.role, len(siblings)))

    await distill_group(prompt=note)(RolloutGroup(id="0/0", rollouts=[*rollouts, empty]), student)
    assert sorted(seen) == [("judge", 0), ("policy", 1), ("policy", 1)]
