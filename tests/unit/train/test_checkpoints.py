"""A checkpoint that cannot be written while another role writes its part."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.kit.run_config import run_config
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train.checkpoints import Checkpoints
from torchtitan_rl.types.run_state import RunState


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


@pytest.mark.parametrize("fails", ["staging", "writing"])
async def test_nothing_is_deleted_while_another_role_still_writes(tmp_path, fails, caplog):
    run_dir, policy, critic = RunDir.create(tmp_path), Role(), Role()
    config = run_config()
    config.roles.critic, config.controller.checkpoint_export = RoleConfig(), "none"

    async def save_teacher(file):
        pass

    weights = SimpleNamespace(save_teacher=save_teacher, teacher_version=None)
    checkpoints = Checkpoints(
        config,
        run_dir,
        {"policy": policy, "critic": critic},
        weights,
        None,
        dict,
        RunState(seed=0),
        SimpleNamespace(record=lambda line: None),
        num_requests=lambda: 0,
    )
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
