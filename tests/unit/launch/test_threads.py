"""Cores of trainers and generators that compute at the same time."""

import pytest

from torchtitan_rl import platform
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RoleConfig, RunConfig
from torchtitan_rl.launch.threads import side_by_side
from torchtitan_rl.tasks.letter_sort import LetterSort


@pytest.mark.parametrize("num_cores, num_replicas, threads", [(2, 1, 1), (2, 4, 1), (8, 1, 4), (8, 2, 2)])
def test_either_side_gets_half_of_the_cores(num_cores, num_replicas, threads, monkeypatch):
    monkeypatch.setattr(platform, "num_cores", lambda: num_cores)
    config = RunConfig(name="unit", task=LetterSort.Config(), model=ModelConfig())
    config.generator.num_replicas, config.roles.reference = num_replicas, RoleConfig()
    shared = side_by_side(config)
    assert shared.generator.num_threads == threads
    assert all(trainer.num_threads == num_cores // 2 for trainer, _ in shared.trainers().values())
    assert config.generator.num_threads == config.trainer.num_threads == 0


def test_what_is_set_stays():
    config = RunConfig(name="unit", task=LetterSort.Config(), model=ModelConfig())
    config.trainer.num_threads, config.trainer.nice, config.generator.num_threads = 3, 5, 2
    shared = side_by_side(config)
    assert (shared.trainer.num_threads, shared.trainer.nice, shared.generator.num_threads) == (3, 5, 2)
