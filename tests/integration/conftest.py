"""One running stack, shared by the tests that do not break it: real actors, real engine, real store."""

import asyncio
from pathlib import Path

import pytest

from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.run import RunConfig

ROOT = Path(__file__).parents[2]


def small_config(output_dir: Path, **overrides) -> RunConfig:
    """The quickstart's model and task, with short phases."""
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.output_dir = str(output_dir)
    config.supervised.num_steps, config.supervised.batch_size = 2, 8
    config.algorithm.tasks_per_step, config.algorithm.group_size = 4, 4
    config.controller.num_steps, config.controller.eval_every = 2, 0
    config.controller.eval_tasks, config.controller.test_tasks, config.controller.pass_at_k = 8, 8, 2
    config.controller.call_timeout_s = config.controller.sample_timeout_s = 120
    config.generator.max_num_seqs = 64
    for path, value in overrides.items():
        *parents, last = path.split("__")
        target = config
        for name in parents:
            target = getattr(target, name)
        setattr(target, last, value)
    return config


@pytest.fixture(scope="session")
def loop():
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def controller(loop, tmp_path_factory):
    from torchtitan_rl.run.controller import Controller

    controller = loop.run_until_complete(Controller.launch(small_config(tmp_path_factory.mktemp("run") / "shared")))
    yield controller
    loop.run_until_complete(controller.close())
