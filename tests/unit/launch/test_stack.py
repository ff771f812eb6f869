"""Which generators of a stack are replaced when they are lost."""

from pathlib import Path

import pytest

from tests.kit.mesh import Mesh
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.launch.stack import start_stack

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.py")


class Launcher:
    """Starts meshes that note what they are told."""

    store, one_host, schedules, takes_replicas, shares_cores = None, True, None, False, False

    async def start_store(self):
        pass

    async def start_trainer(self, trainer, model, *, role, seed, share_with=None):
        return Mesh(role)

    async def start_generator(self, generator, model, *, role, seed, share_with=None, host=None):
        return Mesh(role)

    def repair(self, generator):
        return "a repair"


@pytest.mark.parametrize("colocation, repair", [("none", "a repair"), ("policy_reference", "a repair"), ("all", None)])
async def test_generators_with_devices_of_their_own_are_replaced_and_those_that_take_turns_are_not(
    colocation, repair, tmp_path
):
    config = load_config(QUICKSTART)
    config.roles.reference = RoleConfig(trainer=config.trainer.of_role())
    config.roles.colocation = colocation
    stack = await start_stack(config, Launcher(), tmp_path)
    assert stack.generator._repair == repair
