"""Groups that have been played, as a checkpoint holds them: written and read exactly, restored by draw."""

import math
from dataclasses import dataclass

import torch

from torchtitan_rl.rollout.finished import FinishedGroups, read, write
from torchtitan_rl.types import Completion, Rollout, RolloutGroup, Task, Turn

TASK = Task(id="sort/train/3", prompt="cab=", answer="abc")


def rollout(number, **changed):
    logprobs = [-0.1, -math.pi, -5e-324]  # the last is the smallest number of double precision
    completion = Completion(tokens=[3, 1, 2], logprobs=logprobs, policy_versions=[4, 4, 5], finish_reason="stop")
    turns = [Turn(prompt_tokens=[7, 8], completion=completion, reward=1 / 3, advantages=[0.5, -0.25, 1.0])]
    made = Rollout(
        id=f"3/0/{number}", task=TASK, turns=turns, reward=0.1 + 0.2, reward_parts={"right": 1.0}, group="3/0"
    )
    made.text, made.seconds, made.end_reason = "a\nb \u2028 \u00e9", {"play": 0.125}, "done"
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def test_experts_of_tokens_come_back_exactly_and_are_no_field_without_any(tmp_path):
    def group():
        return RolloutGroup(id="0/0", rollouts=[rollout(0), rollout(1)])

    one = group()
    experts = torch.randint(300, (4, 2, 3), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    one.rollouts[0].turns[0].completion.routed_experts = experts
    finished = played(one)
    write(tmp_path / "groups.jsonl", finished.since(0))
    [line] = read(tmp_path / "groups.jsonl")
    again = FinishedGroups()
    assert again.restore([line]) == []
    first, second = (rollout.turns[0].completion for rollout in again.take("0/0", TASK).rollouts)
    assert first.routed_experts.dtype == torch.int16 and torch.equal(first.routed_experts, experts)
    assert second.routed_experts is None
    assert "routed_experts" not in line["group"]["rollouts"][1]["turns"][0]["completion"]


def played(*groups):
    """The groups that were played for the slots from 0 on, kept."""
    finished = FinishedGroups()
    for slot, group in enumerate(groups):
        finished.keep(f"{slot}/0", TASK, group)
    return finished


def test_a_group_comes_back_exactly_and_without_what_hooks_have_made_of_it(tmp_path):
    def group():
        return RolloutGroup(id="0/0", rollouts=[rollout(0), rollout(1, masked=True)])

    one = group()
    finished = played(one)
    one.left_out, one.advantages = "zero_variance", [1.0, 2.0]
    one.rollouts[0].turns[0].completion.tokens.append(9)
    one.rollouts[0].turns[0].advantages, one.rollouts[0].reward = torch.ones(4), 7.0
    write(tmp_path / "finished.jsonl", finished.since(0))
    resumed = played()
    assert resumed.restore(read(tmp_path / "finished.jsonl")) == []
    again = resumed.take("0/0", TASK)
    assert again == group()
    assert again.rollouts[0].task is TASK
    again.rollouts[0].turns[0].completion.tokens.clear()
    assert resumed.since(0) == finished.since(0)  # the next checkpoint holds it too


def test_a_restored_group_serves_its_own_draw_once():
    lines, resumed = played(RolloutGroup(id="0/0", rollouts=[rollout(0)])).since(0), FinishedGroups()
    resumed.restore(lines)
    assert resumed.take("1/0", TASK) is None
    assert resumed.take("0/0", TASK) is not None
    assert resumed.take("0/0", TASK) is None  # a second time, by a loop of somebody's own: played by the newest policy
    resumed.restore(lines)
    assert resumed.take("0/0", Task(id="another", prompt="")) is None


def test_slots_that_have_trained_are_forgotten():
    finished = played(*(RolloutGroup(id=f"{slot}/0", rollouts=[rollout(0)]) for slot in range(12)))
    assert [line["draw"] for line in finished.since(9)] == ["9/0", "10/0", "11/0"]
    finished.forget(set(range(10)))
    assert [line["draw"] for line in finished.since(0)] == ["10/0", "11/0"]


def test_what_is_not_plain_data_is_played_again_and_a_note_says_so(tmp_path):
    @dataclass
    class Mine(Rollout):
        board: str = ""

    tensors = rollout(0)
    tensors.turns[0].advantages = torch.ones(3)
    groups = [
        RolloutGroup(id=f"{slot}/0", rollouts=[made])
        for slot, made in enumerate(
            [tensors, rollout(0, task=Task(id=TASK.id, prompt="")), Mine(id="2/0/0", task=TASK, turns=[]), rollout(0)]
        )
    ]
    finished = played(*groups)
    write(tmp_path / "finished.jsonl", finished.since(0))
    lines = read(tmp_path / "finished.jsonl")
    assert [line.get("why", "") for line in lines] == [
        "is not plain data (Object of type Tensor is not JSON serializable)",
        "rollout 3/0/0 has another task than its draw",
        "rollout 2/0/0 has a Mine, a class of the workflow's own",
        "",
    ]
    resumed = played(groups[0])
    assert resumed.restore(lines) == [
        "3 draws had finished and are played again, such as 0/0: is not plain data "
        "(Object of type Tensor is not JSON serializable)"
    ]
    assert resumed.take("3/0", TASK) == groups[3] and read(tmp_path / "missing") == []
