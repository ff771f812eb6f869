"""A checkpoint that cannot be written while another role writes its part."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.kit.run_config import run_config
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.record.recorder import Recorder
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train.checkpoints import Checkpoints
from torchtitan_rl.types.run_state import RunState
from torchtitan_rl.weights import checkpoint


class Role:
    """A role whose thread writes its part until `written` is set."""

    def __init__(self):
        self.written, self.staging_error, self.writing_error = asyncio.Event(), None, None

    async def stage_checkpoint(self, path):
        if self.staging_error is not None:
            raise self.staging_error
        self.path = path
        path.mkdir(exist_ok=True)

    async def checkpoint_written(self):
        if self.writing_error is not None:
            raise self.writing_error
        await self.written.wait()
        self.path.mkdir(parents=True, exist_ok=True)  # the thread makes directories where there are none
        (self.path / "part").write_text("written")
        return {}


def checkpoints_of(config, run_dir, **roles):
    async def save_teacher(file):
        pass

    config.controller.checkpoint_export = "none"
    weights, recorder = SimpleNamespace(save_teacher=save_teacher, teacher_version=None), Recorder()
    return Checkpoints(config, run_dir, roles, weights, None, dict, RunState(seed=0), recorder, num_requests=lambda: 0)


@pytest.mark.parametrize("fails", ["staging", "writing"])
async def test_nothing_is_deleted_while_another_role_still_writes(tmp_path, fails, caplog):
    run_dir, policy, critic = RunDir.create(tmp_path), Role(), Role()
    config = run_config()
    config.roles.critic = RoleConfig()
    checkpoints = checkpoints_of(config, run_dir, policy=policy, critic=critic)
    failing, writing = (critic, policy) if fails == "staging" else (policy, critic)
    setattr(failing, f"{fails}_error", OSError("no space left"))

    async def save():
        await checkpoints.save()
        await checkpoints.finish()

    saving = asyncio.ensure_future(save())
    await asyncio.sleep(0.01)
    assert not saving.done() and not caplog.records
    writing.written.set()
    await asyncio.wait_for(saving, 5)
    assert not list(run_dir.checkpoints.iterdir()) and "no space left" in caplog.text


async def test_a_run_that_fails_keeps_the_checkpoint_that_is_being_written(tmp_path):
    run_dir, policy = RunDir.create(tmp_path), Role()
    checkpoints = checkpoints_of(run_config(), run_dir, policy=policy)
    path = await checkpoints.save()
    asyncio.get_running_loop().call_later(0.01, policy.written.set)
    await checkpoints.finish_at_end()
    assert checkpoint.is_complete(path)


async def test_a_checkpoint_is_written_on_where_the_wait_for_it_is_cancelled(tmp_path):
    run_dir, policy = RunDir.create(tmp_path), Role()
    checkpoints = checkpoints_of(run_config(), run_dir, policy=policy)
    path = await checkpoints.save()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(checkpoints.finish(), 0.01)
    policy.written.set()
    await checkpoints.require_written()
    assert checkpoint.is_complete(path)
    await checkpoints.finish_at_end()


async def test_the_end_of_a_run_does_not_wait_for_ever_for_its_checkpoint(tmp_path, caplog):
    run_dir, config = RunDir.create(tmp_path), run_config()
    config.controller.call_timeout_s = 0.01
    checkpoints = checkpoints_of(config, run_dir, policy=Role())
    path = await checkpoints.save()
    await checkpoints.finish_at_end()
    assert not checkpoint.is_complete(path) and "was being written as the run ended is not complete" in caplog.text
    await checkpoints.finish_at_end()


async def test_a_damaged_record_does_not_end_the_run(tmp_path, caplog):
    run_dir, policy = RunDir.create(tmp_path), Role()
    run_dir.record("ledger", 3, [{"draw": "1/0", "event": "admitted", "task_id": "a"}])
    (file,) = run_dir.tables["ledger"].files()
    file.write_text(file.read_text().replace('"step":3', '"step":9999999999'))
    policy.written.set()
    checkpoints = checkpoints_of(run_config(), run_dir, policy=policy)
    path = await checkpoints.save()
    await checkpoints.finish()
    assert checkpoint.is_complete(path) and "table=ledger: stays as JSON lines" in caplog.text
