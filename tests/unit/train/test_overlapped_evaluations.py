"""Evaluations beside training: which version they ask for, what waits for them, what a checkpoint says of them."""

import asyncio

import pytest

from tests.kit.versions import Versions
from torchtitan_rl.config.run import ControllerConfig, EvalSetConfig
from torchtitan_rl.record.recorder import Recorder
from torchtitan_rl.train.early_stop import EarlyEnd
from torchtitan_rl.train.evaluation import Evaluation
from torchtitan_rl.train.overlapped_evaluations import OverlappedEvaluations
from torchtitan_rl.train.retention import superfluous
from torchtitan_rl.types.run_state import RunState


class Run:
    """A state after step 4, and evaluations that end when `done` is set; each of them is noted with its version."""

    def __init__(self, state=None, error=None, **stop):
        self.config = ControllerConfig(num_steps=20, eval_sets={"hard": EvalSetConfig()}, keep_best="validation")
        for name, value in stop.items():
            setattr(self.config.stop, name, value)
        self.state = state or RunState(seed=0, step=4)
        self.versions, self.done, self.error, self.made = Versions(7), asyncio.Event(), error, []
        self.recorder = Recorder()
        self.beside = OverlappedEvaluations(self.config, self, self.versions, self.state, self.recorder)

    async def publish(self):
        await self.beside.finish()
        self.versions.served += 1
        return self.versions.served

    async def evaluate_named(self, name, step, *, version):
        if name == "hard":
            await self.done.wait()
        if self.error:
            raise self.error
        self.made.append((name, step, version))
        return Evaluation(name=name, split="validation", num_tasks=1, accuracy=0.5)


async def test_the_publication_waits_and_the_result_belongs_to_the_step_before():
    run = Run()
    await run.beside.begin()
    publishing = asyncio.ensure_future(run.publish())
    run.state.step = 5  # the next batch has trained
    await asyncio.sleep(0.01)
    assert not publishing.done() and run.versions.holds == [(7, "evaluation")]
    assert run.state.evaluations_due == ["hard"] and run.state.accuracies == {"validation": {"4": 0.5}}
    run.done.set()
    assert await publishing == 8 and run.made == [("validation", 4, 7), ("hard", 4, 7)]
    assert run.state.evaluations_due == [] and run.state.accuracies["hard"] == {"4": 0.5}
    assert await run.publish() == 9 and run.versions.holds == []


async def test_evaluations_that_begin_before_a_publication_wait_for_those_before():
    run = Run()
    await run.beside.begin()
    asyncio.get_running_loop().call_later(0.01, run.done.set)
    await run.beside.begin()
    assert await run.publish() == 8 and run.versions.holds == [] and run.state.evaluations_due == []
    assert run.made == 2 * [("validation", 4, 7), ("hard", 4, 7)]


async def test_a_resumed_run_makes_the_evaluations_that_are_due_and_no_other():
    run = Run(RunState(seed=0, step=4, evaluations_due=["hard"]))
    run.done.set()
    run.beside.begin_due()
    run.beside.begin_due()
    await run.publish()
    assert run.made == [("hard", 4, 7)]
    run.beside.begin_due()
    assert run.versions.holds == []


async def test_an_evaluation_set_that_the_config_has_no_more_is_not_due():
    run = Run(RunState(seed=0, step=4, evaluations_due=["validation", "removed"]))
    run.beside.begin_due()
    await run.publish()
    assert run.made == [("validation", 4, 7)] and run.state.evaluations_due == []


async def test_given_up_evaluations_stay_due_and_leave_nothing():
    run = Run()
    await run.beside.begin()
    await asyncio.sleep(0)
    await run.beside.cancel()
    assert run.state.evaluations_due == ["hard"] and run.versions.holds == [] and run.made[1:] == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert await run.publish() == 8  # which waits for nothing


async def test_a_failure_of_an_evaluation_ends_the_run():
    run = Run(error=ValueError("reward=2"))
    await run.beside.begin()
    with pytest.raises(ValueError, match="reward=2"):
        await run.publish()
    await run.beside.cancel()
    assert run.versions.holds == [] and run.state.evaluations_due == ["validation", "hard"]


async def test_a_result_ends_the_run_before_the_next_batch():
    run = Run(target_accuracy=0.5)
    run.done.set()
    await run.beside.begin()
    await run.publish()
    run.state.step = 5
    for end in (run.beside.begin(), asyncio.to_thread(run.beside.begin_due)):
        with pytest.raises(EarlyEnd, match="validation accuracy is 0.500 after step 4"):
            await end
    assert run.state.evaluations_due == []


def test_a_checkpoint_before_its_accuracy_is_known_is_the_newest_and_stays():
    rules = dict(keep_last=1, keep_every=0)
    assert superfluous(["step-2", "step-4"], accuracies={"2": 0.8}, **rules) == []
    assert superfluous(["step-2", "step-4", "step-6"], accuracies={"2": 0.8, "4": 0.9}, **rules) == ["step-2"]
