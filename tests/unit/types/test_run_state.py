"""What a run remembers beside the weights."""

import json
import random

import numpy
import torch

from torchtitan_rl.train.role_step import RoleStep
from torchtitan_rl.train.step import count_bad
from torchtitan_rl.types import OptimStepOutput
from torchtitan_rl.types.run_state import RunState, random_states, set_random_states


def step(version: int, *, skipped: bool = False, loss: float = 0.5) -> RoleStep:
    return RoleStep(OptimStepOutput(grad_norm=1.0, lr=0.1, policy_version=version, skipped=skipped), loss)


def test_bad_steps_are_counted_in_a_row_for_each_role():
    state = RunState(seed=0)
    assert count_bad(state, {"policy": step(0, skipped=True), "critic": step(0)}) == ["policy"]
    assert count_bad(state, {"policy": step(1, loss=float("nan")), "critic": step(0)}) == [
        "policy"
    ]  # taken, and no number
    assert state.skipped_in_a_row == {"policy": 2, "critic": 0} and state.policy_version == 1
    assert count_bad(state, {"policy": step(2), "critic": step(0, loss=float("inf"))}) == ["critic"]
    assert state.skipped_in_a_row == {"policy": 0, "critic": 1}


def test_random_states_come_back_through_a_file():
    saved = json.loads(json.dumps(random_states()))
    drawn = [random.random(), random.gauss(0, 1), numpy.random.rand(), float(torch.rand(()))]
    set_random_states(saved)
    assert [random.random(), random.gauss(0, 1), numpy.random.rand(), float(torch.rand(()))] == drawn
