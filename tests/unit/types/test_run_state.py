"""What a run remembers beside the weights."""

import json
import random
from functools import partial

import numpy
import pytest
import torch

from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train.numeric_guard import count_step
from torchtitan_rl.train.role_step import RoleStep
from torchtitan_rl.types import OptimStepOutput
from torchtitan_rl.types.ends import Diverged
from torchtitan_rl.types.run_state import RunState, random_states, set_random_states


def step(version: int, *, skipped: bool = False, loss: float = 0.5) -> RoleStep:
    return RoleStep(OptimStepOutput(grad_norm=1.0, lr=0.1, policy_version=version, skipped=skipped), loss)


def test_bad_steps_are_counted_in_a_row_for_each_role(tmp_path):
    state, run_dir = RunState(seed=0), RunDir.create(tmp_path / "run")
    count = partial(count_step, run_dir, state, data=[], max_skipped=3)
    count({"policy": step(0, skipped=True), "critic": step(0)})
    count({"policy": step(1, loss=float("nan")), "critic": step(0)})  # taken, and no number
    assert state.skipped_in_a_row == {"policy": 2, "critic": 0} and state.policy_version == 1
    count({"policy": step(2), "critic": step(0, loss=float("inf"))})
    assert state.skipped_in_a_row == {"policy": 0, "critic": 1}
    count({"policy": step(2), "critic": step(0, loss=float("inf"))})
    with pytest.raises(Diverged, match="3 optimizer steps of the critic in a row"):
        count({"policy": step(2), "critic": step(0, skipped=True)})


def test_random_states_come_back_through_a_file():
    saved = json.loads(json.dumps(random_states()))
    drawn = [random.random(), random.gauss(0, 1), numpy.random.rand(), float(torch.rand(()))]
    set_random_states(saved)
    assert [random.random(), random.gauss(0, 1), numpy.random.rand(), float(torch.rand(()))] == drawn


def test_evaluations_of_the_present_step_are_due_again_whether_they_were_made_or_not():
    state = RunState(seed=1, step=4, evaluations_due=["second"])
    state.note_evaluation("first", 2, {"accuracy": 0.25})
    state.note_evaluation("first", 4, {"accuracy": 0.5})
    state.note_evaluation("third", 2, {"accuracy": 1.0})
    state.make_due(["first", "second", "third"])
    assert state.evaluations_due == ["first", "second"] and state.evaluation_now("first") is None
    assert state.accuracies == {"first": {"2": 0.25}, "third": {"2": 1.0}}
